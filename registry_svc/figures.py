"""The state of a registry that its metrics show."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.api.registry.v1 import lease_service_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryFigures:
    """The state of a registry that runs."""

    hosts: Iterable[pb.HostMemory]
    active_sessions: int
    inactive_sessions: int
    revision: int
    """The number of the last change that watchers got."""
    watchers: int
    evictions: Mapping[str, int]
    """Evictions that runners were asked for since the start, by their answer."""
    has_standby: bool = False
    """Whether a standby waits for its end."""
