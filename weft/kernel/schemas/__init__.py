"""Validation of values, messages and schemas, and bounds on what schemas cost an engine."""
