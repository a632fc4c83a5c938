"""Words every part of the mesh uses about a request."""

from dataclasses import dataclass
from enum import IntEnum


class Priority(IntEnum):
    """The band a request waits in; numbers as in `common.v1.Priority`, a lower one goes first."""

    HIGH = 1
    NORMAL = 2
    LOW = 3


class Operation(IntEnum):
    """What is asked of a model; numbers as in `registry.v1.ModelOperation`."""

    CHAT = 1
    COMPLETION = 2
    EMBEDDING = 3


class CacheMode(IntEnum):
    """Whether a request uses the prefix cache; numbers as in `common.v1.CacheMode`."""

    AUTO = 1
    PREFIX = 2
    NONE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """What a request says about how its runner handles it; the default is as the model is configured."""

    cache_mode: CacheMode = CacheMode.AUTO
    cache_tag: str = ""
    """Cached prefixes are shared only among requests of one tenant with the same tag."""
    keep_alive_seconds: float | None = None
    """How long the model stays loaded afterwards; negative: until it is unloaded; None: as it is configured."""
