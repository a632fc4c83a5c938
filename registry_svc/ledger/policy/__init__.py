"""Decisions about leases, devices, the wait queue and eviction, pure: values and `now` in, decisions out."""
