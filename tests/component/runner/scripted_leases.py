"""A scripted VRAM ledger over gRPC, and a scripted observer of the host."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner_svc.memory.lease_manager import LeaseManager, LeaseManagerConfig
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.api.registry.v1 import lease_service_pb2_grpc
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, ProcessId, ProcessSnapshot, Source, process_id_message
from weft.kernel.channels.rpc import answering, new_server, open_channel
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.clock import Clock

if TYPE_CHECKING:
    from weft.kernel.errors.error_tree import WeftError

GIB = 1024**3


class ScriptedLeases(lease_service_pb2_grpc.LeaseServiceServicer):
    """Grants at once unless `go` is cleared; fails the next calls with the errors that the test sets."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.asked: list[pb.AcquireLeaseRequest] = []
        self.left = 0
        """Callers that disconnected while they waited."""
        self.renewals: list[pb.RenewLeasesRequest] = []
        self.on_renewal: Callable[[], None] = lambda: None
        """Called before a renewal is answered."""
        self.released: list[pb.ReleaseLeaseRequest] = []
        self.greetings: list[pb.ReleaseEarlierLivesRequest] = []
        self.failures: list[WeftError] = []
        """Errors of the next calls."""
        self.ends_after_words = False
        """The next answer breaks off before the lease."""
        self.lost: set[str] = set()
        self.watched: list[ProcessId] = []
        self.hosts: list[pb.HostMemory] = []
        """What ListHostMemory answers."""

    def WatchHostMemory(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("no runner asks for this")

    async def ListHostMemory(self, request: Any, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            return pb.ListHostMemoryResponse(hosts=self.hosts)

    async def AcquireLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            self.asked.append(request)
            self._fail()
            try:
                if not self.go.is_set():
                    yield pb.AcquireLeaseResponse(waiting=pb.WaitingForMemory(detail="needs 1.0 GiB, held by qwen"))
                    if self.ends_after_words:
                        self.ends_after_words = False
                        return
                    await self.go.wait()
            except (asyncio.CancelledError, GeneratorExit):
                self.left += 1
                raise
            granted = pb.GrantedLease()
            granted.lease.lease_id = request.request_id.replace("lease", "l")
            granted.lease.fencing_number = len(self.asked)
            granted.lease.shares.add(device_index=0, bytes=request.bytes)
            granted.time_to_live.FromSeconds(30)
            granted.renew_interval.FromSeconds(5)
            yield pb.AcquireLeaseResponse(granted=granted)

    async def RenewLeases(self, request: Any, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            self._fail()
            self.renewals.append(request)
            self.on_renewal()
            held = {use.lease_id for use in request.leases}
            response = pb.RenewLeasesResponse(
                lost_lease_ids=sorted(held & self.lost),
                watched_processes=map(process_id_message, self.watched),
            )
            response.next_within.FromSeconds(5)
            return response

    async def ReleaseLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            self._fail()
            self.released.append(request)
            return pb.ReleaseLeaseResponse()

    async def ReleaseProgramLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("runners release no leases of programs")

    async def ReleaseEarlierLives(self, request: Any, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            self._fail()
            self.greetings.append(request)
            return pb.ReleaseEarlierLivesResponse(released_count=0)

    @property
    def calls(self) -> int:
        return len(self.asked) + len(self.renewals) + len(self.released) + len(self.greetings)

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


class SeenHost:
    """An observer with the devices that the test sets; each process holds the memory in `held`."""

    def __init__(self, *device_bytes: int, source: Source = Source.NVML) -> None:
        self.source = source
        self.devices = tuple(
            DeviceSnapshot(index=index, id=f"GPU-{index}", name="card", total_bytes=size, used_bytes=0)
            for index, size in enumerate(device_bytes)
        )
        self.held: dict[ProcessId, int] = {}
        self.asked_about: list[set[ProcessId]] = []
        self.old: dict[ProcessId, int] = {}
        """The memory in the last reading, which a look that need not be fresh gets."""

    async def look(self, watched: Collection[ProcessId] = (), *, fresh: bool = False) -> HostSnapshot:
        self.asked_about.append(set(watched))
        held = self.held if fresh else self.old
        seen = [
            ProcessSnapshot(
                process=process,
                alive=process in held,
                bytes_by_device=((0, held[process]),) if process in held else (),
            )
            for process in watched
        ]
        return HostSnapshot(host="h", source=self.source, devices=self.devices, processes=tuple(seen))


class Holder:
    def __init__(self) -> None:
        self.held: tuple[ProcessId, ...] = ()
        self.lost: list[str] = []
        self.seen: list[int | None] = []

    def processes(self) -> tuple[ProcessId, ...]:
        return self.held

    def memory_use(self) -> pb.LeaseUse:
        priority = Priority.HIGH.wire
        return pb.LeaseUse(filled=bool(self.held), active_requests=2, priority=priority, pinned=True)  # type: ignore[arg-type]  # same numbers

    def note_lease_lost(self, why: str) -> None:
        self.lost.append(why)

    def note_memory_seen(self, seen_bytes: int | None) -> None:
        self.seen.append(seen_bytes)


def wish(model: str = "m", size: int = GIB) -> pb.AcquireLeaseRequest:
    priority = Priority.NORMAL.wire
    return pb.AcquireLeaseRequest(purpose=model, bytes=size, priority=priority)  # type: ignore[arg-type]  # same numbers


@asynccontextmanager
async def keeping(
    folder: Path, host: SeenHost, clock: Clock, *, devices: tuple[int, ...] = ()
) -> AsyncIterator[tuple[LeaseManager, ScriptedLeases, list[str]]]:
    """Yields a started lease manager, its registry, and its session id, in a list that the test may change."""
    server, leases, session = new_server(), ScriptedLeases(), ["session-1"]
    lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(leases, server)
    server.add_insecure_port(f"unix:{folder}/registry.sock")
    await server.start()
    config = LeaseManagerConfig(runner="r1", incarnation="life-1", device_indexes=devices, max_wait_seconds=60.0)
    keeper = LeaseManager(config, host, lambda: session[0], clock, lambda: 1.0)
    async with open_channel(f"unix:{folder}/registry.sock") as channel:
        await keeper.start(channel)
        try:
            yield keeper, leases, session
        finally:
            leases.go.set()
            await keeper.stop()
            await server.stop(None)
