"""The scheduler in virtual time: the policy of `router_svc.policy` over hosts, models and callers that are made up.

Nothing here has a clock, sleeps, or does I/O. The same scenario and seed give the same run, event by event.
"""
