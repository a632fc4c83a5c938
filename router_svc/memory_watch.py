"""Polls the registry's VRAM ledger for the memory of all hosts.

The result only decides when a load is worth beginning; the ledger itself decides on each lease. So a stale result only
delays a load and never overcommits memory, and it is kept while the registry is unreachable.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import grpc
from typing_extensions import override

from router_svc.policy.endpoints.candidates import HostMemory, MemoryHolder
from weft.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from weft.gpu.eviction import NEVER
from weft.kernel.channels.rpc import calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.services.service_lifecycle import BackgroundLoop
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock, wait_for_event
from weft.kernel.time.timestamps import optional_datetime

if TYPE_CHECKING:
    from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub

log = get_logger("weft.memory_watch")

POLL_SECONDS = 5.0
HURRIED_POLL_SECONDS = 0.5
"""Interval while requests wait for a load."""
HURRY_SECONDS = 2.0
"""How long a call of `hurry` has effect."""
START_HURRY_SECONDS = 30.0
"""Time after the start with frequent polls, as hosts appear in the ledger one by one."""
MAX_HOSTS_PER_SECOND = 2_000
"""Maximum hosts polled per second, however urgent: each takes about 40 us of the event loop."""
CALL_SECONDS = 5.0
"""Timeout of a poll; enough for a ledger of ten thousand hosts."""
MAX_HOSTS = 10_000
"""Maximum number of hosts, as in the ledger; the memory of others is unknown."""
CONVERTED_PER_TURN = 200
"""Hosts processed before other tasks get the event loop."""


class MemoryWatch(BackgroundLoop):
    """Calls `on_change` with the memory of all hosts by name when it changes."""

    loop_name = "memory-watch"

    def __init__(
        self,
        registry: grpc.aio.Channel,
        clock: Clock,
        on_change: Callable[[Mapping[str, HostMemory]], None],
        note_mesh_time: Callable[[datetime], None] = lambda _: None,
        note_devices: Callable[[Iterable[lease_service_pb2.HostMemory]], None] = lambda _: None,
    ) -> None:
        """`note_mesh_time` gets the mesh's time with each poll, `note_devices` the ledger's hosts."""
        self._note_devices = note_devices
        self._note_mesh_time = note_mesh_time
        self._stub = cast("LeaseServiceAsyncStub", lease_service_pb2_grpc.LeaseServiceStub(registry))
        self._clock = clock
        self._on_change = on_change
        self._hosts: Mapping[str, HostMemory] = MappingProxyType({})
        self._seen_at: float | None = None
        self._hurry_until = clock.monotonic()
        self._hurried = asyncio.Event()
        self._is_away = False

    @property
    def hosts(self) -> Mapping[str, HostMemory]:
        """Memory of all hosts by name, as last polled; empty before the first poll."""
        return self._hosts

    @property
    def age_seconds(self) -> float | None:
        """Age of `hosts`; None: never polled."""
        return None if self._seen_at is None else self._clock.monotonic() - self._seen_at

    @override
    async def start(self) -> None:
        self._hurry_until = self._clock.monotonic() + START_HURRY_SECONDS
        await super().start()

    def hurry(self) -> None:
        """Poll often for the next HURRY_SECONDS because a request waits for a load. Cheap to call."""
        was_hurried = self._is_hurried
        self._hurry_until = max(self._hurry_until, self._clock.monotonic() + HURRY_SECONDS)
        if not was_hurried:
            self._hurried.set()

    @property
    def _is_hurried(self) -> bool:
        return self._clock.monotonic() < self._hurry_until

    @override
    async def _run(self) -> None:
        while True:
            began = self._clock.monotonic()
            try:
                with calling(Reason.SERVICE_UNAVAILABLE):
                    await self._look()
            except WeftError as error:
                self._note_away(error.reason)
            except Exception:
                # If this task ended, the router would silently work with an ever older view.
                log.exception("the VRAM ledger cannot be read")
            await self._pause(began)

    async def _look(self) -> None:
        began = self._clock.monotonic()
        response = await self._stub.ListHostMemory(lease_service_pb2.ListHostMemoryRequest(), timeout=CALL_SECONDS)
        if response.HasField("mesh_time"):
            one_way = timedelta(seconds=(self._clock.monotonic() - began) / 2)
            self._note_mesh_time(response.mesh_time.ToDatetime(tzinfo=UTC) + one_way)
        self._note_devices(response.hosts)
        hosts: dict[str, HostMemory] = {}
        for number, memory in enumerate(response.hosts[:MAX_HOSTS]):
            hosts[memory.host] = host_memory_of(memory)
            if number % CONVERTED_PER_TURN == CONVERTED_PER_TURN - 1:
                await asyncio.sleep(0)
        self._seen_at = self._clock.monotonic()
        if self._is_away:
            self._is_away = False
            log.info("the VRAM ledger can be read again")
        if hosts != self._hosts:
            self._hosts = MappingProxyType(hosts)
            self._on_change(self._hosts)

    def _note_away(self, reason: Reason) -> None:
        if not self._is_away:
            self._is_away = True
            log.warning(
                "the VRAM ledger cannot be read, continuing with the last view of it", reason=reason.name.lower()
            )

    async def _pause(self, began: float) -> None:
        """Wait until the next poll is due, which may move forward meanwhile."""
        while True:
            self._hurried.clear()
            interval = HURRIED_POLL_SECONDS if self._is_hurried else POLL_SECONDS
            interval = max(interval, len(self._hosts) / MAX_HOSTS_PER_SECOND)
            left = began + interval - self._clock.monotonic()
            if left <= 0:
                return
            await wait_for_event(self._hurried, self._clock, left)


def host_memory_of(memory: lease_service_pb2.HostMemory) -> HostMemory:
    """Return the memory of one host in the ledger."""
    return HostMemory(
        host=memory.host,
        total_bytes=sum(max(0, each.device.total_bytes - each.margin_bytes) for each in memory.devices),
        free_bytes=sum(each.free_bytes for each in memory.devices),
        holders=tuple(_holders_of(memory.leases)),
    )


def _holders_of(leases: Iterable[lease_pb2.Lease]) -> Iterable[MemoryHolder]:
    for lease in leases:
        booked = sum(share.bytes for share in lease.shares)
        last_used = optional_datetime(lease, "last_used_time")
        is_model = lease.holder.kind == lease_pb2.LeaseHolder.KIND_RUNNER
        yield MemoryHolder(
            name=lease.purpose or lease.holder.name if is_model else lease.holder.name or lease.purpose,
            is_model=is_model,
            # Usage above its lease is freed with it.
            held_bytes=max(booked, lease.seen_bytes if lease.HasField("seen_bytes") else 0),
            pinned=lease.pinned,
            is_leaving=lease.state == lease_pb2.Lease.STATE_RELEASING,
            is_lost=lease.state == lease_pb2.Lease.STATE_ORPHANED,
            active_requests=lease.active_requests,
            unowned=lease.unowned,
            priority=Priority.from_wire(lease.priority) or Priority.NORMAL,
            last_used_at=NEVER if last_used is None else last_used.timestamp(),
        )
