"""Bounded readers of the headers of model files."""
