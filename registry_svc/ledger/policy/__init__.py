"""Pure decisions about leases, devices, the wait queue and eviction, from values and `now`."""
