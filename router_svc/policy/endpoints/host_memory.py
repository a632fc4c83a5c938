"""The accelerator memory of one host, as the registry's book has it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHolder:
    """Who holds memory of a host."""

    name: str
    """A model's name, or what a program calls itself."""
    is_model: bool
    """Whether `name` is a model of the mesh, which gives way when it is idle and not pinned; a program never does."""
    held_bytes: int
    pinned: bool = False
    is_leaving: bool = False
    """Its memory is on its way back."""
    is_lost: bool = False
    """Its runner is not heard of, and the memory has not been seen back."""
    active_requests: int = 0
    """What it works on, as its runner said last."""
    unowned: bool = False
    """Whether no runner of the mesh answers for it any more: then no load can count on its giving way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """One host at one moment. What is missing in `holders` up to the total is used by processes without a lease."""

    host: str
    total_bytes: int
    """Of all devices, without the margins that are never booked."""
    free_bytes: int
    """What a new lease could get now."""
    holders: tuple[MemoryHolder, ...] = ()
