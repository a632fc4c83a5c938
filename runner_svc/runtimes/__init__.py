"""The runtimes that a runner supports, one folder each."""
