"""The router's view of the hosts' accelerator memory: the registry's book, read again and again.

It only says when a load is worth beginning; the book itself decides with every lease. So a view that is a little old
costs a wait and never memory, and the last one is kept while the registry is away.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import grpc
import structlog

from router_svc.policy.endpoints.host_memory import HostMemory, MemoryHolder
from weft.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from weft.kernel.clock import Clock
from weft.kernel.service import start_critical, stop_tasks

if TYPE_CHECKING:
    from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub

log = structlog.get_logger("weft.memory_watch")

POLL_SECONDS = 5.0
HURRIED_POLL_SECONDS = 0.5
"""While somebody waits for a load."""
HURRY_SECONDS = 2.0
"""For how long one call of `hurry` is good."""
START_HURRY_SECONDS = 30.0
"""As long after its start it looks often: hosts appear in the book one by one."""
MAX_HOSTS_PER_SECOND = 2_000
"""Hosts that are looked at, however much hurry there is: each costs some 40 us of the loop's time."""
CALL_SECONDS = 5.0
"""Longest time for one look; also with the book of ten thousand hosts."""
MAX_HOSTS = 10_000
"""As many as the ledger keeps; further ones count as hosts of which nothing is known."""
CONVERTED_PER_TURN = 200
"""Hosts that are taken in before other work gets its turn."""


class MemoryWatch:
    """Tells `on_change` the memory of all hosts by name, whenever it is different. Life cycle: start, stop."""

    def __init__(
        self,
        registry: grpc.aio.Channel,
        clock: Clock,
        on_change: Callable[[Mapping[str, HostMemory]], None],
        note_mesh_time: Callable[[datetime], None] = lambda _: None,
    ) -> None:
        """`note_mesh_time` hears what time it is in the mesh, with each look."""
        self._note_mesh_time = note_mesh_time
        self._stub = cast("LeaseServiceAsyncStub", lease_service_pb2_grpc.LeaseServiceStub(registry))
        self._clock = clock
        self._on_change = on_change
        self._hosts: Mapping[str, HostMemory] = MappingProxyType({})
        self._seen_at: float | None = None
        self._hurry_until = clock.monotonic()
        self._hurried = asyncio.Event()
        self._is_away = False
        self._task: asyncio.Task[None] | None = None

    @property
    def hosts(self) -> Mapping[str, HostMemory]:
        """As last seen, by name; empty before the first look."""
        return self._hosts

    @property
    def age_seconds(self) -> float | None:
        """How old `hosts` is; None: nothing was seen yet."""
        return None if self._seen_at is None else self._clock.monotonic() - self._seen_at

    async def start(self) -> None:
        """Begin to look. Returns at once."""
        self._hurry_until = self._clock.monotonic() + START_HURRY_SECONDS
        self._task = start_critical(self._follow(), name="memory-watch")

    async def stop(self) -> None:
        """Stop looking; what was seen last stays readable."""
        if self._task is not None:
            await stop_tasks([self._task])
            self._task = None

    def hurry(self) -> None:
        """Somebody waits for a load: look often for the next HURRY_SECONDS, and soon for a start. Cheap to call."""
        was_hurried = self._is_hurried
        self._hurry_until = max(self._hurry_until, self._clock.monotonic() + HURRY_SECONDS)
        if not was_hurried:
            self._hurried.set()

    @property
    def _is_hurried(self) -> bool:
        return self._clock.monotonic() < self._hurry_until

    async def _follow(self) -> None:
        while True:
            began = self._clock.monotonic()
            try:
                await self._look()
            except grpc.aio.AioRpcError as error:
                self._note_away(error.code().name)
            except Exception:
                # A watch that ended would leave the router with an ever older book, and nobody would know.
                log.exception("the book of memory cannot be read")
            await self._pause(began)

    async def _look(self) -> None:
        began = self._clock.monotonic()
        response = await self._stub.ListHostMemory(lease_service_pb2.ListHostMemoryRequest(), timeout=CALL_SECONDS)
        if response.HasField("mesh_time"):
            one_way = timedelta(seconds=(self._clock.monotonic() - began) / 2)
            self._note_mesh_time(response.mesh_time.ToDatetime(tzinfo=UTC) + one_way)
        hosts: dict[str, HostMemory] = {}
        for number, memory in enumerate(response.hosts[:MAX_HOSTS]):
            hosts[memory.host] = host_memory_of(memory)
            if number % CONVERTED_PER_TURN == CONVERTED_PER_TURN - 1:
                await asyncio.sleep(0)
        self._seen_at = self._clock.monotonic()
        if self._is_away:
            self._is_away = False
            log.info("the book of memory is read again")
        if hosts != self._hosts:
            self._hosts = MappingProxyType(hosts)
            self._on_change(self._hosts)

    def _note_away(self, code: str) -> None:
        if not self._is_away:
            self._is_away = True
            log.warning("the book of memory cannot be read, going on with the last view of it", code=code)

    async def _pause(self, began: float) -> None:
        """Until the next look is due, which may come to be earlier meanwhile."""
        while True:
            self._hurried.clear()
            interval = HURRIED_POLL_SECONDS if self._is_hurried else POLL_SECONDS
            interval = max(interval, len(self._hosts) / MAX_HOSTS_PER_SECOND)
            left = began + interval - self._clock.monotonic()
            if left <= 0:
                return
            timer = asyncio.create_task(self._clock.sleep(left))
            hurried = asyncio.create_task(self._hurried.wait())
            try:
                await asyncio.wait({timer, hurried}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                timer.cancel()
                hurried.cancel()
                await asyncio.gather(timer, hurried, return_exceptions=True)


def host_memory_of(memory: lease_service_pb2.HostMemory) -> HostMemory:
    """One host of the book."""
    return HostMemory(
        host=memory.host,
        total_bytes=sum(max(0, each.device.total_bytes - each.margin_bytes) for each in memory.devices),
        free_bytes=sum(each.free_bytes for each in memory.devices),
        holders=tuple(_holders_of(memory.leases)),
    )


def _holders_of(leases: Iterable[lease_pb2.Lease]) -> Iterable[MemoryHolder]:
    for lease in leases:
        booked = sum(share.bytes for share in lease.shares)
        is_model = lease.holder.kind == lease_pb2.LeaseHolder.KIND_RUNNER
        yield MemoryHolder(
            name=lease.purpose or lease.holder.name if is_model else lease.holder.name or lease.purpose,
            is_model=is_model,
            # What it holds beyond its booking comes free with it.
            held_bytes=max(booked, lease.seen_bytes if lease.HasField("seen_bytes") else 0),
            pinned=lease.pinned,
            is_leaving=lease.state == lease_pb2.Lease.STATE_RELEASING,
            is_lost=lease.state == lease_pb2.Lease.STATE_ORPHANED,
            active_requests=lease.active_requests,
            unowned=lease.unowned,
        )
