"""The wait queue for memory: waiting calls, their status messages and errors."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from registry_svc.ledger.policy.device_memory import HostAccount, largest_lease
from registry_svc.ledger.policy.leases import Holder, HolderKind, Lease, LeaseState, MemoryRequest
from weft.api.registry.v1.lease_service_pb2 import WaitingForMemory
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.units import size_words


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A waiting call with its latest status and outcome."""

    request: MemoryRequest
    status: WaitingForMemory | None = None
    outcome: Lease | WeftError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class WaitQueue:
    """Waiting calls by host. The policy decides their order."""

    def __init__(self, max_waiting: int, on_change: Callable[[str], None] | None = None) -> None:
        """`on_change` is called with a host whenever a wait there begins, ends or changes its status."""
        self._max_waiting = max_waiting
        self._on_change = on_change or (lambda _host: None)
        self._waiters: dict[str, dict[str, Waiter]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(len(there) for there in self._waiters.values())

    def hosts(self) -> list[str]:
        """Returns the hosts with waiting calls."""
        return list(self._waiters)

    def on(self, host: str) -> list[Waiter]:
        """Returns the calls that wait for memory on a host."""
        return list(self._waiters.get(host, {}).values())

    def next_arrival(self) -> int:
        """Returns the arrival number for a new call."""
        self._arrivals += 1
        return self._arrivals

    def find(self, host: str, key: str) -> Waiter | None:
        """Returns the waiting call with a key, or None."""
        return self._waiters.get(host, {}).get(key)

    def join(self, waiter: Waiter) -> None:
        """Adds a call. Raises TOO_MANY_RESOURCES if the host's queue is full."""
        there = self._waiters.setdefault(waiter.request.host, {})
        if waiter.request.key not in there and len(there) >= self._max_waiting:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"{self._max_waiting} requests wait for memory on {waiter.request.host} already; try again later",
                retry_after_seconds=5.0,
            )
        there[waiter.request.key] = waiter
        self._on_change(waiter.request.host)

    def leave(self, waiter: Waiter) -> None:
        """Removes a call, if it still waits."""
        there = self._waiters.get(waiter.request.host, {})
        if there.get(waiter.request.key) is waiter:
            del there[waiter.request.key]
            self._on_change(waiter.request.host)
        if not there:
            self._waiters.pop(waiter.request.host, None)

    def show(self, waiter: Waiter, status: WaitingForMemory) -> None:
        """Sets the status of a call, and wakes it if that has changed."""
        if status != waiter.status:
            waiter.status = status
            waiter.changed.set()
            self._on_change(waiter.request.host)

    def finish(self, waiter: Waiter, outcome: Lease | WeftError) -> None:
        """Removes a call, and sets its outcome; later outcomes are ignored."""
        self.leave(waiter)
        if waiter.outcome is None:
            waiter.outcome = outcome
            waiter.changed.set()


MAX_HOLDERS = 16
MAX_LEASES_PER_HOLDER = 1_024
"""Maximum leases and waits of a runner, or of one incarnation of a program; the limit of one renewal."""

_RETRY_AFTER_SECONDS = 5.0


def wait_status(request: MemoryRequest, account: HostAccount, leases: Sequence[Lease], ahead: int) -> WaitingForMemory:
    """Returns the status of `request` with `ahead` requests before it in the queue."""
    among = request.devices_among(account.devices)
    devices = [account.devices[index] for index in sorted(among)]
    holders = [lease for lease in leases if any(index in among for index, _ in lease.grant.shares)][:MAX_HOLDERS]
    holds = [f"{lease.grant.purpose} ({_activity(lease)})" for lease in holders]
    foreign = sum(device.foreign or 0 for device in devices)
    if foreign:
        holds.append(f"processes without a lease ({size_words(foreign)})")
    free = sum(device.free for device in devices)
    rest = f", held by {', '.join(holds)}" if holds else ""
    behind = f"; {ahead} ahead of it in the queue" if ahead else ""
    return WaitingForMemory(
        detail=f"needs {size_words(request.size)} on {request.host}, {size_words(free)} free{rest}{behind}",
        needed_bytes=request.size,
        free_bytes=free,
        holders=[lease.grant.purpose for lease in holders],
    )


def wait_timeout(request: MemoryRequest, status: WaitingForMemory | None) -> WeftError:
    """Returns the error for a wait that has reached its deadline."""
    detail = f"needs {size_words(request.size)} on {request.host}" if status is None else status.detail
    return WeftError(
        Reason.INSUFFICIENT_MEMORY,
        f"{request.purpose} {detail}; the wait timed out",
        metadata={"host": request.host, "needed_bytes": str(request.size)},
        retry_after_seconds=_RETRY_AFTER_SECONDS,
    )


def require_possible(request: MemoryRequest, account: HostAccount) -> None:
    """Raises INSUFFICIENT_MEMORY for a request that would not fit even on empty devices."""
    devices = [account.devices[index] for index in sorted(request.devices_among(account.devices))]
    most = largest_lease(devices, request.max_devices)
    if request.size > most:
        count = min(len(devices), request.max_devices or len(devices))
        way_out = _way_out(request, limits_devices=count < len(account.devices))
        raise WeftError(
            Reason.INSUFFICIENT_MEMORY,
            f"{request.purpose} needs {size_words(request.size)}, but {request.host} can give at most "
            f"{size_words(most)} on {count} of its devices even when they are empty; {way_out}",
            metadata={"host": request.host, "needed_bytes": str(request.size), "most_bytes": str(most)},
        )


def _way_out(request: MemoryRequest, *, limits_devices: bool) -> str:
    less = "ask for less" if request.holder.kind is HolderKind.PROGRAM else "use a smaller model or context"
    return f"{less}, or allow more devices" if limits_devices else less


def _activity(lease: Lease) -> str:
    match lease.state:
        case LeaseState.RELEASING:
            return "unloading"
        case LeaseState.ORPHANED:
            return "no heartbeat"
    if lease.grant.holder.kind is HolderKind.PROGRAM:
        return "program"
    if lease.pinned:
        return "pinned"
    if not lease.filled:
        return "loading"
    return "busy" if lease.active_requests else "idle"


def require_queue_room(holder: Holder, holders: Iterable[Holder]) -> None:
    """Raises TOO_MANY_RESOURCES if a holder has or waits for MAX_LEASES_PER_HOLDER leases.

    `holders` are those of all leases and waits.
    """
    if sum(_is_one(each, holder) for each in holders) >= MAX_LEASES_PER_HOLDER:
        raise WeftError(
            Reason.TOO_MANY_RESOURCES,
            f"{holder.name} has or waits for {MAX_LEASES_PER_HOLDER} leases, the most for one holder; release some",
        )


def _is_one(holder: Holder, other: Holder) -> bool:
    """Whether both are one runner, or one incarnation of a program, since programs may share a name."""
    if holder.kind is HolderKind.PROGRAM:
        return holder == other
    return (holder.kind, holder.name) == (other.kind, other.name)
