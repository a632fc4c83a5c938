"""The memory port: what a model's life asks of whoever keeps the book of accelerator memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from runner_svc.backend.port import DeviceShare
from runner_svc.policy.load_plan import LoadPlan
from weft.gpu.snapshot import ProcessId
from weft.kernel.request import Priority

OnWaiting = Callable[[str], None]
"""Told in words what is awaited, whenever that changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What is asked for."""

    model: str
    bytes: int
    """Over all devices; more than 0."""
    priority: Priority
    """Models of a higher one do not give way."""
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseGrant:
    """A right to memory."""

    lease_id: str
    fencing_number: int
    shares: tuple[DeviceShare, ...]
    """In order of the devices; at least one."""
    hides_devices: bool
    """Whether the engine is to see no other devices; not so for declared ones, which no driver knows."""

    @property
    def bytes(self) -> int:
        """Over all devices."""
        return sum(share.bytes for share in self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How a lease is used right now."""

    processes: tuple[ProcessId, ...]
    """Those that hold its memory."""
    filled: bool
    """Whether loading is over: what they hold is all that they will take."""
    active_requests: int
    priority: Priority
    """Of the last request."""
    pinned: bool
    last_used_at: datetime | None
    """UTC; None: not yet."""


class MemoryUser(Protocol):
    """Who holds a lease."""

    def memory_use(self) -> MemoryUse:
        """How it is used right now."""
        ...

    def note_lease_lost(self, why: str) -> None:
        """It is somebody else's: everything that uses it must be ended at once."""
        ...

    def note_memory_seen(self, seen_bytes: int | None) -> None:
        """What its processes were just seen to hold; None: nobody can tell."""
        ...


class MemoryLedger(Protocol):
    """The book of one host's accelerator memory, as one runner sees it."""

    async def acquire(self, wish: MemoryRequest, user: MemoryUser, on_waiting: OnWaiting) -> LeaseGrant | None:
        """Wait for memory; None: this host has no devices, and nothing is booked. The lease is renewed from then on.

        Raises INSUFFICIENT_MEMORY when it can never be had or took too long, SERVICE_UNAVAILABLE when the book was away
        for as long. Whoever is cancelled holds nothing.
        """
        ...

    def is_good(self, grant: LeaseGrant) -> bool:
        """Whether it is certain, without asking anybody, that a lease still counts."""
        ...

    def note_change(self) -> None:
        """The use of a lease has changed so much that the book should hear of it now."""
        ...

    def release(self, grant: LeaseGrant) -> None:
        """Give it up; its processes are gone. Returns at once and never fails; a lost lease may be released too."""
        ...


class NoMemoryLedger:
    """Nobody keeps a book here."""

    async def acquire(self, wish: MemoryRequest, user: MemoryUser, on_waiting: OnWaiting) -> LeaseGrant | None:
        """See MemoryLedger.acquire."""
        del wish, user, on_waiting
        return None

    def is_good(self, grant: LeaseGrant) -> bool:
        """See MemoryLedger.is_good."""
        del grant
        return True

    def note_change(self) -> None:
        """See MemoryLedger.note_change."""

    def release(self, grant: LeaseGrant) -> None:
        """See MemoryLedger.release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMemory:
    """What a load is expected to take."""

    bytes: int
    source: str
    """One of "learned", "manifest", "header", "file_size" or "name"."""


class MemoryForecast(Protocol):
    """What loads of one model take."""

    async def expect(self, plan: LoadPlan) -> ExpectedMemory | None:
        """What a load by this plan takes; None: unknown. Never raises."""
        ...

    async def context_within(self, plan: LoadPlan, budget_bytes: int) -> int | None:
        """The largest context of one slot with which it would fit; None: unknown, or none."""
        ...

    def note_taken(self, plan: LoadPlan, taken_bytes: int) -> None:
        """A load by this plan was seen to take so much."""
        ...


class NoForecast:
    """Nothing is known about what loads take."""

    async def expect(self, plan: LoadPlan) -> ExpectedMemory | None:
        """See MemoryForecast.expect."""
        del plan
        return None

    async def context_within(self, plan: LoadPlan, budget_bytes: int) -> int | None:
        """See MemoryForecast.context_within."""
        del plan, budget_bytes
        return None

    def note_taken(self, plan: LoadPlan, taken_bytes: int) -> None:
        """See MemoryForecast.note_taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAccount:
    """What one model's memory is asked of; the default is for hosts where nobody keeps a book."""

    book: MemoryLedger = field(default_factory=NoMemoryLedger)
    forecast: MemoryForecast = field(default_factory=NoForecast)
