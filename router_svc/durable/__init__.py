"""Durable work in the router's database: tasks, batches with their files, and stored responses."""
