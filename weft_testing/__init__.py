"""Fakes and conformance suites, shipped so that anyone can test against the mesh."""
