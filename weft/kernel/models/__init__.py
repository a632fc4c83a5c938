"""Sources, short names and load parameters of models."""
