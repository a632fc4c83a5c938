"""Trials: the pairs of answers of two models, their checks, and the verdicts of people."""
