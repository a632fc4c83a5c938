"""The engine of durable tasks, and the renewal of their leases.

The engine reads lanes ahead, offers tasks to the scheduler, and runs those that get a slot. The lease renewer renews
this router's claims, detects lost ones, and takes back expired leases of other routers.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from typing_extensions import override

from router_svc.durable.tasks.task_dispatcher import LaneState, TaskDispatcher
from router_svc.durable.tasks.task_records import (
    LOST_LEASE,
    ExpiredLease,
    ItemEnded,
    Lane,
    LaneFilled,
    ManyChanged,
    PendingTask,
    StoreEvent,
    TaskChanged,
    TaskLease,
)
from router_svc.durable.tasks.task_run import RunHost, StopReason, TaskDeps, TaskRun
from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import task_pb2
from weft.dispatch.fleet import FleetView
from weft.durable.tasks import state_name, task_error
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_critical, start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import wait_for_event

log = get_logger("weft.tasks")

MESH_CHANGE_SECONDS = 1.0
"""Minimum time between two new offers of refused tasks because of mesh changes."""
LOOK_SECONDS = 0.1
"""Minimum time between two listings of all lanes, however many events arrive."""
CANCEL_SECONDS = 5.0
"""Maximum wait for the end of cancelled runs."""
STORE_PAUSE_SECONDS = 1.0
"""Pause after a database failure."""
FINAL_WRITE_SECONDS = 5.0
"""How long a stop waits, after its grace period, for interrupted runs to be reverted in the database."""
MAX_RETRY_SECONDS = 1.0
"""Pause after a failed renewal; at most a third of the interval."""
IDLE_LEASES = 4
"""Pause between renewals while nothing runs here, in lease lengths."""
DEBOUNCE_SECONDS = 0.05
"""Events within this time cause a single renewal."""


class TaskEngine(RunHost):
    """Offers and runs a router's tasks on an event loop."""

    def __init__(self, deps: TaskDeps) -> None:
        self._deps = deps
        self._clock = deps.database_clock.clock
        self._dispatcher = TaskDispatcher(deps.limits)
        self._lease_renewer = LeaseRenewer(deps, self)
        self._runs: dict[str, TaskRun] = {}
        """Offered and running tasks by id."""
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._running: set[str] = set()
        self._work_signal = asyncio.Event()
        self._is_publishing = False
        self._cursor: Lane | None = None
        self._looks_everywhere = True
        self._has_unlisted_lanes = False
        """Whether the dispatcher had no room for a lane at the last look."""
        self._looked_at = float("-inf")
        self._ready_at: float | None = None
        self._shape: tuple[object, ...] = ()
        """The part of the mesh view that can turn a refusal into a grant, which excludes load."""
        self._mesh_is_new = False
        self._mesh_change_at = float("-inf")
        self._loops: list[asyncio.Task[None]] = []
        deps.events.subscribe(self._on_event)

    # -- life cycle

    async def start(self) -> None:
        """Starts the loops."""
        self._loops = [
            start_critical(self._lease_renewer.run(), name="task-lease-renewer"),
            start_critical(self._offer_loop(), name="task-engine"),
        ]

    async def stop(self, grace_seconds: float) -> None:
        """Stops offering, lets runs continue for the grace period, and reverts the rest without counting an attempt."""
        # The first loop renews leases and must continue while anything runs.
        renewer, others = self._loops[:1], self._loops[1:]
        self._loops = []
        for loop in others:
            loop.cancel()
        if others:
            await asyncio.wait(others)
        for run in list(self._runs.values()):
            if not run.is_running:
                run.stop(StopReason.HALTED)
        await _wait_for(self._under_way.values(), grace_seconds)
        for run in list(self._runs.values()):
            run.stop(StopReason.HALTED)
        await _wait_for(self._under_way.values(), FINAL_WRITE_SECONDS)
        await stop_tasks(list(self._under_way.values()))
        # The error of a loop that ended early is raised last.
        await stop_tasks([*renewer, *others])

    # -- notifications and queries

    def mesh_changed(self, view: FleetView) -> None:
        """Receives a new view of the mesh."""
        runners = frozenset(
            (runner.name, runner.incarnation, runner.active, runner.draining) for runner in view.runners.values()
        )
        shape = (view.models, view.agents, view.routes, view.settings, view.routers, runners)
        before, self._shape = self._shape, shape
        # Equal objects are mostly identical, which a tuple comparison checks first.
        if before != shape:
            self._mesh_is_new = True
            self._work_signal.set()

    def withdraw(self, task_id: str) -> None:
        """Stops offering or running a task that was ended elsewhere."""
        run = self._runs.get(task_id)
        if run is None:
            self._dispatcher.withdraw(task_id)
        else:
            run.stop(StopReason.CANCELLED)

    async def cancel(self, is_wanted: Callable[[PendingTask], bool]) -> None:
        """Cancels the wanted tasks that run here, so that they end with their output and token counts.

        Returns when they have ended, or after CANCEL_SECONDS: the caller cancels the others in the store.
        """
        wanted = [run for run in self._runs.values() if run.is_running and is_wanted(run.task)]
        for run in wanted:
            run.stop(StopReason.WITHDRAWN)
        runs = [self._under_way[run.task.id] for run in wanted if run.task.id in self._under_way]
        await _wait_for(runs, CANCEL_SECONDS)

    def waiting_for(self, task: task_pb2.Task) -> str:
        """Returns why a task waits; empty: unknown."""
        run = self._runs.get(task.id)
        if run is not None:
            return "" if run.is_running else run.waiting_reason or "a slot"
        return self._dispatcher.waiting_reason(task.model, task.tenant)

    @property
    def refusals(self) -> Mapping[Lane, str]:
        """See `TaskDispatcher.refusals`."""
        return self._dispatcher.refusals

    def progress_of(self, task: task_pb2.Task) -> event_pb2.WorkProgress | None:
        """Returns the progress of a running image or recording task; None: unknown."""
        run = self._runs.get(task.id)
        is_here = run is not None and run.claim is not None and run.claim.attempt == task.attempt
        return run.progress if run is not None and is_here else None

    @override
    def publish(self, event: StoreEvent) -> None:
        self._is_publishing = True
        try:
            self._deps.events.publish(event)
        finally:
            self._is_publishing = False

    @property
    def claims(self) -> frozenset[TaskLease]:
        """The claims of the tasks that run here."""
        return frozenset(run.claim for run in self._runs.values() if run.claim is not None)

    def is_claiming(self, task_id: str) -> bool:
        """Whether a claim of the task is in progress."""
        run = self._runs.get(task_id)
        return run is not None and run.is_claiming

    def lose(self, claim: TaskLease) -> None:
        """Stops the run whose claim is lost."""
        run = self._runs.get(claim.task_id)
        if run is not None and run.claim == claim:
            run.stop(StopReason.LOST)

    def _on_event(self, event: StoreEvent) -> None:
        match event:
            case LaneFilled(lane):
                self._has_unlisted_lanes |= not self._dispatcher.note(lane)
                self._work_signal.set()
            case TaskChanged(task_id):
                run = self._runs.get(task_id)
                if not self._is_publishing and run is not None and not run.is_stopped:
                    self._lease_renewer.renew_soon()
            case ManyChanged():
                self._looks_everywhere = True
                self._work_signal.set()
                self._lease_renewer.renew_soon()

    # -- offering

    async def _offer_loop(self) -> None:
        while True:
            self._work_signal.clear()
            try:
                await self._round()
            except WeftError as error:
                log.warning("tasks could not be read", why=error.message)
                await self._pause_after_failure()
            except Exception:
                # If this loop ended, no task would start again, without a visible reason.
                log.exception("tasks could not be offered")
                await self._pause_after_failure()
            await wait_for_event(self._work_signal, self._clock, self._next_round_at() - self._clock.monotonic())

    async def _pause_after_failure(self) -> None:
        await self._clock.sleep(STORE_PAUSE_SECONDS)
        self._looks_everywhere = True
        self._work_signal.set()

    async def _round(self) -> None:
        now = self._clock.monotonic()
        if self._mesh_is_new and now >= self._mesh_change_at + MESH_CHANGE_SECONDS:
            self._mesh_is_new, self._mesh_change_at = False, now
            self._dispatcher.try_all_again()
        if now >= self._look_at():
            await self._look_everywhere(now)
        while True:
            for state in self._dispatcher.next_to_read(now):
                await self._read(state)
            free = self._deps.limits.max_running - len(self._running)
            tasks = self._dispatcher.take(now, free)
            for task in tasks:
                self._offer(task)
            # Timed work must not starve while there is always something to offer.
            if not tasks or self._clock.monotonic() >= self._next_round_at():
                return

    async def _look_everywhere(self, now: float) -> None:
        limits, store = self._deps.limits, self._deps.store
        self._looks_everywhere, self._looked_at, self._ready_at = False, now, None
        self._has_unlisted_lanes = False
        self._dispatcher.tidy()
        try:
            lanes = await store.lanes(self._deps.database_clock.now(), self._cursor, limits.max_lanes)
            if self._dispatcher.is_full:
                # If there is room left, the rest is added at the next look without an eviction.
                self._withdraw_offers(self._dispatcher.make_room(lanes))
            noted = [lane for lane in lanes if self._dispatcher.note(lane)]
            # If there are more lanes than room, the next look begins after the last added lane.
            is_all = len(noted) == len(lanes) < limits.max_lanes
            self._has_unlisted_lanes |= not is_all or self._cursor is not None
            self._cursor = noted[-1] if noted and not is_all else None
            ready_at = await store.next_ready_at(self._deps.database_clock.now())
        except WeftError:
            self._looks_everywhere = True
            raise
        if ready_at is not None:
            self._note_ready(ready_at)

    async def _read(self, state: LaneState) -> None:
        room = limit, most_bytes = self._dispatcher.room_in(state)
        # Before the read, as an event during the read sets it again.
        state.has_more = False
        # A run that ends during the read may still be returned as pending.
        before = set(self._runs)
        try:
            tasks = await self._deps.store.pending(state.lane, self._deps.database_clock.now(), limit, most_bytes)
        except WeftError:
            state.has_more = True
            raise
        self._dispatcher.put(state, tasks, room, before | self._runs.keys())

    def _withdraw_offers(self, tasks: Sequence[PendingTask]) -> None:
        for task in tasks:
            run = self._runs.get(task.id)
            # A run with a slot is no longer an offer.
            if run is not None and not run.is_running and not run.is_claiming:
                run.stop(StopReason.HALTED)

    def _offer(self, task: PendingTask) -> None:
        run = self._runs[task.id] = TaskRun(self._deps, self, task)
        work = self._under_way[task.id] = start_task(run.go(), name=f"task-{task.id}")
        work.add_done_callback(lambda _ended: self._note_end(run))

    @override
    def admit(self, run: TaskRun) -> bool:
        if run.task.id not in self._running and len(self._running) >= self._deps.limits.max_running:
            return False
        self._running.add(run.task.id)
        return True

    @override
    def note_claimed(self, run: TaskRun) -> None:
        self._running.add(run.task.id)
        self._dispatcher.claimed(run.task)
        self._work_signal.set()
        if len(self._running) == 1:
            # The renewer paused while nothing ran.
            self._lease_renewer.renew_soon()

    def _note_end(self, run: TaskRun) -> None:
        task = run.task
        self._runs.pop(task.id, None)
        self._under_way.pop(task.id, None)
        self._running.discard(task.id)
        if run.claim is not None:
            if run.ready_at is not None:
                self._note_ready(run.ready_at)
            if run.is_stopped or run.ready_at is not None:
                # It may be pending again, and reads skipped it while it ran here.
                self._dispatcher.note(task.lane)
        elif run.refusal is not None:
            self._dispatcher.refused(task, run.refusal, self._clock.monotonic(), is_unwritten=run.is_unwritten)
        elif run.is_over_capacity:
            self._dispatcher.returned(task)
        else:
            self._dispatcher.gone(task)
            # It may be claimed here by a claim whose acknowledgement was lost.
            self._lease_renewer.renew_soon()
        self._work_signal.set()

    # -- when to look again

    def _note_ready(self, ready_at: float) -> None:
        moment = self._clock.monotonic() + max(0.0, ready_at - self._deps.database_clock.now())
        self._ready_at = moment if self._ready_at is None else min(self._ready_at, moment)

    def _look_at(self) -> float:
        """Returns when all lanes are listed next."""
        if self._looks_everywhere or (self._has_unlisted_lanes and self._dispatcher.has_room):
            return self._looked_at + LOOK_SECONDS
        polled = self._looked_at + self._deps.limits.poll_interval_seconds
        if self._ready_at is None:
            return polled
        return min(polled, max(self._ready_at, self._looked_at + LOOK_SECONDS))

    def _next_round_at(self) -> float:
        moments = [self._look_at()]
        if self._mesh_is_new:
            moments.append(self._mesh_change_at + MESH_CHANGE_SECONDS)
        pause_ends = self._dispatcher.next_look_at(self._clock.monotonic())
        if pause_ends is not None:
            moments.append(pause_ends)
        return min(moments)


async def _wait_for(tasks: Collection[asyncio.Task[None]], seconds: float) -> None:
    if tasks:
        await asyncio.wait(list(tasks), timeout=seconds)


class LeaseRenewer:
    """Renews all leases three times per lease length; while nothing runs here, it only rarely checks others."""

    def __init__(self, deps: TaskDeps, engine: TaskEngine) -> None:
        self._deps = deps
        self._database_clock = deps.database_clock
        self._store = deps.store
        self._engine = engine
        self._renewal_requested = asyncio.Event()

    def renew_soon(self) -> None:
        """Requests an immediate renewal, because a task that runs here may have been ended elsewhere."""
        self._renewal_requested.set()

    async def run(self) -> None:
        """Renews leases until cancelled."""
        lease_seconds = self._deps.limits.lease_seconds
        interval, clock = lease_seconds / 3, self._database_clock.clock
        # By then the leases of the previous leader have expired.
        is_first_until = clock.monotonic() + 2 * lease_seconds
        while True:
            self._renewal_requested.clear()
            is_idle = not self._engine.claims and clock.monotonic() > is_first_until
            pause = IDLE_LEASES * lease_seconds if is_idle else interval
            try:
                await self.renew()
            except WeftError as error:
                log.warning("task leases were not renewed", why=error.message)
                pause = min(MAX_RETRY_SECONDS, interval / 3)
            except Exception:
                # Without renewals every run here would lose its lease.
                log.exception("task leases could not be renewed")
                pause = min(MAX_RETRY_SECONDS, interval / 3)
            if await wait_for_event(self._renewal_requested, clock, pause):
                await clock.sleep(DEBOUNCE_SECONDS)

    async def renew(self) -> None:
        """Renews this router's leases, then takes back expired ones of others. Raises SERVICE_UNAVAILABLE."""
        await self._database_clock.synchronize()
        held = self._engine.claims
        renewed = await self._store.renew(
            self._deps.owner, self._database_clock.now() + self._deps.limits.lease_seconds
        )
        for claim in sorted(held - renewed):
            self._engine.lose(claim)
        for claim in sorted(renewed - held - self._engine.claims):
            if not self._engine.is_claiming(claim.task_id):
                await self._revert_unknown(claim)
        await self._revert_expired()

    async def _revert_unknown(self, claim: TaskLease) -> None:
        """Reverts a claim of this router without a run, as its acknowledgement was lost."""
        failure = task_error(Reason.LEASE_LOST, "the acknowledgement of the claim was lost")
        now = self._database_clock.now()
        if await self._store.revert(claim, failure, receipt=b"", counts=False, now=now, ready_at=now):
            log.info(
                "task reverted", task=claim.task_id, attempt=claim.attempt, reason=Reason.LEASE_LOST.name, counts=False
            )
            # The claim does not contain its lane, which a look at all lanes finds.
            for event in (TaskChanged(claim.task_id), ManyChanged()):
                self._engine.publish(event)

    async def _revert_expired(self) -> None:
        while True:
            # If the renewal took as long as a lease, running tasks would otherwise start a second time.
            lost = await self._store.revert_expired(
                self._database_clock.now(), self._deps.limits.sweep_batch, except_of=self._deps.owner
            )
            for lease in lost:
                self._report_expired(lease)
            if len(lost) < self._deps.limits.sweep_batch:
                return

    def _report_expired(self, lease: ExpiredLease) -> None:
        claim = lease.claim
        if lease.state == task_pb2.TASK_STATE_PENDING:
            log.info("task reverted", task=claim.task_id, attempt=claim.attempt, reason=LOST_LEASE.name, counts=True)
        else:
            log.info(
                "task ended",
                task=claim.task_id,
                attempt=claim.attempt,
                state=state_name(lease.state),
                reason=LOST_LEASE.name,
            )
            self._engine.publish(ItemEnded(""))
        self._engine.lose(claim)
        self._engine.publish(TaskChanged(claim.task_id))
        if lease.state == task_pb2.TASK_STATE_PENDING:
            self._engine.publish(LaneFilled(lease.lane))
