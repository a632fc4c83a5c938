"""Conformance suites, one per port; every implementation of a port runs its suite."""
