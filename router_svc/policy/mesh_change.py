"""What the scheduler is told of the mesh: only what changed."""

from collections.abc import Mapping
from dataclasses import dataclass

from router_svc.policy.candidates import Candidate
from router_svc.policy.host_memory import HostMemory
from router_svc.policy.routes import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshChange:
    """Some of the mesh is different now; what is not named is as it was."""

    candidates: tuple[Candidate, ...] = ()
    """Models that appeared or changed, each with all that is known of it."""
    gone: tuple[str, ...] = ()
    """Models that are no longer in the mesh, by name."""
    hosts: Mapping[str, HostMemory] | None = None
    """The memory of all hosts that have a book of it; None: as it was."""
    routes: Mapping[str, Route] | None = None
    """All routes by name; None: as they were."""
    cloud_fallback: bool | None = None
    """Whether routes may fall back to models off the premises; None: as it was."""
