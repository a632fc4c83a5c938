"""Who runs tasks: reads lanes ahead, offers a few tasks of each to the scheduler, and runs those that get a slot."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from router_svc.durable.tasks.config import TaskLimits
from router_svc.durable.tasks.database_clock import DatabaseClock
from router_svc.durable.tasks.failpoints import Failpoints
from router_svc.durable.tasks.lease_renewer import LeaseRenewer
from router_svc.durable.tasks.store_port import (
    Claim,
    LaneFilled,
    ManyChanged,
    PendingTask,
    StoreEvent,
    TaskChanged,
    TaskStore,
)
from router_svc.durable.tasks.task_call import CallMaker
from router_svc.durable.tasks.task_dispatcher import LaneState, TaskDispatcher
from router_svc.durable.tasks.task_events import TaskEventBus, wait_for_event
from router_svc.durable.tasks.task_run import RunDeps, StopReason, TaskRun
from weft.dispatch.fleet import FleetView
from weft.durable.tasks import Task
from weft.kernel.errors import WeftError
from weft.kernel.service import start_critical, start_restarting, start_task, stop_tasks

if TYPE_CHECKING:
    from router_svc.durable.tasks.store_port import Lane

log = structlog.get_logger("weft.tasks")

MESH_NEWS_SECONDS = 1.0
"""Who was refused is offered again with news of the mesh, but not more often than this."""
LOOK_SECONDS = 0.1
"""All lanes are looked at no more often than this, however much news there is."""
STORE_PAUSE_SECONDS = 1.0
"""Pause after the database has failed."""
LAST_WORDS_SECONDS = 5.0
"""How long a stop waits, after its grace, for what was broken off to be written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeps:
    """What an engine works with."""

    owner: str
    """This router's life, for its claims."""
    store: TaskStore
    events: TaskEventBus
    database_clock: DatabaseClock
    limits: TaskLimits
    calls: CallMaker
    failpoints: Failpoints


class TaskEngine:
    """Runs tasks on one event loop."""

    def __init__(self, deps: EngineDeps) -> None:
        self._deps = deps
        self._clock = deps.database_clock.clock
        self._dispatcher = TaskDispatcher(deps.limits)
        self._lease_renewer = LeaseRenewer(deps.owner, deps.store, deps.database_clock, deps.limits, self)
        self._runs: dict[str, TaskRun] = {}
        """Every task that is offered or runs here."""
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._running: set[str] = set()
        self._run_deps = RunDeps(
            owner=deps.owner,
            store=deps.store,
            events=deps.events,
            database_clock=deps.database_clock,
            limits=deps.limits,
            calls=deps.calls,
            failpoints=deps.failpoints,
            admit=self._admit,
            publish=self.publish,
            on_claimed=self._note_claimed,
        )
        self._work_signal = asyncio.Event()
        self._is_publishing = False
        self._cursor: Lane | None = None
        self._looks_everywhere = True
        self._is_crowded = False
        """Whether a lane may have been left out for want of a place."""
        self._looked_at = float("-inf")
        self._ready_at: float | None = None
        self._mesh = _MeshShape()
        self._mesh_is_new = False
        self._mesh_news_at = float("-inf")
        self._loops: list[asyncio.Task[None]] = []
        deps.events.subscribe(self._hear)

    # -- life

    async def start(self) -> None:
        """Begin to run tasks."""
        self._loops = [
            start_critical(self._lease_renewer.run(), name="task-heart"),
            start_critical(self._offer_on(), name="task-engine"),
            start_restarting(self._listen, name="task-news", clock=self._clock),
        ]

    async def _listen(self) -> None:
        await self._deps.store.listen(self._deps.events.publish)

    async def stop(self, grace_seconds: float) -> None:
        """Offer nothing any more, let what runs go on for at most the grace, and give the rest back at once."""
        # The first is the heart: as long as anything runs here its claims are kept alive.
        heart, others = self._loops[:1], self._loops[1:]
        self._loops = []
        for loop in others:
            loop.cancel()
        if others:
            await asyncio.wait(others)
        for run in list(self._runs.values()):
            if not run.is_running:
                run.stop(StopReason.HALTED)
        await self._wait_for_runs(grace_seconds)
        for run in list(self._runs.values()):
            run.stop(StopReason.HALTED)
        await self._wait_for_runs(LAST_WORDS_SECONDS)
        await stop_tasks(list(self._under_way.values()))
        # What ended one of them before its time is raised when nothing is left to be done.
        await stop_tasks([*heart, *others])

    async def _wait_for_runs(self, seconds: float) -> None:
        if self._under_way:
            await asyncio.wait(list(self._under_way.values()), timeout=seconds)

    # -- what others tell and ask

    def mesh_changed(self, view: FleetView) -> None:
        """The registry told something new."""
        if self._mesh.has_changed(view):
            self._mesh_is_new = True
            self._work_signal.set()

    def withdraw(self, task_id: str) -> None:
        """Somebody has ended a task: it is neither offered nor run any more."""
        run = self._runs.get(task_id)
        if run is None:
            self._dispatcher.withdraw(task_id)
        else:
            run.stop(StopReason.CANCELLED)

    def waiting_for(self, task: Task) -> str:
        """What is known of why a task waits; empty: nothing."""
        run = self._runs.get(task.id)
        if run is not None:
            return "" if run.is_running else run.words or "a slot"
        return self._dispatcher.waiting_reason(task.model, task.tenant)

    def publish(self, event: StoreEvent) -> None:
        """Tell what this engine itself has written."""
        self._is_publishing = True
        try:
            self._deps.events.publish(event)
        finally:
            self._is_publishing = False

    @property
    def claims(self) -> frozenset[Claim]:
        """What runs here."""
        return frozenset(run.claim for run in self._runs.values() if run.claim is not None)

    def is_claiming(self, task_id: str) -> bool:
        """Whether a claim of it is under way."""
        run = self._runs.get(task_id)
        return run is not None and run.is_claiming

    def lose(self, claim: Claim) -> None:
        """A claim is not this router's any more."""
        run = self._runs.get(claim.task_id)
        if run is not None and run.claim == claim:
            run.stop(StopReason.LOST)

    def _hear(self, event: StoreEvent) -> None:
        match event:
            case LaneFilled(lane):
                self._is_crowded |= not self._dispatcher.note(lane)
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

    async def _offer_on(self) -> None:
        while True:
            self._work_signal.clear()
            try:
                await self._round()
            except WeftError as error:
                log.warning("tasks could not be read", why=error.message)
                await self._after_a_fault()
            except Exception:
                # Without the next look no task would ever be begun again, and nobody would see why.
                log.exception("tasks could not be looked at")
                await self._after_a_fault()
            await wait_for_event(self._work_signal, self._clock, self._next_round_at() - self._clock.monotonic())

    async def _after_a_fault(self) -> None:
        await self._clock.sleep(STORE_PAUSE_SECONDS)
        self._looks_everywhere = True
        self._work_signal.set()

    async def _round(self) -> None:
        now = self._clock.monotonic()
        if self._mesh_is_new and now >= self._mesh_news_at + MESH_NEWS_SECONDS:
            self._mesh_is_new, self._mesh_news_at = False, now
            self._dispatcher.try_all_again()
        if now >= self._look_at():
            await self._look_everywhere(now)
        while True:
            for book in self._dispatcher.next_to_read(now):
                await self._read(book)
            free = self._deps.limits.max_running - len(self._running)
            tasks = self._dispatcher.take(now, free)
            for task in tasks:
                self._offer(task)
            # However busy it is, what is due by time has its turn.
            if not tasks or self._clock.monotonic() >= self._next_round_at():
                return

    async def _look_everywhere(self, now: float) -> None:
        limits, store = self._deps.limits, self._deps.store
        self._looks_everywhere, self._looked_at, self._ready_at = False, now, None
        self._is_crowded = False
        self._dispatcher.tidy()
        try:
            lanes = await store.lanes(self._deps.database_clock.now(), self._cursor, limits.max_lanes)
            if self._dispatcher.is_full:
                # Otherwise some get their places without anybody giving way, and the others with the next look.
                self._withdraw_offers(self._dispatcher.make_room(lanes))
            noted = [lane for lane in lanes if self._dispatcher.note(lane)]
            # Where there are more lanes than places the next look begins behind the last that got one.
            is_all = len(noted) == len(lanes) < limits.max_lanes
            self._is_crowded |= not is_all or self._cursor is not None
            self._cursor = noted[-1] if noted and not is_all else None
            ready_at = await store.next_ready_at(self._deps.database_clock.now())
        except WeftError:
            self._looks_everywhere = True
            raise
        if ready_at is not None:
            self._note_ready(ready_at)

    async def _read(self, book: LaneState) -> None:
        room = limit, most_bytes = self._dispatcher.room_in(book)
        # Before it is read: what is told meanwhile may not be in it.
        book.has_more = False
        # Who ends meanwhile may still be read as waiting.
        before = set(self._runs)
        try:
            tasks = await self._deps.store.pending(book.lane, self._deps.database_clock.now(), limit, most_bytes)
        except WeftError:
            book.has_more = True
            raise
        self._dispatcher.put(book, tasks, room, before | self._runs.keys())

    def _withdraw_offers(self, tasks: Sequence[PendingTask]) -> None:
        for task in tasks:
            run = self._runs.get(task.id)
            # One that has its slot is no offer any more.
            if run is not None and not run.is_running and not run.is_claiming:
                run.stop(StopReason.HALTED)

    def _offer(self, task: PendingTask) -> None:
        run = self._runs[task.id] = TaskRun(self._run_deps, task)
        work = self._under_way[task.id] = start_task(run.go(), name=f"task-{task.id}")
        work.add_done_callback(_calling(self._note_end, run))

    def _admit(self, run: TaskRun) -> bool:
        if run.task.id not in self._running and len(self._running) >= self._deps.limits.max_running:
            return False
        self._running.add(run.task.id)
        return True

    def _note_claimed(self, run: TaskRun) -> None:
        self._running.add(run.task.id)
        self._dispatcher.claimed(run.task)
        self._work_signal.set()

    def _note_end(self, run: TaskRun) -> None:
        task = run.task
        self._runs.pop(task.id, None)
        self._under_way.pop(task.id, None)
        self._running.discard(task.id)
        if run.claim is not None:
            if run.ready_at is not None:
                self._note_ready(run.ready_at)
            if run.is_stopped or run.ready_at is not None:
                # It may wait again, and was not taken as long as it was known to run here.
                self._dispatcher.note(task.lane)
        elif run.refusal is not None:
            self._dispatcher.refused(task, run.refusal, self._clock.monotonic(), is_unwritten=run.is_unwritten)
        elif run.is_turned_away:
            self._dispatcher.returned(task)
        else:
            self._dispatcher.gone(task)
        self._work_signal.set()

    # -- when to look again

    def _note_ready(self, ready_at: float) -> None:
        moment = self._clock.monotonic() + max(0.0, ready_at - self._deps.database_clock.now())
        self._ready_at = moment if self._ready_at is None else min(self._ready_at, moment)

    def _look_at(self) -> float:
        """When all lanes are looked at next."""
        if self._looks_everywhere or (self._is_crowded and self._dispatcher.has_place):
            return self._looked_at + LOOK_SECONDS
        polled = self._looked_at + self._deps.limits.poll_interval_seconds
        if self._ready_at is None:
            return polled
        return min(polled, max(self._ready_at, self._looked_at + LOOK_SECONDS))

    def _next_round_at(self) -> float:
        moments = [self._look_at()]
        if self._mesh_is_new:
            moments.append(self._mesh_news_at + MESH_NEWS_SECONDS)
        pause_ends = self._dispatcher.next_look_at(self._clock.monotonic())
        if pause_ends is not None:
            moments.append(pause_ends)
        return min(moments)


class _MeshShape:
    """What of the mesh decides whether somebody who was refused may be lucky: not how busy anybody is."""

    def __init__(self) -> None:
        self._shape: Collection[object] = ()

    def has_changed(self, view: FleetView) -> bool:
        """Whether it is another one than the last."""
        runners = frozenset(
            (runner.name, runner.incarnation, runner.active, runner.draining) for runner in view.runners.values()
        )
        before, self._shape = self._shape, (view.models, view.agents, view.routes, view.settings, runners)
        *parts, known = before or (None, None)
        return known != runners or any(
            old is not new and old != new for old, new in zip(parts, self._shape[:-1], strict=False)
        )


def _calling(callback: Callable[[TaskRun], None], run: TaskRun) -> Callable[[object], None]:
    return lambda _ended: callback(run)
