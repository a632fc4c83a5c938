"""Durable tasks over HTTP: requests of the inference APIs that outlive their callers' connections."""
