"""Batches, their items (which are tasks), and their input and result files in the router's database."""
