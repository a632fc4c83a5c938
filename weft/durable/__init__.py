"""Durable work: tasks, batches, files and kept responses as ports, their messages, and their gRPC clients."""
