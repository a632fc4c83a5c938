"""Governed work on the mesh: durable, cancellable, audited."""
