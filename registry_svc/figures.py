"""The values that the registry's metrics show."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.api.registry.v1 import lease_service_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryFigures:
    """The state of a running registry."""

    hosts: Iterable[pb.HostMemory]
    active_sessions: int
    inactive_sessions: int
    revision: int
    """Number of the last change sent to watchers."""
    watchers: int
    evictions: Mapping[str, int]
    """Evictions requested from runners since the start, by their answer."""
    has_standby: bool = False
    """Whether a standby is connected."""
