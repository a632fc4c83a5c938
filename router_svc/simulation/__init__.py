"""The simulator: the policy of `router_svc.policy` in virtual time, on hosts, models and traffic of a scenario.

Nothing here has a clock, sleeps, or does I/O. The same scenario and seed give the same run, event by event.
"""
