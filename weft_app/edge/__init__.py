"""Envoy as the edge of a mesh: the generator of its configuration, and the process."""
