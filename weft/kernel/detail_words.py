"""Beginnings of an instance's detail by which others than its runner know what is wrong."""

MODEL_NOT_LISTED = "the server has no model "
"""A server that weft did not start lists other models than the one that it is attached for."""
