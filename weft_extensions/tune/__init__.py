"""Tuning: the best load parameters of a model for its machine, by measuring while it is idle."""
