"""Durable work: ports, messages and gRPC clients for tasks, batches, files and stored responses."""
