"""The VRAM ledger: grants, renews and ends leases of accelerator memory."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace

from registry_svc.ledger.host_view import host_memory, shown_lease
from registry_svc.ledger.lease_store import LeaseStore
from registry_svc.ledger.lease_table import MAX_HOSTS, LeaseTable, RunnerOf
from registry_svc.ledger.policy.leases import (
    Holder,
    HolderKind,
    Lease,
    LeaseState,
    MemoryRequest,
    is_fresh,
    processes_after,
    read_back,
    released,
    watched,
)
from registry_svc.ledger.reconciler import Evictor, Reconciler
from registry_svc.ledger.requests import holder_from, memory_request_from, processes_in, renewed_with
from registry_svc.ledger.wait_queue import Waiter, WaitQueue, require_possible, require_queue_room
from registry_svc.mesh.runner_calls import RunnerCalls
from registry_svc.mesh.unowned import UnownedModel
from registry_svc.registry_config import LedgerConfig
from registry_svc.watchers import Watchers
from registry_svc.writer import SingleWriter
from weft.api.registry.v1 import lease_pb2
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.gpu.snapshot import HostSnapshot, ProcessId, process_id_message, snapshot_from
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_critical, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import duration_of

log = get_logger("weft.registry.ledger")

IDLE_STEP_SECONDS = 1.0
"""Interval of expiry checks while there are leases and no waiting requests."""
MAX_WAITING_WRITES = 1_024
"""Maximum number of queued writes; holders retry with their next renewal."""
MAX_PROCESSES = 1_024
"""Maximum processes of a lease that are not known to have ended."""
MAX_WATCHERS = 1_024
MAX_WATCHED = 4_096
"""Maximum processes that one observation has to report on."""
# A step that is late by this factor means that the registry was frozen.
_FROZEN_AFTER_STEPS = 3


class Ledger:
    """Implements LeaseService. Calls before start or after stop fail with SHUTTING_DOWN.

    Durable facts (grant, release, processes, end, fencing number) are committed before they are acknowledged or acted
    on. Uses and observations are only kept in memory, since they arrive with every renewal.
    """

    def __init__(
        self,
        store: LeaseStore,
        clock: Clock,
        config: LedgerConfig,
        calls: RunnerCalls,
        runner_of: RunnerOf,
    ) -> None:
        self._store = store
        self._clock = clock
        self._config = config
        self._wake = asyncio.Event()
        """Set if there may be something to do now."""
        self._active = asyncio.Event()
        """Set if something depends on the passing of time."""
        self._changed_hosts = Watchers[str](MAX_HOSTS, MAX_WATCHERS)
        self._table = LeaseTable(
            config.device_margin_bytes, config.orphan_keep_seconds, runner_of, on_change=self._note_change
        )
        self._queue = WaitQueue(config.max_waiting, on_change=self._note_change)
        self._evictor = Evictor(calls, clock, self._wake.set)
        self._reconciler = Reconciler(self._table, self._queue, self._evictor, store, clock, config)
        self._writer = SingleWriter(lambda: store.is_in_doubt)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Loads the leases and starts. The store's database must be open. Call it once."""
        stored, now = await self._store.load(), self._clock.monotonic()
        for grant in stored.grants:
            self._table.put(read_back(grant, now))
        self._reconciler.begin(stored.last_fencing_number)
        self._tasks = [
            start_critical(self._let_time_pass(), name="ledger-time"),
            start_critical(self._reconcile_when_woken(), name="ledger-settle"),
        ]
        log.info("ledger open", leases=len(stored.grants))

    def extend_grace(self) -> None:
        """Orphans no lease for a while, because no holder could reach the registry until now."""
        self._reconciler.extend_grace()

    async def stop(self, grace_seconds: float) -> None:
        """Ends all waits and watches, and finishes pending writes within `grace_seconds`. Safe to call twice."""
        tasks, self._tasks = self._tasks, []
        self._changed_hosts.close()
        for host in self._queue.hosts():
            for waiter in self._queue.on(host):
                self._queue.finish(waiter, _not_running())
        await stop_tasks(tasks)
        await self._writer.drain(grace_seconds)
        await self._evictor.stop()

    async def acquire(self, request: pb.AcquireLeaseRequest) -> AsyncGenerator[pb.AcquireLeaseResponse]:
        """Yields status messages while a valid request waits, then the lease. See AcquireLease.

        Must be iterated to its end: if the caller stops before, the lease is released unless it was renewed. Raises
        INSUFFICIENT_MEMORY, NOT_FOUND, PERMISSION_DENIED, TOO_MANY_RESOURCES, and CANCELLED if another call of the same
        request replaced this one.
        """
        self._require_running()
        holder, snapshot = holder_from(request.holder), snapshot_from(request.sighting)
        self._table.require_present(holder, request.session_id)
        self._table.require_own_host(holder, snapshot.host, self._clock.monotonic())
        self._table.see(holder, snapshot, self._clock.monotonic(), self._clock.utc_now())
        waiter = self._waiter_for(request, snapshot)
        was_delivered = False
        try:
            while waiter.outcome is None:
                await waiter.changed.wait()
                waiter.changed.clear()
                if waiter.outcome is None and waiter.status is not None:
                    yield pb.AcquireLeaseResponse(waiting=waiter.status)
            if isinstance(waiter.outcome, WeftError):
                raise waiter.outcome
            lease, was_delivered = waiter.outcome, True
            yield self._granted(self._table.lease(lease.grant.id) or lease)
            self._reconciler.set_recipient(lease, None)
        finally:
            self._queue.leave(waiter)
            if isinstance(waiter.outcome, Lease):
                self._reconciler.abandon(waiter.outcome, waiter, may_have_received=was_delivered)
            self._wake.set()

    async def renew(self, request: pb.RenewLeasesRequest) -> pb.RenewLeasesResponse:
        """Renews leases, and records their use and the holder's observation. See RenewLeases; `request` is valid."""
        self._require_running()
        holder, snapshot = holder_from(request.holder), snapshot_from(request.sighting)
        is_present = self._table.is_present(holder, request.session_id)
        self._table.see(holder, snapshot, self._clock.monotonic(), self._clock.utc_now())
        lost = [use.lease_id for use in request.leases if not (is_present and self._apply_use(holder, use))]
        for use in request.leases:
            if use.lease_id not in lost:
                await self._keep_processes(use.lease_id, processes_in(use))
        leases = self._table.leases_on(snapshot.host)
        someone_waits = bool(self._queue.on(snapshot.host))
        if someone_waits or self._reconciler.is_one_at_its_end(leases):
            self._wake.set()
        is_awaited = someone_waits or any(is_fresh(lease, self._clock.monotonic()) for lease in leases)
        next_within = self._config.watch_interval_seconds if is_awaited else self._config.renew_interval_seconds
        return pb.RenewLeasesResponse(
            lost_lease_ids=lost,
            watched_processes=[process_id_message(process) for process in watched(leases)[:MAX_WATCHED]],
            next_within=duration_of(next_within),
        )

    async def release(self, holder: Holder, session_id: str, lease_id: str, fencing_number: int) -> None:
        """Releases a lease. See ReleaseLease. Raises LEASE_LOST if another holder has it."""
        self._require_running()
        is_present = self._table.is_present(holder, session_id)
        lease = self._table.lease(lease_id)
        if lease is None:
            return
        if not is_present or lease.grant.holder != holder or lease.grant.fencing_number != fencing_number:
            raise WeftError(
                Reason.LEASE_LOST,
                "the lease belongs to another holder, or to another incarnation of this one",
                metadata={"lease": lease_id},
            )
        if lease.state is not LeaseState.RELEASING:
            await self._write(lambda: self._reconciler.release([lease]))
            log.info("lease released", lease=lease_id, purpose=lease.grant.purpose, host=lease.grant.host)
        self._wake.set()

    def require_releasable(self, lease_id: str) -> Lease:
        """Returns a program's lease. Raises NOT_FOUND, and RESOURCE_IN_USE with the next step for a runner's lease."""
        self._require_running()
        lease = self._table.lease(lease_id)
        if lease is None:
            raise WeftError(
                Reason.NOT_FOUND,
                "there is no lease with this id: it has ended or never existed; weft mesh lease list shows all leases",
                metadata={"lease": lease_id},
            )
        if lease.grant.holder.kind is HolderKind.RUNNER:
            model, runner = lease.grant.purpose, lease.grant.holder.name
            next_step = f"; unload it: weft unload {model}"
            if lease.state is LeaseState.ORPHANED:
                next_step = ", which sends no heartbeats; it ends when the model's processes are seen to have ended"
            raise WeftError(
                Reason.RESOURCE_IN_USE,
                f"the lease is for the model {model} on the runner {runner}{next_step}",
                metadata={"lease": lease_id},
            )
        return lease

    async def release_program_lease(self, lease_id: str) -> lease_pb2.Lease:
        """Releases a program's lease for an operator. See ReleaseProgramLease. Raises as `require_releasable`."""
        lease = self.require_releasable(lease_id)
        if lease.state is not LeaseState.RELEASING:
            await self._write(lambda: self._reconciler.release([lease]))
            log.info(
                "lease released by an operator", lease=lease_id, purpose=lease.grant.purpose, host=lease.grant.host
            )
        self._wake.set()
        return shown_lease(self._table, self._table.lease(lease_id) or released(lease, self._clock.monotonic()))

    async def release_earlier_lives(self, holder: Holder, session_id: str) -> int:
        """Releases the leases of a holder's earlier incarnations. Returns their number."""
        self._require_running()
        self._table.require_present(holder, session_id)
        for host in self._queue.hosts():
            for waiter in self._queue.on(host):
                if _is_earlier_incarnation(waiter.request.holder, holder):
                    self._queue.finish(waiter, WeftError(Reason.CANCELLED, "its holder has a new incarnation"))
        earlier = [
            lease
            for lease in self._table
            if lease.state is not LeaseState.RELEASING and _is_earlier_incarnation(lease.grant.holder, holder)
        ]
        if earlier:
            await self._write(lambda: self._reconciler.release(earlier))
            log.info("leases of earlier incarnations released", holder=holder.name, count=len(earlier))
            self._wake.set()
        return len(earlier)

    def lease_count(self, runner: str) -> int:
        """Returns the number of a runner's leases in any state; the memory of each may still be in use."""
        holders = (lease.grant.holder for lease in self._table)
        return sum(holder.kind is HolderKind.RUNNER and holder.name == runner for holder in holders)

    def hosts(self, only: str = "") -> list[pb.HostMemory]:
        """Returns hosts with devices, sorted by name, as last observed; with `only`, just that host."""
        self._require_running()
        self._table.forget_hosts(self._clock.monotonic())
        names = self._table.host_names() if not only else [only]
        found = [self._host(name) for name in names]
        return [host for host in found if host is not None]

    async def watch_hosts(self) -> AsyncGenerator[pb.WatchHostMemoryResponse]:
        """Yields all hosts, `synced`, then each host that changes. See WatchHostMemory. Must be closed."""
        self._require_running()
        with self._changed_hosts.subscribe() as changed:
            self._active.set()
            shown = set[str]()
            for host in self.hosts():
                shown.add(host.host)
                yield pb.WatchHostMemoryResponse(host=host)
            yield pb.WatchHostMemoryResponse(synced=True)
            async for name in changed:
                found = self._host(name)
                if found is not None:
                    shown.add(name)
                    yield pb.WatchHostMemoryResponse(host=found)
                elif name in shown:
                    shown.discard(name)
                    yield pb.WatchHostMemoryResponse(deleted_host=name)

    def _host(self, name: str) -> pb.HostMemory | None:
        return host_memory(self._table, self._queue, name, self._clock.monotonic())

    def _note_change(self, host: str) -> None:
        self._changed_hosts.publish_state(host, host)

    @property
    def is_running(self) -> bool:
        """Whether it is started and not stopped."""
        return bool(self._tasks)

    @property
    def evictions(self) -> Mapping[str, int]:
        """Evictions requested from runners since the start, by their answer."""
        return {answer.name.lower(): count for answer, count in self._evictor.answers.items()}

    def is_local_host(self, host: str) -> bool:
        """Whether a holder that did not join over a relay observes a host, or holds memory there."""
        return self._table.is_seen_locally(host, self._clock.monotonic())

    def unowned_models(self) -> list[UnownedModel]:
        """Returns the models with a held lease that their runner no longer publishes."""
        held = (lease for lease in self._table if lease.state is LeaseState.HELD and self._table.is_unowned(lease))
        return [UnownedModel(lease.grant.holder.name, lease.grant.purpose) for lease in held]

    def _granted(self, lease: Lease) -> pb.AcquireLeaseResponse:
        granted = pb.GrantedLease(
            lease=shown_lease(self._table, lease),
            time_to_live=duration_of(self._config.lease_time_to_live_seconds),
            renew_interval=duration_of(self._config.renew_interval_seconds),
        )
        return pb.AcquireLeaseResponse(granted=granted)

    def _waiter_for(self, message: pb.AcquireLeaseRequest, snapshot: HostSnapshot) -> Waiter:
        request = memory_request_from(
            message,
            arrival=self._queue.next_arrival(),
            now=self._clock.monotonic(),
            max_wait_seconds=self._config.max_wait_seconds,
        )
        lease = self._lease_of(request)
        waiter = Waiter(request=request, outcome=lease)
        if lease is not None:
            self._reconciler.set_recipient(lease, waiter)
            return waiter
        account = self._table.open(request.host)
        if account is None or not snapshot.devices:
            raise WeftError(
                Reason.NOT_FOUND,
                f"{request.host} has no devices whose memory is booked",
                metadata={"host": request.host},
            )
        for index in sorted(request.device_indexes - frozenset(account.devices)):
            raise invalid_field("device_indexes", f"must be devices of {request.host}, which has no device {index}")
        require_possible(request, account)
        self._join(waiter)
        return waiter

    def _join(self, waiter: Waiter) -> None:
        request = waiter.request
        earlier = self._queue.find(request.host, request.key)
        if earlier is not None:
            waiter.request = replace(request, arrival=earlier.request.arrival)
            superseded = WeftError(Reason.CANCELLED, "another call of the same request replaced this one")
            self._queue.finish(earlier, superseded)
        if len(self._table) + len(self._queue) >= self._config.max_leases:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"there are {self._config.max_leases} leases already, as many as a mesh may have",
            )
        waiting = [each.request.holder for host in self._queue.hosts() for each in self._queue.on(host)]
        require_queue_room(request.holder, [*waiting, *(lease.grant.holder for lease in self._table)])
        self._queue.join(waiter)
        self._active.set()
        self._wake.set()

    def _lease_of(self, request: MemoryRequest) -> Lease | None:
        for lease in self._table.leases_on(request.host):
            same = lease.grant.holder == request.holder and lease.grant.request_id == request.request_id
            if same and lease.state is LeaseState.HELD:
                return lease
        return None

    def _apply_use(self, holder: Holder, use: pb.LeaseUse) -> bool:
        """Applies a renewal. Returns whether the holder still has the lease."""
        lease = self._table.lease(use.lease_id)
        if (
            lease is None
            or lease.grant.holder != holder
            or lease.grant.fencing_number != use.fencing_number
            or lease.state is LeaseState.RELEASING
            or self._reconciler.is_ending(use.lease_id)
        ):
            return False
        self._table.put(renewed_with(lease, use, self._clock.monotonic()))
        self._reconciler.acknowledge(use.lease_id)
        return True

    async def _keep_processes(self, lease_id: str, named: frozenset[ProcessId]) -> None:
        lease = self._table.lease(lease_id)
        if lease is not None and processes_after(lease, named) != lease.grant.processes:
            await self._write(lambda: self._save_processes(lease_id, named))

    async def _save_processes(self, lease_id: str, named: frozenset[ProcessId]) -> None:
        lease = self._table.lease(lease_id)
        if lease is None:
            return
        processes = processes_after(lease, named)
        if len(processes) > MAX_PROCESSES:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"a lease may have {MAX_PROCESSES} processes, those that were not seen to end included",
                metadata={"lease": lease_id},
            )
        await self._store.save_processes(lease_id, processes)
        self._keep(lease_id, processes)

    def _keep(self, lease_id: str, processes: tuple[ProcessId, ...]) -> None:
        lease = self._table.lease(lease_id)
        if lease is not None:
            grant = replace(lease.grant, processes=processes)
            self._table.put(replace(lease, grant=grant, gone=lease.gone.intersection(processes)))

    def _require_running(self) -> None:
        if not self._tasks:
            raise _not_running()

    async def _write(self, write: Callable[[], Awaitable[None]]) -> None:
        if self._writer.waiting >= MAX_WAITING_WRITES:
            raise WeftError(
                Reason.QUEUE_FULL,
                f"the VRAM ledger has {MAX_WAITING_WRITES} changes waiting to be written; try again",
                retry_after_seconds=1.0,
            )
        await self._writer.run(write)

    async def _let_time_pass(self) -> None:
        while True:
            # Watchers also learn of hosts that were not observed for too long.
            is_idle = not (len(self._table) or len(self._queue) or self._evictor.attempts())
            if is_idle and not self._changed_hosts:
                self._active.clear()
                await self._active.wait()
            before = self._clock.monotonic()
            seconds = self._config.watch_interval_seconds if len(self._queue) else IDLE_STEP_SECONDS
            await self._clock.sleep(seconds)
            late = self._clock.monotonic() - before
            if late > max(_FROZEN_AFTER_STEPS * seconds, self._config.lease_time_to_live_seconds / 2):
                log.warning("the registry was frozen: no lease is orphaned for a while", seconds=round(late, 1))
                self._reconciler.extend_grace()
            self._wake.set()

    async def _reconcile_when_woken(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            # After a failure the next round repeats the step, so the loop must not end.
            try:
                await self._writer.run(self._reconciler.reconcile)
            except WeftError as error:
                log.error("a step of the ledger failed", reason=error.reason.name)  # noqa: TRY400 - the store has logged the cause
                # A database failure must not extend a wait beyond its deadline.
                self._reconciler.end_waits(error)
            except Exception:
                log.exception("a step of the ledger failed unexpectedly")


def _is_earlier_incarnation(holder: Holder, present: Holder) -> bool:
    same = holder.kind is present.kind and holder.name == present.name
    return same and holder.incarnation != present.incarnation


def _not_running() -> WeftError:
    return WeftError(Reason.SHUTTING_DOWN, "the registry is not running", retry_after_seconds=1.0)
