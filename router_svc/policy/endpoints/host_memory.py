"""The accelerator memory of one host as the registry's VRAM ledger has it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHolder:
    """One holder of memory on a host."""

    name: str
    """Name of a model, or the name that a program gave itself."""
    is_model: bool
    """Whether `name` is a model of the mesh, which can be evicted when it is idle and not pinned; a program never
    is."""
    held_bytes: int
    pinned: bool = False
    is_leaving: bool = False
    """Whether its memory is being released."""
    is_lost: bool = False
    """Whether its runner is silent and its memory has not been observed as free."""
    active_requests: int = 0
    """Requests that it works on, as its runner last reported."""
    unowned: bool = False
    """Whether no runner of the mesh owns it any more: then no load can count on its eviction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of one host at one moment.

    Memory that is neither free nor in `holders` is used by processes without a lease.
    """

    host: str
    total_bytes: int
    """Total of all devices, without the margins that are never leased."""
    free_bytes: int
    """Memory available to a new lease now."""
    holders: tuple[MemoryHolder, ...] = ()
