"""Shared parts of SQL stores: opening, schema and migrations, SQLite tuning, and clock correction."""
