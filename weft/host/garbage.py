"""The garbage collector, told what a server is like."""

import gc

YOUNG_OBJECTS = 20_000
"""Allocations before a young collection; Python's 700 to 2,000 make a busy host collect several times a request."""
YOUNG_PER_MIDDLE = 20
MIDDLE_PER_OLD = 50


def settle_garbage_collector() -> None:
    """Call once everything is up: what is alive now (modules, routes, schemas) is never looked at again.

    Measured in bench, 2 cores: about 80 us less CPU per unary request in the host process, for about 12 MB more memory
    after load.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_PER_MIDDLE, MIDDLE_PER_OLD)
