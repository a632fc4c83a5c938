"""The book of memory: the one place where leases are granted, renewed and ended."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

import structlog

from registry_svc.config import LedgerConfig
from registry_svc.ledger.domain import (
    DeviceMemory,
    Granted,
    HostMemory,
    LeaseUse,
    MemoryRequest,
    Renewal,
    Renewed,
    Waiting,
)
from registry_svc.ledger.evictions import Asker
from registry_svc.ledger.lease_store import LeaseStore
from registry_svc.ledger.lease_table import Book, IsGuest, nobody
from registry_svc.ledger.policy.leases import (
    Holder,
    HolderKind,
    Lease,
    LeaseState,
    Wish,
    is_fresh,
    processes_after,
    read_back,
    renewed,
    watched,
)
from registry_svc.ledger.reconciler import Settler
from registry_svc.ledger.wait_queue import Line, Waiter, require_place, require_possible
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.policy.unowned import UnownedModel
from registry_svc.mesh.runner_calls import RunnerCalls
from registry_svc.writer import SingleWriter
from weft.gpu.snapshot import ProcessId
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.service import start_critical, stop_tasks

SessionOf = Callable[[str], tuple[str, str] | None]
"""By a runner's name: its session id and its present incarnation; None: there is no such runner."""


OwnsModel = Callable[[str, str], bool]
"""By a runner's name and a model's: whether the runner publishes the model, so that its memory has an owner."""


def owns_all(_runner: str, _model: str) -> bool:
    """See OwnsModel: every lease has an owner."""
    return True


def owners_of(core: RegistryCore) -> OwnsModel:
    """Looks up whether a runner, active or not, publishes a model."""

    def owns_model(runner: str, model: str) -> bool:
        member = core.mesh.of_runner(runner)
        return member is not None and (not model or model in member.publications)

    return owns_model


def sessions_of(core: RegistryCore) -> SessionOf:
    """Looks a runner's session id and present incarnation up, whether it is active or not."""

    def session_of(runner: str) -> tuple[str, str] | None:
        member = core.mesh.of_runner(runner)
        return None if member is None else (member.session.id, member.session.incarnation)

    return session_of


def guests_of(core: RegistryCore) -> IsGuest:
    """Whether a runner that is known, active or not, joined over a link."""

    def is_guest(runner: str) -> bool:
        member = core.mesh.of_runner(runner)
        return member is not None and member.profile.dial_out

    return is_guest


log = structlog.get_logger("weft.registry.ledger")

IDLE_STEP_SECONDS = 1.0
"""How often time is let pass while there are leases and nobody waits."""
MAX_WAITING_WRITES = 1_024
"""Changes that may wait for their turn; holders try again with their next renewal."""
MAX_PROCESSES = 1_024
"""Processes of one lease that have not been seen to end."""
MAX_WATCHED = 4_096
"""Processes that one sighting is asked about."""
# A step so much later than the one before means that the registry itself was frozen.
_FROZEN_AFTER_STEPS = 3


class Ledger:
    """See LeaseService in the contract. Calls outside of start and stop are answered with SHUTTING_DOWN.

    What is durable (a grant, that it was given up, whose memory it is, its end, the fencing number) is committed before
    it is acknowledged or acted on. Uses and sightings are memory only, and come anew with every renewal.
    """

    def __init__(
        self,
        store: LeaseStore,
        clock: Clock,
        config: LedgerConfig,
        calls: RunnerCalls,
        session_of: SessionOf,
        is_guest: IsGuest = nobody,
        owns_model: OwnsModel = owns_all,
    ) -> None:
        self._store = store
        self._clock = clock
        self._config = config
        self._session_of = session_of
        self._owns_model = owns_model
        self._nudged = asyncio.Event()
        """There may be something to do now."""
        self._stirred = asyncio.Event()
        """Time matters again: there is something that it changes."""
        self._book = Book(config.device_margin_bytes, config.orphan_keep_seconds, is_guest)
        self._line = Line(config.max_waiting)
        self._asker = Asker(calls, clock, self._nudged.set)
        self._settler = Settler(self._book, self._line, self._asker, store, clock, config)
        self._writer = SingleWriter()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def config(self) -> LedgerConfig:
        """Its settings."""
        return self._config

    async def start(self) -> None:
        """Read the book back and begin; the store's database is open. Not to be started twice."""
        stored, now = await self._store.load(), self._clock.monotonic()
        for grant in stored.grants:
            self._book.put(read_back(grant, now))
        self._settler.begin(stored.last_fencing_number)
        self._tasks = [
            start_critical(self._let_time_pass(), name="ledger-time"),
            start_critical(self._settle_when_nudged(), name="ledger-settle"),
        ]
        log.info("ledger open", leases=len(stored.grants))

    async def stop(self, grace_seconds: float) -> None:
        """End everybody's wait, and finish what is being written for at most `grace_seconds`. Safe to call twice."""
        tasks, self._tasks = self._tasks, []
        for host in self._line.hosts():
            for waiter in self._line.on(host):
                self._line.finish(waiter, _not_running())
        await stop_tasks(tasks)
        await self._writer.drain(grace_seconds)
        await self._asker.stop()

    async def acquire(self, request: MemoryRequest) -> AsyncGenerator[Waiting | Granted]:
        """What is waited for, then the lease. See AcquireLease.

        To be iterated to its end: a lease whose hearer stops before that is given up again, unless it was renewed.
        Raises INSUFFICIENT_MEMORY, NOT_FOUND, PERMISSION_DENIED, TOO_MANY_RESOURCES, and CANCELLED when another call
        of the same request took its place.
        """
        self._require_running()
        self._require_present(request.holder, request.session_id)
        self._book.see(request.holder, request.sight, self._clock.monotonic(), self._clock.utc_now())
        waiter = self._waiter_for(request)
        was_told = False
        try:
            while waiter.outcome is None:
                await waiter.news.wait()
                waiter.news.clear()
                if waiter.outcome is None and waiter.word is not None:
                    yield waiter.word
            if isinstance(waiter.outcome, WeftError):
                raise waiter.outcome
            lease, was_told = waiter.outcome, True
            yield self._granted(self._book.lease(lease.grant.id) or lease)
            self._settler.tell(lease, None)
        finally:
            self._line.leave(waiter)
            if isinstance(waiter.outcome, Lease):
                self._settler.abandon(waiter.outcome, waiter, may_have_heard=was_told)
            self._nudged.set()

    async def renew(self, renewal: Renewal) -> Renewed:
        """Keep leases, and take in how they are used and what is seen. See RenewLeases."""
        self._require_running()
        is_present = self._is_present(renewal.holder, renewal.session_id)
        self._book.see(renewal.holder, renewal.sight, self._clock.monotonic(), self._clock.utc_now())
        lost = tuple(use.lease_id for use in renewal.uses if not (is_present and self._take_in(renewal.holder, use)))
        for use in renewal.uses:
            if use.lease_id not in lost:
                await self._keep_processes(use)
        leases = self._book.leases_on(renewal.sight.host)
        someone_waits = bool(self._line.on(renewal.sight.host))
        if someone_waits or self._settler.is_one_at_its_end(leases):
            self._nudged.set()
        is_awaited = someone_waits or any(is_fresh(lease, self._clock.monotonic()) for lease in leases)
        next_within = self._config.watch_interval_seconds if is_awaited else self._config.renew_interval_seconds
        return Renewed(
            lost_lease_ids=lost, watched=tuple(watched(leases)[:MAX_WATCHED]), next_within_seconds=next_within
        )

    async def release(self, holder: Holder, session_id: str, lease_id: str, fencing_number: int) -> None:
        """Give a lease up. See ReleaseLease. Raises LEASE_LOST when it is somebody else's."""
        self._require_running()
        is_present = self._is_present(holder, session_id)
        lease = self._book.lease(lease_id)
        if lease is None:
            return
        if not is_present or lease.grant.holder != holder or lease.grant.fencing_number != fencing_number:
            raise WeftError(
                Reason.LEASE_LOST,
                "the lease belongs to another holder, or to another life of this one",
                metadata={"lease": lease_id},
            )
        if lease.state is not LeaseState.RELEASING:
            await self._write(lambda: self._settler.release([lease]))
            log.info("lease released", lease=lease_id, purpose=lease.grant.purpose, host=lease.grant.host)
        self._nudged.set()

    async def release_earlier_lives(self, holder: Holder, session_id: str) -> int:
        """Give up the leases of a holder's earlier incarnations, and say how many those were."""
        self._require_running()
        self._require_present(holder, session_id)
        for host in self._line.hosts():
            for waiter in self._line.on(host):
                if _is_earlier_life(waiter.wish.holder, holder):
                    self._line.finish(waiter, WeftError(Reason.CANCELLED, "its holder has begun another life"))
        earlier = [
            lease
            for lease in self._book
            if lease.state is not LeaseState.RELEASING and _is_earlier_life(lease.grant.holder, holder)
        ]
        if earlier:
            await self._write(lambda: self._settler.release(earlier))
            log.info("leases of earlier lives released", holder=holder.name, count=len(earlier))
            self._nudged.set()
        return len(earlier)

    def lease_count(self, runner: str) -> int:
        """How many leases a runner holds, in whatever state; the memory of each may still be in use."""
        holders = (lease.grant.holder for lease in self._book)
        return sum(holder.kind is HolderKind.RUNNER and holder.name == runner for holder in holders)

    def hosts(self, only: str = "") -> list[HostMemory]:
        """Hosts with devices, by name, as last seen; `only` one of them if it is named."""
        self._require_running()
        self._book.forget_hosts(self._clock.monotonic())
        names = self._book.host_names() if not only else [only]
        found = [self._host(name) for name in names]
        return [host for host in found if host is not None]

    def unowned_models(self) -> list[UnownedModel]:
        """The models that hold a lease and that their runner does not publish any more."""
        held = (lease for lease in self._book if lease.state is LeaseState.HELD and self._is_unowned(lease))
        return [UnownedModel(lease.grant.holder.name, lease.grant.purpose) for lease in held]

    def _host(self, name: str) -> HostMemory | None:
        seen, book = self._book.host(name), self._book.open(name)
        if seen is None or book is None or not seen.sight.devices:
            return None
        return HostMemory(
            host=name,
            source=seen.sight.source,
            seen_at=seen.seen_at,
            devices=tuple(DeviceMemory(sight=device, book=book.devices[device.index]) for device in seen.sight.devices),
            leases=tuple(
                Granted(lease=each, seen=book.seen[each.grant.id], unowned=self._is_unowned(each))
                for each in self._book.leases_on(name)
            ),
            waiting_count=len(self._line.on(name)),
        )

    def _waiter_for(self, request: MemoryRequest) -> Waiter:
        wish = self._wish_of(request)
        waiter = Waiter(wish=wish)
        lease = self._lease_of(wish)
        if lease is not None:
            waiter.finish(lease)
            self._settler.tell(lease, waiter)
            return waiter
        book = self._book.open(wish.host)
        if book is None or not request.sight.devices:
            raise WeftError(
                Reason.NOT_FOUND, f"{wish.host} has no devices whose memory is booked", metadata={"host": wish.host}
            )
        for index in sorted(wish.device_indexes - frozenset(book.devices)):
            raise invalid_field("device_indexes", f"must be devices of {wish.host}, which has no device {index}")
        require_possible(wish, book)
        self._join(waiter)
        return waiter

    def _join(self, waiter: Waiter) -> None:
        wish = waiter.wish
        earlier = self._line.find(wish.host, wish.key)
        if earlier is not None:
            waiter.wish = replace(wish, arrival=earlier.wish.arrival)
            superseded = WeftError(Reason.CANCELLED, "another call of the same request took the place of this one")
            self._line.finish(earlier, superseded)
        if len(self._book) + len(self._line) >= self._config.max_leases:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"there are {self._config.max_leases} leases already, the most that registry.ledger.max_leases allows",
            )
        waiting = [each.wish.holder for host in self._line.hosts() for each in self._line.on(host)]
        require_place(wish.holder, [*waiting, *(lease.grant.holder for lease in self._book)])
        self._line.join(waiter)
        self._stirred.set()
        self._nudged.set()

    def _wish_of(self, request: MemoryRequest) -> Wish:
        holder, most = request.holder, self._config.max_wait_seconds
        wait = most if request.max_wait_seconds is None else min(request.max_wait_seconds, most)
        return Wish(
            key=f"{holder.kind.name}\n{holder.name}\n{holder.incarnation}\n{request.request_id}",
            request_id=request.request_id,
            holder=holder,
            purpose=request.purpose,
            host=request.sight.host,
            size=request.size,
            device_indexes=request.device_indexes,
            max_devices=request.max_devices,
            priority=request.priority,
            pinned=request.pinned,
            arrival=self._line.next_arrival(),
            deadline=self._clock.monotonic() + wait,
        )

    def _lease_of(self, wish: Wish) -> Lease | None:
        for lease in self._book.leases_on(wish.host):
            same = lease.grant.holder == wish.holder and lease.grant.request_id == wish.request_id
            if same and lease.state is LeaseState.HELD:
                return lease
        return None

    def _granted(self, lease: Lease) -> Granted:
        book = self._book.open(lease.grant.host)
        seen = None if book is None else book.seen.get(lease.grant.id)
        return Granted(lease=lease, seen=seen, unowned=self._is_unowned(lease))

    def _is_unowned(self, lease: Lease) -> bool:
        holder = lease.grant.holder
        if lease.state is LeaseState.HELD and holder.kind is HolderKind.RUNNER:
            return not self._owns_model(holder.name, lease.grant.purpose)
        return lease.state is LeaseState.ORPHANED

    def _take_in(self, holder: Holder, use: LeaseUse) -> bool:
        """Whether the lease is still the holder's."""
        lease = self._book.lease(use.lease_id)
        if (
            lease is None
            or lease.grant.holder != holder
            or lease.grant.fencing_number != use.fencing_number
            or lease.state is LeaseState.RELEASING
            or self._settler.is_ending(use.lease_id)
        ):
            return False
        changed = replace(
            renewed(lease, self._clock.monotonic()),
            named=use.processes,
            filled=use.filled,
            active_requests=use.active_requests,
            priority=use.priority,
            pinned=use.pinned,
            last_used_at=use.last_used_at,
        )
        self._book.put(changed)
        self._settler.heard(use.lease_id)
        return True

    async def _keep_processes(self, use: LeaseUse) -> None:
        lease = self._book.lease(use.lease_id)
        if lease is not None and processes_after(lease, use.processes) != lease.grant.processes:
            await self._write(lambda: self._save_processes(use))

    async def _save_processes(self, use: LeaseUse) -> None:
        lease = self._book.lease(use.lease_id)
        if lease is None:
            return
        processes = processes_after(lease, use.processes)
        if len(processes) > MAX_PROCESSES:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"a lease may have {MAX_PROCESSES} processes, those that were not seen to end included",
                metadata={"lease": use.lease_id},
            )
        await self._store.save_processes(use.lease_id, processes)
        self._keep(use.lease_id, processes)

    def _keep(self, lease_id: str, processes: tuple[ProcessId, ...]) -> None:
        lease = self._book.lease(lease_id)
        if lease is not None:
            grant = replace(lease.grant, processes=processes)
            self._book.put(replace(lease, grant=grant, gone=lease.gone.intersection(processes)))

    def _is_present(self, holder: Holder, session_id: str) -> bool:
        """Whether a holder is who it says, in its present life. Raises PERMISSION_DENIED when it is somebody else."""
        if holder.kind is HolderKind.PROGRAM:
            return True
        session = self._session_of(holder.name)
        if session is None or session[0] != session_id:
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"this is not the session of the runner {holder.name!r}; open one first",
                metadata={"runner": holder.name},
            )
        return session[1] == holder.incarnation

    def _require_present(self, holder: Holder, session_id: str) -> None:
        if not self._is_present(holder, session_id):
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"the runner {holder.name!r} has begun another life since",
                metadata={"runner": holder.name},
            )

    def _require_running(self) -> None:
        if not self._tasks:
            raise _not_running()

    async def _write(self, write: Callable[[], Awaitable[None]]) -> None:
        if self._writer.waiting >= MAX_WAITING_WRITES:
            raise WeftError(
                Reason.QUEUE_FULL,
                f"the book of memory has {MAX_WAITING_WRITES} changes waiting to be written; try again",
                retry_after_seconds=1.0,
            )
        await self._writer.run(write)

    async def _let_time_pass(self) -> None:
        while True:
            if not (len(self._book) or len(self._line) or self._asker.asks()):
                self._stirred.clear()
                await self._stirred.wait()
            before = self._clock.monotonic()
            seconds = self._config.watch_interval_seconds if len(self._line) else IDLE_STEP_SECONDS
            await self._clock.sleep(seconds)
            late = self._clock.monotonic() - before
            if late > max(_FROZEN_AFTER_STEPS * seconds, self._config.lease_time_to_live_seconds / 2):
                log.warning("the registry was frozen: no lease is orphaned for a while", seconds=round(late, 1))
                self._settler.extend_grace()
            self._nudged.set()

    async def _settle_when_nudged(self) -> None:
        while True:
            await self._nudged.wait()
            self._nudged.clear()
            # The next step does again what this one could not; a loop that ended would never do it.
            try:
                await self._writer.run(self._settler.settle)
            except WeftError as error:
                log.error("a step of the ledger failed", reason=error.reason.name)  # noqa: TRY400 - the store has logged the cause
            except Exception:
                log.exception("a step of the ledger failed unexpectedly")


def _is_earlier_life(holder: Holder, present: Holder) -> bool:
    same = holder.kind is present.kind and holder.name == present.name
    return same and holder.incarnation != present.incarnation


def _not_running() -> WeftError:
    return WeftError(Reason.SHUTTING_DOWN, "the registry is not running", retry_after_seconds=1.0)
