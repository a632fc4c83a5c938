"""A runner's leases on accelerator memory: asked for, renewed and given up at the registry's book."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import structlog

from runner_svc.memory.lease_client import (
    AWAY,
    LeaseClient,
    acquire_request,
    grant_from,
    seconds_of,
    seen_bytes,
    use_message,
)
from runner_svc.memory.port import LeaseGrant, MemoryRequest, MemoryUser, OnWaiting
from runner_svc.policy.backoff import retry_pause_seconds
from runner_svc.waiting import event_within, within
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.gpu.snapshot import HostSnapshot, ProcessId, Source
from weft.gpu.snapshot_messages import snapshot_message
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason
from weft.kernel.service import start_critical, stop_tasks

if TYPE_CHECKING:
    from collections.abc import Collection

    import grpc

    from weft.api.registry.v1 import lease_pb2

log = structlog.get_logger("weft.leases")

STOP_SECONDS = 2.0
"""How long a stop tries to tell the registry of leases that were given up; it finds out by itself otherwise."""
LAST_SIGHTINGS = 2
"""At a stop: the answer to the first one says which processes the second one must say something about."""
DEFAULT_RENEW_SECONDS = 5.0
DEFAULT_TIME_TO_LIVE_SECONDS = 30.0
MIN_RENEW_SECONDS = 0.05
LOOK_FOR_DEVICES_SECONDS = 60.0
"""How often a host that is known to have no devices is looked at again; a load looks for itself."""
MAX_LEASES = 1024
"""Of one runner, as in `RenewLeasesRequest.leases`; given-up ones that the registry has not heard of count too."""
MAX_LINE = 8
"""Places in line at the registry that one runner takes at once: over a link, calls have a limit."""
MAX_WATCHED = 4096

_RETRY_AFTER_SECONDS = 5.0
"""When memory that did not come in time is worth asking for again."""
_WAITING = "waiting for memory: "
NO_REGISTRY = f"{_WAITING}the registry does not answer"
NO_SIGHT = f"{_WAITING}what this host's accelerators hold cannot be seen yet"
OWN_LINE = f"{_WAITING}other models of this runner wait before it"


class Observer(Protocol):
    """Who looks at this host's devices; weft.gpu.observer.HostObserver is one."""

    async def look(self, watched: "Collection[ProcessId]" = (), *, fresh: bool = False) -> HostSnapshot:
        """What there is now, with something about each of `watched`. Never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseManagerConfig:
    """Whose leases are kept, and how long they are waited for."""

    runner: str
    incarnation: str
    device_indexes: tuple[int, ...] = ()
    """Devices that its models may be on; empty: all of the host."""
    max_wait_seconds: float = 300.0
    """Longest wait of one load."""


@dataclass(slots=True, eq=False)
class _Held:
    grant: LeaseGrant
    user: MemoryUser
    good_until: float = float("-inf")
    """By the local clock: until then it counts whatever the registry does."""


@dataclass(slots=True, eq=False)
class _Ask:
    """One load's wait for memory."""

    request: pb.AcquireLeaseRequest
    grant: LeaseGrant | None = None


@dataclass(slots=True)
class _Times:
    """What the registry said last."""

    time_to_live: float = DEFAULT_TIME_TO_LIVE_SECONDS
    next_within: float = DEFAULT_RENEW_SECONDS
    watched: tuple[ProcessId, ...] = field(default=())


class LeaseManager:
    """See memory_port.MemoryLedger. Life cycle: start, stop. Without devices it never calls the registry."""

    def __init__(
        self,
        config: LeaseManagerConfig,
        observer: Observer,
        session_id: Callable[[], str],
        clock: Clock,
        jitter: Callable[[], float],
    ) -> None:
        """`session_id` is empty while there is none; `jitter` returns 0 to 1 and spreads retries."""
        self._config = config
        self._observer = observer
        self._calls = LeaseClient(config.runner, config.incarnation, session_id)
        self._clock = clock
        self._jitter = jitter
        self._held: dict[str, _Held] = {}
        self._releasing: dict[str, LeaseGrant] = {}
        self._line = asyncio.Semaphore(MAX_LINE)
        self._renewing = asyncio.Lock()
        self._greeting = asyncio.Lock()
        self._has_greeted = False
        self._has_devices = False
        self._nudged = asyncio.Event()
        self._release_asked = asyncio.Event()
        self._times = _Times()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def held_bytes(self) -> int:
        """What this runner has leased."""
        return sum(held.grant.bytes for held in self._held.values())

    async def start(self, registry: "grpc.aio.Channel") -> None:
        """Begin to keep leases, and to say what is seen of this host. Leftovers of earlier lives must be gone."""
        self._calls.connect(registry)
        self._tasks = [
            start_critical(self._renew_for_ever(), name="lease-renewals"),
            start_critical(self._release_for_ever(), name="lease-releases"),
        ]

    async def stop(self) -> None:
        """End; every backend has ended. What was given up is told for at most STOP_SECONDS. Idempotent."""
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        await stop_tasks(tasks)
        with contextlib.suppress(TimeoutError, WeftError):
            await within(self._clock, STOP_SECONDS, self._take_leave())

    async def acquire(self, wish: MemoryRequest, user: MemoryUser, on_waiting: OnWaiting) -> LeaseGrant | None:
        """See MemoryLedger.acquire."""
        ask = _Ask(pb.AcquireLeaseRequest())
        told = _Told(on_waiting)
        try:
            await within(self._clock, self._config.max_wait_seconds, self._wait_for(wish, user, ask, told))
        except TimeoutError:
            self._drop(ask)
            raise self._too_long(wish, told.last) from None
        except BaseException:
            self._drop(ask)
            raise
        return ask.grant

    def is_good(self, grant: LeaseGrant) -> bool:
        """See MemoryLedger.is_good."""
        held = self._held.get(grant.lease_id)
        return held is not None and self._clock.monotonic() < held.good_until

    def note_change(self) -> None:
        """See MemoryLedger.note_change."""
        self._nudged.set()

    def release(self, grant: LeaseGrant) -> None:
        """See MemoryLedger.release."""
        if self._held.pop(grant.lease_id, None) is not None:
            self._releasing[grant.lease_id] = grant
            self._release_asked.set()

    def _drop(self, ask: _Ask) -> None:
        if ask.grant is not None:
            self.release(ask.grant)

    def _too_long(self, wish: MemoryRequest, last: str) -> WeftError:
        seconds, metadata = self._config.max_wait_seconds, {"model": wish.model}
        if last == NO_REGISTRY:
            return WeftError(
                Reason.SERVICE_UNAVAILABLE, f"{wish.model} waited {seconds:g} s for memory: no registry answered"
            )
        why = last.removeprefix(_WAITING)
        words = f"{wish.model} got no memory within {seconds:g} s" + (f": {why}" if why else "")
        return WeftError(Reason.INSUFFICIENT_MEMORY, words, metadata=metadata, retry_after_seconds=_RETRY_AFTER_SECONDS)

    async def _wait_for(self, wish: MemoryRequest, user: MemoryUser, ask: _Ask, told: "_Told") -> None:
        """Fill `ask` in, or leave it as it is where there are no devices."""
        deadline = self._clock.monotonic() + self._config.max_wait_seconds
        snapshot = await self._first_sight(told)
        if not snapshot.devices:
            return
        if not self._has_devices:
            self._has_devices = True
            self._nudged.set()
        if len(self._held) + len(self._releasing) >= MAX_LEASES:
            raise WeftError(Reason.TOO_MANY_RESOURCES, f"the runner holds {MAX_LEASES} leases, which is the limit")
        if self._line.locked():
            told.say(OWN_LINE)
        async with self._line:
            while True:
                left = max(0.001, deadline - self._clock.monotonic())
                ask.request = acquire_request(
                    wish, snapshot, device_indexes=self._config.device_indexes, max_wait_seconds=left
                )
                ask.request.request_id = new_id("lease")
                await self._ask_until_granted(ask, user, snapshot.source, told)
                if await self._is_confirmed(ask, told):
                    return
                snapshot = await self._observer.look(fresh=True)

    async def _first_sight(self, told: "_Told") -> HostSnapshot:
        """With devices, or with the certainty that there are none."""
        failures = 0
        while True:
            snapshot = await self._observer.look(fresh=True)
            if snapshot.devices or snapshot.source is not Source.UNKNOWN:
                return snapshot
            told.say(NO_SIGHT)
            failures += 1
            await self._clock.sleep(retry_pause_seconds(failures, self._jitter()))

    async def _ask_until_granted(self, ask: _Ask, user: MemoryUser, source: Source, told: "_Told") -> None:
        """One request, repeated while nobody answers it: it has one place in line, and one lease."""
        failures = 0
        while True:
            try:
                await self._greet()
                lease = await self._ask(ask.request, told)
            except WeftError as error:
                if error.reason not in AWAY:
                    raise
                told.say(NO_REGISTRY)
                failures += 1
                await self._clock.sleep(retry_pause_seconds(failures, self._jitter()))
                # What was seen before the registry went away is no ground for a grant.
                snapshot = await self._observer.look(fresh=True)
                ask.request.sighting.CopyFrom(snapshot_message(snapshot))
            else:
                ask.grant = grant_from(lease, source)
                self._held[ask.grant.lease_id] = _Held(ask.grant, user)
                return

    async def _ask(self, request: pb.AcquireLeaseRequest, told: "_Told") -> "lease_pb2.Lease":
        async with contextlib.aclosing(self._calls.acquire(request)) as responses:
            async for response in responses:
                if response.HasField("granted"):
                    self._note_times(response.granted)
                    return response.granted.lease
                told.say(f"{_WAITING}{response.waiting.detail}")
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry ended the wait without an answer")

    def _note_times(self, granted: pb.GrantedLease) -> None:
        time_to_live = seconds_of(granted.time_to_live) or DEFAULT_TIME_TO_LIVE_SECONDS
        interval = seconds_of(granted.renew_interval) or DEFAULT_RENEW_SECONDS
        self._times = replace(self._times, time_to_live=time_to_live, next_within=interval)

    async def _is_confirmed(self, ask: _Ask, told: "_Told") -> bool:
        """Whether a renewal went through: only then is it known by the local clock how long the lease counts."""
        assert ask.grant is not None
        failures = 0
        while ask.grant.lease_id in self._held:
            try:
                await self._renew()
            except WeftError as error:
                if error.reason not in AWAY:
                    raise
                told.say(NO_REGISTRY)
                failures += 1
                await self._clock.sleep(retry_pause_seconds(failures, self._jitter()))
            else:
                if self.is_good(ask.grant):
                    return True
        ask.grant = None
        return False

    async def _greet(self) -> None:
        """Give up what earlier lives of this runner held, once per life and before anything is asked for."""
        async with self._greeting:
            if self._has_greeted:
                return
            released = await self._calls.release_earlier_lives()
            self._has_greeted = True
            if released:
                log.info("leases of an earlier life were given up", count=released)

    async def _renew_for_ever(self) -> None:
        failures = 0
        while True:
            try:
                pause = await self._renew_what_there_is()
                failures = 0
            except WeftError as error:
                failures += 1
                pause = min(retry_pause_seconds(failures, self._jitter()), DEFAULT_RENEW_SECONDS)
                if error.reason not in AWAY:
                    log.warning("leases could not be renewed", reason=error.reason.name, message=error.message)
            await event_within(self._clock, max(MIN_RENEW_SECONDS, pause), self._nudged)
            self._nudged.clear()

    async def _renew_what_there_is(self) -> float:
        """Seconds until the next time."""
        if not self._has_devices:
            snapshot = await self._observer.look()
            self._has_devices = bool(snapshot.devices)
            if not snapshot.devices:
                return self._times.next_within if snapshot.source is Source.UNKNOWN else LOOK_FOR_DEVICES_SECONDS
        await self._greet()
        await self._renew()
        return self._times.next_within

    async def _renew(self) -> None:
        async with self._renewing:
            held = dict(self._held)
            uses = {lease_id: one.user.memory_use() for lease_id, one in held.items()}
            own = {process for use in uses.values() for process in use.processes}
            watched = list(own.union(self._times.watched))[:MAX_WATCHED]
            snapshot = await self._observer.look(watched, fresh=bool(self._times.watched) or not held)
            request = pb.RenewLeasesRequest(
                leases=[use_message(one.grant, uses[lease_id]) for lease_id, one in held.items()],
                sighting=snapshot_message(snapshot),
            )
            sent = self._clock.monotonic()
            self._take_in(await self._calls.renew(request), held, sent)
            for lease_id, one in held.items():
                if lease_id in self._held:
                    one.user.note_memory_seen(seen_bytes(uses[lease_id], snapshot))

    def _take_in(self, response: pb.RenewLeasesResponse, held: dict[str, _Held], sent: float) -> None:
        lost = set(response.lost_lease_ids)
        for lease_id, one in held.items():
            if lease_id not in lost:
                one.good_until = sent + self._times.time_to_live
            elif self._held.pop(lease_id, None) is not None:
                log.error("a lease was lost", lease_id=lease_id, fencing_number=one.grant.fencing_number)
                one.user.note_lease_lost("the registry says that it is somebody else's")
        self._times = replace(
            self._times,
            next_within=seconds_of(response.next_within) or DEFAULT_RENEW_SECONDS,
            watched=tuple(ProcessId(seen.pid, seen.start_ticks) for seen in response.watched_processes[:MAX_WATCHED]),
        )

    async def _release_for_ever(self) -> None:
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

    async def _take_leave(self) -> None:
        """Give everything up and let the book see that it is gone: perhaps nobody looks at this host after us."""
        await self._release_all()
        if self._has_devices:
            for _ in range(LAST_SIGHTINGS):
                await self._renew()

    async def _release_all(self) -> None:
        for lease_id, grant in list(self._releasing.items()):
            try:
                await self._calls.release(lease_id, grant.fencing_number)
            except WeftError as error:
                if error.reason in AWAY:
                    raise
                # Somebody else's by now, or gone: there is nothing to give up.
                log.warning("a lease could not be given up", reason=error.reason.name, message=error.message)
            self._releasing.pop(lease_id, None)
            self._nudged.set()  # the book waits for a sighting without its processes


class _Told:
    """Passes words on when they change."""

    def __init__(self, on_waiting: OnWaiting) -> None:
        self._on_waiting = on_waiting
        self.last = ""

    def say(self, words: str) -> None:
        if words != self.last:
            self.last = words
            self._on_waiting(words)
