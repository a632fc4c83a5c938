"""Tokens that allow operations: how they are made, and the formats that makers and checkers share."""
