"""The book of accelerator memory: who holds what on one host, and what its devices have left. Nothing but values.

Two figures bound what a device has left, and the lower one counts. By booking: its memory without the margin and
without all that leases booked. By sight: without the margin, without what processes hold that have no lease, and
without what each lease booked or is seen to hold, whichever is more. Where use is unknown, booking alone counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum

from weft.gpu.snapshot import HostSnapshot, ProcessId, ProcessSnapshot, Source
from weft.kernel.request import Priority

Shares = tuple[tuple[int, int], ...]
"""(device index, bytes), in order of the devices."""


class HolderKind(IntEnum):
    """What holds a lease; numbers as in `registry.v1.LeaseHolder.Kind`."""

    RUNNER = 1
    PROGRAM = 2


class LeaseState(IntEnum):
    """Where a lease is in its life; numbers as in `registry.v1.Lease.State`."""

    HELD = 1
    RELEASING = 2
    ORPHANED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lease."""

    kind: HolderKind
    name: str
    incarnation: str
    """One life of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What is durable of a lease."""

    id: str
    fencing_number: int
    request_id: str
    host: str
    holder: Holder
    purpose: str
    """A model's name, or a program's words."""
    shares: Shares
    pinned: bool
    """As asked for; its holder may say otherwise later."""
    priority: Priority
    """Of whoever asked."""
    created_at: datetime
    processes: tuple[ProcessId, ...] = ()
    """All that its holder ever named and that were not seen to be gone before it named others; in order."""
    releasing: bool = False
    """Whether its holder gave it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A grant, and what is known of it now."""

    grant: Grant
    state: LeaseState
    renewed: float
    """When its holder was last heard of, monotonic seconds."""
    since: float | None = None
    """When it was given up or orphaned, monotonic seconds; None while it is held."""
    filled: bool = False
    """Whether what its processes hold is all that they will take."""
    active_requests: int = 0
    priority: Priority = Priority.NORMAL
    """Of the last request that it worked for."""
    pinned: bool = False
    last_used_at: datetime | None = None
    """None: not yet."""
    named: frozenset[ProcessId] = frozenset()
    """The processes of its holder's last word."""
    gone: frozenset[ProcessId] = frozenset()
    """Those of `grant.processes` that somebody saw to have ended: for good, as a process id with its start is."""

    @property
    def remaining(self) -> frozenset[ProcessId]:
        """Its processes that may still be there."""
        return frozenset(self.grant.processes) - self.gone


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """A request for memory on one host."""

    key: str
    """The same on every repeat of one call, and nobody else's."""
    request_id: str
    holder: Holder
    purpose: str
    host: str
    size: int
    """Bytes, over all devices."""
    device_indexes: frozenset[int] = frozenset()
    """Empty: all of the host."""
    max_devices: int = 0
    """0: as many as it takes."""
    priority: Priority = Priority.NORMAL
    pinned: bool = False
    arrival: int = 0
    """Who came first has the lower one."""
    deadline: float
    """When it gives up, monotonic seconds."""

    @property
    def place(self) -> tuple[int, int]:
        """Its place in line: lower ones go first."""
        return self.priority, self.arrival

    def devices_among(self, indexes: Iterable[int]) -> frozenset[int]:
        """Those of a host's devices that it may be on."""
        return self.device_indexes.intersection(indexes) if self.device_indexes else frozenset(indexes)


LOOKED_FOR_SECONDS = 10.0
"""How long memory that was given up is looked for at the pace of somebody who waits for it."""


def read_back(grant: Grant, now: float) -> Lease:
    """A lease as it is after the registry's own restart: what its holder said of its use is forgotten."""
    return Lease(
        grant=grant,
        state=LeaseState.RELEASING if grant.releasing else LeaseState.HELD,
        renewed=now,
        since=now if grant.releasing else None,
        priority=grant.priority,
        pinned=grant.pinned,
    )


def is_orphaned(lease: Lease, now: float, time_to_live: float, grace_until: float) -> bool:
    """Whether its holder has been silent for too long. All in monotonic seconds."""
    return lease.state is LeaseState.HELD and now >= max(lease.renewed + time_to_live, grace_until)


def orphaned(lease: Lease, now: float) -> Lease:
    """A lease whose holder is not heard of."""
    return replace(lease, state=LeaseState.ORPHANED, since=now)


def renewed(lease: Lease, now: float) -> Lease:
    """A lease whose holder was heard; an orphaned one is held again."""
    return replace(lease, state=LeaseState.HELD, renewed=now, since=None)


def released(lease: Lease, now: float) -> Lease:
    """A lease that its holder gave up; it counts from then on, even if its holder was silent before."""
    return replace(lease, grant=replace(lease.grant, releasing=True), state=LeaseState.RELEASING, since=now)


def with_gone(lease: Lease, processes: Iterable[ProcessSnapshot]) -> Lease:
    """A lease after a sighting: ended processes stay ended, whatever the next sighting is about.

    One that has ended and whose memory is listed still is not gone yet.
    """
    ended = {each.process for each in processes if not each.alive and not _holds_memory(each)}
    gone = ended.intersection(lease.grant.processes) - lease.gone
    return replace(lease, gone=lease.gone | gone) if gone else lease


def processes_after(lease: Lease, named: frozenset[ProcessId]) -> tuple[ProcessId, ...]:
    """The processes of a lease once its holder has named these.

    Those that it names no more stay until they are seen to be gone: they may hold memory still.
    """
    together = named | lease.remaining
    return tuple(sorted(together)) if together else lease.grant.processes


def is_over(lease: Lease, sight: HostSnapshot, seen: float, renew_interval: float) -> bool:
    """Whether a lease that was given up or orphaned is over, by a sighting of its host that arrived at `seen`.

    It must have arrived after that, and say of each process that it is gone or holds nothing. Where processes were
    never named, one may have been started whose name is still under way: nothing is believed for one renew interval.
    """
    if lease.since is None or seen <= lease.since:
        return False
    if not lease.grant.processes:
        return seen >= lease.since + renew_interval
    by_id = {each.process: each for each in sight.processes}
    return all(_holds_nothing(lease, by_id.get(process), sight.source) for process in lease.remaining)


def is_fresh(lease: Lease, now: float) -> bool:
    """Whether its memory was given up a moment ago: somebody may ask for it next, so it is looked for often."""
    return lease.since is not None and now - lease.since < LOOKED_FOR_SECONDS


def is_forgotten(lease: Lease, now: float, last_seen: float, keep_seconds: float) -> bool:
    """Whether nobody has looked at its host for so long that nobody will say when it is over."""
    return lease.since is not None and now - max(lease.since, last_seen) >= keep_seconds


def watched(leases: Sequence[Lease]) -> list[ProcessId]:
    """The processes that the next sighting must say something about, in order."""
    found: set[ProcessId] = set()
    for lease in leases:
        found |= lease.remaining - lease.named if lease.state is LeaseState.HELD else lease.remaining
    return sorted(found)


def _holds_nothing(lease: Lease, process: ProcessSnapshot | None, source: Source) -> bool:
    # Not named: nothing is known of it until somebody has been asked.
    if process is None or _holds_memory(process):
        return False
    if not process.alive:
        return True
    if source is not Source.NVML or process.memory_unknown:
        return False
    # One that nobody ended and that has not filled its share may be about to.
    return lease.state is LeaseState.RELEASING or lease.filled


def _holds_memory(process: ProcessSnapshot) -> bool:
    return any(size for _, size in process.bytes_by_device)
