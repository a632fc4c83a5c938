"""Where an instance is in its life."""

from enum import IntEnum


class Phase(IntEnum):
    """Numbers as in `registry.v1.InstanceState.Phase`, whose comments define them."""

    IDLE = 1
    LOADING = 2
    READY = 3
    DRAINING = 4
    STOPPING = 5
    CRASH_LOOP = 6
    FAILED = 7
    HIBERNATING = 8
