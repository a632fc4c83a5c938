"""Conformance suites: one per port; every implementation runs its own."""
