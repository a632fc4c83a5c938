"""Accelerator memory of a runner's models: estimates, measurements and leases."""
