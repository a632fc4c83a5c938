"""Envoy as the edge of a mesh: generates its configuration and runs it."""
