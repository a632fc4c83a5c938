"""The registry's database: its schema, its engine, who owns it, and the migrations."""
