"""The simulator: runs `router_svc.policy` in virtual time on the hosts, models and traffic of a scenario.

It has no clock, sleeps or I/O. Equal scenarios and seeds give equal runs, event by event.
"""
