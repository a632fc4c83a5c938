"""Responses beyond their request: running ones that others look at and end, kept ones, and those they continue."""
