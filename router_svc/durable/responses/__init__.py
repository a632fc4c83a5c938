"""Answers that callers may come back to, kept in the router's database."""
