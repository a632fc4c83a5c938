"""The runtimes that a runner can have: one folder each."""
