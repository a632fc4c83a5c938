"""Files and batches: many tasks as one, in the router's database."""
