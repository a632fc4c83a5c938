"""Accelerator memory as a runner sees it: what a model takes, and the lease for it."""
