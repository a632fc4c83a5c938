"""The lease manager of a runner: acquires, renews and releases leases on accelerator memory at the registry."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, cast

import grpc
from typing_extensions import override

from runner_svc.memory.port import MemoryLedger, MemoryUser, OnWaiting, leased_bytes
from runner_svc.policy.backoff import retry_pause_seconds
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.policy.model_sizing import DeviceMemory
from runner_svc.waiting import event_within, within
from weft.api.registry.v1 import lease_pb2, lease_service_pb2_grpc
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.gpu.snapshot import HostSnapshot, ProcessId, Source, process_id_message, snapshot_message
from weft.kernel.channels.rpc import calling, was_answered
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import REGISTRY_AWAY, Reason
from weft.kernel.services.service_lifecycle import start_critical, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import duration_of, seconds_of
from weft.kernel.values.names import new_id

if TYPE_CHECKING:
    from weft.api.registry.v1.lease_service_pb2_grpc import LeaseServiceAsyncStub


log = get_logger("weft.leases")

STOP_SECONDS = 2.0
"""Maximum time to release leases at a stop; after that they expire."""
LAST_SNAPSHOTS = 2
"""Snapshots that are reported at a stop: the answer to the first lists the processes that the second must cover."""
DEFAULT_RENEW_SECONDS = 5.0
DEFAULT_TIME_TO_LIVE_SECONDS = 30.0
DEFAULT_MARGIN_BYTES = 512 * MEBIBYTE
"""The default of the ledger's `device_margin_mb`."""
MIN_RENEW_SECONDS = 0.05
LOOK_FOR_DEVICES_SECONDS = 60.0
"""Interval of checks for devices on a host that has none; each load checks too."""
MAX_LEASES = 1024
"""Maximum number of a runner's leases, as in `RenewLeasesRequest.leases`, including pending releases."""
MAX_CONCURRENT_REQUESTS = 8
"""Concurrent lease requests of a runner at the registry, because a dial-out link limits its calls."""
MAX_WATCHED = 4096
MAX_PROCESSES = 256
"""Maximum number of a lease's processes in reports to the registry."""
CALL_TIMEOUT_SECONDS = 5.0
AWAY = REGISTRY_AWAY | {Reason.DEADLINE_EXCEEDED, Reason.SESSION_UNKNOWN, Reason.PERMISSION_DENIED}
"""Reasons of a registry that is unreachable or has no session for this runner."""

_RETRY_AFTER_SECONDS = 5.0
"""Retry delay after a wait for memory that timed out."""
_WAITING = "waiting for memory: "
NO_REGISTRY = f"{_WAITING}the registry does not answer"
NO_SNAPSHOT = f"{_WAITING}the memory use of this host's accelerators is not known yet"
OWN_QUEUE = f"{_WAITING}other models of this runner wait before it"


def _without_registry(error: WeftError) -> str:
    """Returns why a load waits that the registry does not serve."""
    is_own = error.reason is Reason.SERVICE_UNAVAILABLE and was_answered(error)
    return f"{_WAITING}{error.message}" if is_own else NO_REGISTRY


class Observer(Protocol):
    """Observer of this host's devices, implemented by weft.gpu.observer.HostObserver."""

    async def look(self, watched: Collection[ProcessId] = (), *, fresh: bool = False) -> HostSnapshot:
        """Returns a snapshot that covers each process of `watched`. Never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseManagerConfig:
    """Configuration of a lease manager."""

    runner: str
    incarnation: str
    device_indexes: tuple[int, ...] = ()
    """Devices that its models may use; empty: all devices of the host."""
    max_wait_seconds: float = 300.0
    """Maximum wait of one load."""


@dataclass(slots=True, eq=False)
class _Held:
    grant: lease_pb2.Lease
    user: MemoryUser
    good_until: float = float("-inf")
    """Local time until which the lease is valid regardless of the registry."""

    def use(self, processes: Sequence[ProcessId]) -> pb.LeaseUse:
        """Returns the use of the lease for a report."""
        use = self.user.memory_use()
        use.lease_id, use.fencing_number = self.grant.lease_id, self.grant.fencing_number
        use.processes.extend(process_id_message(process) for process in processes[:MAX_PROCESSES])
        return use


@dataclass(slots=True, eq=False)
class _Wait:
    """A load that waits for a lease."""

    on_waiting: OnWaiting
    request: pb.AcquireLeaseRequest = field(default_factory=pb.AcquireLeaseRequest)
    grant: lease_pb2.Lease | None = None
    why: str = ""

    def note(self, why: str) -> None:
        """Passes on what it waits for, if that has changed."""
        if why != self.why:
            self.why = why
            self.on_waiting(why)


@dataclass(slots=True)
class _Times:
    """The last timing values from the registry."""

    time_to_live: float = DEFAULT_TIME_TO_LIVE_SECONDS
    next_within: float = DEFAULT_RENEW_SECONDS
    watched: tuple[ProcessId, ...] = field(default=())


class LeaseManager(MemoryLedger):
    """The leases of a runner, as a `port.MemoryLedger`. Without devices it never calls the registry."""

    def __init__(
        self,
        config: LeaseManagerConfig,
        observer: Observer,
        session_id: Callable[[], str],
        clock: Clock,
        jitter: Callable[[], float],
    ) -> None:
        """`session_id` is empty without a session; `jitter` returns 0 to 1 and spreads retries."""
        self._config = config
        self._observer = observer
        self._session_id = session_id
        self._stub: LeaseServiceAsyncStub | None = None
        self._holder = lease_pb2.LeaseHolder(
            kind=lease_pb2.LeaseHolder.KIND_RUNNER, name=config.runner, incarnation=config.incarnation
        )
        self._clock = clock
        self._jitter = jitter
        self._held: dict[str, _Held] = {}
        self._releasing: dict[str, lease_pb2.Lease] = {}
        self._request_slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._renewing = asyncio.Lock()
        self._earlier_lock = asyncio.Lock()
        self._has_released_earlier = False
        self._has_devices = False
        self._nudged = asyncio.Event()
        self._has_changed = False
        """Whether a lease is used differently than in the last reading of the host."""
        self._release_asked = asyncio.Event()
        self._times = _Times()
        self.host = ""
        """Name of this host in the mesh, which leases and observations use; empty: the host's own name."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def held_bytes(self) -> int:
        """Total leased bytes of this runner."""
        return sum(leased_bytes(held.grant) for held in self._held.values())

    def processes(self) -> dict[str, tuple[ProcessId, ...]]:
        """Returns the processes that hold its leases, by model."""
        return {held.grant.purpose: held.user.processes() for held in self._held.values()}

    async def device_memory(self) -> tuple[DeviceMemory, ...]:
        """Returns the devices that its models may use, with the memory that can never be leased. Never raises.

        The latter is the ledger's margin plus the memory of processes without a lease. If the ledger does not know the
        devices yet, it is DEFAULT_MARGIN_BYTES per device.
        """
        snapshot = await self._observer.look()
        accounts: dict[int, pb.DeviceMemory] = {}
        if snapshot.devices:
            with contextlib.suppress(WeftError):
                known = await self._host_memory(self.host or snapshot.host)
                accounts = {account.device.index: account for account in known}
        wanted = self._config.device_indexes
        return tuple(
            DeviceMemory(
                name=device.name,
                total_bytes=device.total_bytes,
                reserved_bytes=reserved_bytes(accounts.get(device.index)),
            )
            for device in snapshot.devices
            if not wanted or device.index in wanted
        )

    async def free_device_bytes(self) -> int | None:
        """Returns what a new lease could get now on the devices of its models; None: unknown. Never raises."""
        snapshot = await self._observer.look()
        wanted = self._config.device_indexes
        with contextlib.suppress(WeftError):
            accounts = await self._host_memory(self.host or snapshot.host)
            return sum(each.free_bytes for each in accounts if not wanted or each.device.index in wanted)
        return None

    async def has_devices(self) -> bool:
        """Whether the host has devices. Never raises."""
        return bool((await self._observer.look()).devices)

    async def start(self, registry: "grpc.aio.Channel") -> None:
        """Starts renewals, which also report the host's devices. Orphans of earlier incarnations must be gone."""
        self._stub = cast("LeaseServiceAsyncStub", lease_service_pb2_grpc.LeaseServiceStub(registry))
        self._tasks = [
            start_critical(self._renew_loop(), name="lease-renewals"),
            start_critical(self._release_loop(), name="lease-releases"),
        ]

    async def stop(self) -> None:
        """Stops after every backend has ended. Sends pending releases for at most STOP_SECONDS. Idempotent."""
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        await stop_tasks(tasks)
        with contextlib.suppress(TimeoutError, WeftError):
            await within(self._clock, STOP_SECONDS, self._release_at_stop())

    @override
    async def acquire(
        self, wanted: pb.AcquireLeaseRequest, user: MemoryUser, on_waiting: OnWaiting
    ) -> lease_pb2.Lease | None:
        wait = _Wait(on_waiting)
        try:
            await within(self._clock, self._config.max_wait_seconds, self._wait_for(wanted, user, wait))
        except BaseException as error:
            if wait.grant is not None:
                self.release(wait.grant)
            if isinstance(error, TimeoutError):
                raise self._too_long(wanted, wait.why) from None
            raise
        return wait.grant

    @override
    def is_good(self, grant: lease_pb2.Lease) -> bool:
        held = self._held.get(grant.lease_id)
        return held is not None and self._clock.monotonic() < held.good_until

    @override
    def note_change(self) -> None:
        self._has_changed = True
        self._nudged.set()

    @override
    def release(self, grant: lease_pb2.Lease) -> None:
        if self._held.pop(grant.lease_id, None) is not None:
            self._releasing[grant.lease_id] = grant
            self._release_asked.set()

    def _too_long(self, wanted: pb.AcquireLeaseRequest, last: str) -> WeftError:
        seconds, metadata = self._config.max_wait_seconds, {"model": wanted.purpose}
        if last == NO_REGISTRY:
            return WeftError(
                Reason.SERVICE_UNAVAILABLE, f"{wanted.purpose} waited {seconds:g} s for memory: no registry answered"
            )
        why = last.removeprefix(_WAITING)
        words = f"{wanted.purpose} got no memory within {seconds:g} s" + (f": {why}" if why else "")
        return WeftError(Reason.INSUFFICIENT_MEMORY, words, metadata=metadata, retry_after_seconds=_RETRY_AFTER_SECONDS)

    async def _wait_for(self, wanted: pb.AcquireLeaseRequest, user: MemoryUser, wait: _Wait) -> None:
        """Sets the grant of `wait`, or leaves it empty if there are no devices."""
        deadline = self._clock.monotonic() + self._config.max_wait_seconds
        if not await self._sees_devices(wait):
            return
        if not self._has_devices:
            self._has_devices = True
            self._nudged.set()
        if len(self._held) + len(self._releasing) >= MAX_LEASES:
            raise WeftError(Reason.TOO_MANY_RESOURCES, f"the runner holds {MAX_LEASES} leases, which is the limit")
        if self._request_slots.locked():
            wait.note(OWN_QUEUE)
        async with self._request_slots:
            while True:
                snapshot = await self._observer.look(fresh=True)
                left = max(0.001, deadline - self._clock.monotonic())
                wait.request = self._request(wanted, snapshot, left)
                await self._request_until_granted(wait, user, snapshot.source)
                if await self._is_confirmed(wait):
                    return

    def _request(
        self, wanted: pb.AcquireLeaseRequest, snapshot: HostSnapshot, max_wait_seconds: float
    ) -> pb.AcquireLeaseRequest:
        """Returns the request for a lease, without its holder."""
        request = pb.AcquireLeaseRequest(
            request_id=new_id("lease"),
            sighting=self._sighting(snapshot),
            device_indexes=self._config.device_indexes,
            max_wait=duration_of(max_wait_seconds),
        )
        request.MergeFrom(wanted)
        return request

    def _sighting(self, snapshot: HostSnapshot) -> lease_pb2.HostSighting:
        sighting = snapshot_message(snapshot)
        sighting.host = self.host or sighting.host
        return sighting

    async def _sees_devices(self, wait: _Wait) -> bool:
        """Whether the host has devices; waits until that is certain."""
        failures = 0
        while True:
            snapshot = await self._observer.look()
            if snapshot.devices or snapshot.source is not Source.UNKNOWN:
                return bool(snapshot.devices)
            wait.note(NO_SNAPSHOT)
            failures += 1
            await self._clock.sleep(retry_pause_seconds(failures, self._jitter()))

    async def _request_until_granted(self, wait: _Wait, user: MemoryUser, source: Source) -> None:
        """Sends a request, and repeats it with the same id while the registry is unreachable, to get only one lease."""
        failures = 0
        while True:
            try:
                await self._release_earlier_incarnations()
                lease = await self._request_once(wait)
            except WeftError as error:
                if error.reason not in AWAY:
                    raise
                wait.note(_without_registry(error))
                failures += 1
                await self._clock.sleep(retry_pause_seconds(failures, self._jitter()))
                # A grant must not be based on a snapshot from before the outage.
                snapshot = await self._observer.look(fresh=True)
                wait.request.sighting.CopyFrom(self._sighting(snapshot))
            else:
                if not lease.shares or not lease.lease_id:
                    raise WeftError(Reason.INTERNAL, "the registry granted a lease without memory")
                self.hides_devices = source is not Source.DECLARED
                wait.grant = lease
                self._held[lease.lease_id] = _Held(lease, user)
                return

    async def _request_once(self, wait: _Wait) -> "lease_pb2.Lease":
        """Requests a lease and waits until it is granted. Cancelling it leaves the queue."""
        wait.request.session_id = self._require_session()
        wait.request.holder.CopyFrom(self._holder)
        with calling(Reason.SERVICE_UNAVAILABLE):
            call = self._require_stub().AcquireLease(wait.request)
            try:
                # Not `async for`: its generator and the call form a reference cycle, 25 KB until it is collected.
                while (received := await call.read()) is not grpc.aio.EOF:
                    response = cast("pb.AcquireLeaseResponse", received)
                    if response.HasField("granted"):
                        self._note_times(response.granted)
                        return response.granted.lease
                    wait.note(f"{_WAITING}{response.waiting.detail}")
            finally:
                call.cancel()
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry ended the wait without an answer")

    def _note_times(self, granted: pb.GrantedLease) -> None:
        time_to_live = seconds_of(granted.time_to_live) or DEFAULT_TIME_TO_LIVE_SECONDS
        interval = seconds_of(granted.renew_interval) or DEFAULT_RENEW_SECONDS
        self._times = replace(self._times, time_to_live=time_to_live, next_within=interval)

    async def _is_confirmed(self, wait: _Wait) -> bool:
        """Whether a renewal succeeded, without which the local clock does not know the lease's validity."""
        assert wait.grant is not None
        failures = 0
        while wait.grant.lease_id in self._held:
            try:
                await self._renew()
            except WeftError as error:
                if error.reason not in AWAY:
                    raise
                wait.note(_without_registry(error))
                failures += 1
                await self._clock.sleep(retry_pause_seconds(failures, self._jitter()))
            else:
                if self.is_good(wait.grant):
                    return True
        wait.grant = None
        return False

    async def _release_earlier_incarnations(self) -> None:
        """Releases the leases of earlier incarnations, once and before the first request."""
        async with self._earlier_lock:
            if self._has_released_earlier:
                return
            request = pb.ReleaseEarlierLivesRequest(holder=self._holder, session_id=self._require_session())
            with calling(Reason.SERVICE_UNAVAILABLE):
                response = await self._require_stub().ReleaseEarlierLives(request, timeout=CALL_TIMEOUT_SECONDS)
            self._has_released_earlier = True
            if response.released_count:
                log.info("leases of an earlier process were released", count=response.released_count)

    async def _renew_loop(self) -> None:
        failures = 0
        while True:
            try:
                pause = await self._renew_if_devices()
                failures = 0
            except WeftError as error:
                failures += 1
                pause = min(retry_pause_seconds(failures, self._jitter()), DEFAULT_RENEW_SECONDS)
                if error.reason not in AWAY:
                    log.warning("leases could not be renewed", reason=error.reason.name, message=error.message)
            await event_within(self._clock, max(MIN_RENEW_SECONDS, pause), self._nudged)
            self._nudged.clear()

    async def _renew_if_devices(self) -> float:
        """Renews the leases, if there are devices; returns the seconds until the next renewal."""
        if not self._has_devices:
            snapshot = await self._observer.look()
            self._has_devices = bool(snapshot.devices)
            if not snapshot.devices:
                return self._times.next_within if snapshot.source is Source.UNKNOWN else LOOK_FOR_DEVICES_SECONDS
        await self._release_earlier_incarnations()
        await self._renew()
        return self._times.next_within

    async def _renew(self) -> None:
        async with self._renewing:
            held = dict(self._held)
            processes = {lease_id: one.user.processes() for lease_id, one in held.items()}
            watched = list({*self._times.watched}.union(*processes.values()))[:MAX_WATCHED]
            is_fresh, self._has_changed = self._has_changed or bool(self._times.watched) or not held, False
            try:
                snapshot = await self._observer.look(watched, fresh=is_fresh)
            except asyncio.CancelledError:
                # A load that left: the next renewal must still read what has changed.
                self._has_changed |= is_fresh
                raise
            request = pb.RenewLeasesRequest(
                holder=self._holder,
                session_id=self._require_session(),
                leases=[one.use(processes[lease_id]) for lease_id, one in held.items()],
                sighting=self._sighting(snapshot),
            )
            sent = self._clock.monotonic()
            with calling(Reason.SERVICE_UNAVAILABLE):
                response = await self._require_stub().RenewLeases(request, timeout=CALL_TIMEOUT_SECONDS)
            self._apply_renewal(response, held, sent)
            if self._has_changed:
                # This reading is from before, for example, the end of a load. The next renewal follows immediately.
                return
            for lease_id, one in held.items():
                if lease_id in self._held:
                    one.user.note_memory_seen(seen_bytes(processes[lease_id], snapshot))

    def _apply_renewal(self, response: pb.RenewLeasesResponse, held: dict[str, _Held], sent: float) -> None:
        lost = set(response.lost_lease_ids)
        for lease_id, one in held.items():
            if lease_id not in lost:
                one.good_until = sent + self._times.time_to_live
            elif self._held.pop(lease_id, None) is not None:
                log.error("lease was lost", lease_id=lease_id, fencing_number=one.grant.fencing_number)
                one.user.note_lease_lost("the registry reports another holder")
        self._times = replace(
            self._times,
            next_within=seconds_of(response.next_within) or DEFAULT_RENEW_SECONDS,
            watched=tuple(ProcessId(seen.pid, seen.start_ticks) for seen in response.watched_processes[:MAX_WATCHED]),
        )

    async def _release_loop(self) -> None:
        failures = 0
        while True:
            await self._release_asked.wait()
            self._release_asked.clear()
            try:
                await self._release_all()
                failures = 0
            except WeftError:
                failures += 1
                self._release_asked.set()
                await self._clock.sleep(retry_pause_seconds(failures, self._jitter()))

    async def _release_at_stop(self) -> None:
        """Releases all leases and reports that the processes are gone: this host may have no other observer."""
        await self._release_all()
        if self._has_devices:
            for _ in range(LAST_SNAPSHOTS):
                await self._renew()

    async def _release_all(self) -> None:
        for lease_id, grant in list(self._releasing.items()):
            try:
                await self._release(lease_id, grant.fencing_number)
            except WeftError as error:
                if error.reason in AWAY:
                    raise
                # The lease has expired or passed to another holder.
                log.warning("lease could not be released", reason=error.reason.name, message=error.message)
            self._releasing.pop(lease_id, None)
            self._nudged.set()  # the registry waits for a snapshot without its processes

    async def _release(self, lease_id: str, fencing_number: int) -> None:
        request = pb.ReleaseLeaseRequest(
            holder=self._holder,
            session_id=self._require_session(),
            lease_id=lease_id,
            fencing_number=fencing_number,
        )
        with calling(Reason.SERVICE_UNAVAILABLE):
            await self._require_stub().ReleaseLease(request, timeout=CALL_TIMEOUT_SECONDS)

    async def _host_memory(self, host: str) -> list[pb.DeviceMemory]:
        """Returns the accounts of a host's devices; empty if the ledger does not know the host."""
        with calling(Reason.SERVICE_UNAVAILABLE):
            request = pb.ListHostMemoryRequest(host=host)
            response = await self._require_stub().ListHostMemory(request, timeout=CALL_TIMEOUT_SECONDS)
            return [device for known in response.hosts if known.host == host for device in known.devices]

    def _require_session(self) -> str:
        """Raises SERVICE_UNAVAILABLE without a session."""
        session_id = self._session_id()
        if not session_id:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the session with the registry is not open")
        return session_id

    def _require_stub(self) -> "LeaseServiceAsyncStub":
        """Raises SERVICE_UNAVAILABLE before the start."""
        if self._stub is None:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the runner has not started")
        return self._stub


def reserved_bytes(account: pb.DeviceMemory | None) -> int:
    """Returns the memory of a device that cannot be leased."""
    return DEFAULT_MARGIN_BYTES if account is None else account.margin_bytes + account.foreign_bytes


def seen_bytes(processes: Collection[ProcessId], snapshot: HostSnapshot) -> int | None:
    """Returns the observed memory of a lease's processes; None: unknown."""
    if snapshot.source is not Source.NVML or not processes:
        return None
    by_process = {seen.process: seen for seen in snapshot.processes}
    found = [by_process.get(process) for process in processes]
    if any(seen is None or seen.memory_unknown for seen in found):
        return None
    return sum(held for seen in found if seen is not None for _, held in seen.bytes_by_device)
