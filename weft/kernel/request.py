"""Two words every part of the mesh uses about a request."""

from enum import IntEnum


class Priority(IntEnum):
    """The band a request waits in; numbers as in `router.v1.Priority`, a lower one goes first."""

    HIGH = 1
    NORMAL = 2
    LOW = 3


class Operation(IntEnum):
    """What is asked of a model; numbers as in `registry.v1.ModelOperation`."""

    CHAT = 1
    COMPLETION = 2
    EMBEDDING = 3
