"""What SQL stores share: opening, schema and migrations, SQLite tuning, and clock correction."""
