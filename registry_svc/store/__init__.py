"""The registry's database: its tables, its owner, and files beside it."""
