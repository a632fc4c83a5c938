"""A torture run: starts the mesh, kills its processes (`Killer`), waits for all tasks, checks the final state."""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import psutil

from tools.torture.checker import Violation, check, rules_broken
from tools.torture.database import DatabaseFaults, RunDatabase
from tools.torture.final_state import is_any_open, read_database, read_service, read_usage
from tools.torture.growth import Growth, Recorder, grown, growths
from tools.torture.history import (
    BACKEND_PREFIX,
    BEGINS,
    ENDS,
    Event,
    EventFile,
    History,
    Kind,
    Tally,
    read_backend_log,
    read_events,
    read_router_log,
)
from tools.torture.mesh import (
    Folder,
    Member,
    Mesh,
    database_url,
    gateway_names,
    registry_names,
    router_names,
    runner_names,
)
from tools.torture.network import HUB_NAME, CutKind, Network
from tools.torture.orphans import SETTLE_SECONDS as SETTLE_ORPHANS_SECONDS
from tools.torture.orphans import lasting, read_leases, wrong_leases
from tools.torture.plan import (
    CLOCK_SECONDS,
    CLOCK_STEP_SECONDS,
    CUT_SECONDS,
    DEMO_MODEL,
    DEMO_RUNNER,
    MIN_FREEZE_SECONDS,
    USUAL_FREEZE_SECONDS,
    WAKE_SECONDS,
    DatabaseFaultKind,
    Plan,
    Target,
    kills,
)
from tools.torture.streams import Streams
from tools.torture.submitter import task_stub
from weft.kernel.channels.rpc import open_channel
from weft.kernel.services.service_lifecycle import start_task, stop_tasks

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from weft.api.router.v1.task_service_pb2_grpc import TaskServiceAsyncStub


RESTART_SECONDS = 0.5
"""Pause before the restart of a process that exited unexpectedly."""
KILL_POLL_SECONDS = 0.1
MIN_AT_WORK = 3
"""Minimum requests in progress of a router before it is paused, so that it loses leases."""
AT_WORK_SECONDS = 5.0
"""How long to wait for requests in progress at most, ..."""
MOMENT_SECONDS = 0.01
"""... and how often to poll."""
TAKEOVER_SECONDS = 15.0
"""Maximum wait of a paused router, after its pause, for its successor to take back one of its tasks."""
HEAD_START = 2
"""How many kills may be ahead of the tasks."""
RARE_PAUSE_SECONDS = (1.0, 4.0)
"""Range of pauses before the rare model's runner is restarted."""


class Progress:
    """What has happened so far in a run, from the files of its processes. Counts bytes, because parsing is too slow."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._tally = Tally()

    def acknowledgements(self) -> int:
        """Returns the approximate number of tasks: some are sent twice."""
        return sum(self._tally.count(path, b'"kind":"acked"') for path in self._folder.histories.glob("*.jsonl"))

    def at_work(self) -> int:
        """Returns the number of requests that backends have not ended, including those of killed backends."""
        begun, all_events = (
            self._tally.count(self._folder.backend_log, text) for text in (b'"event":"begun"', b'"event":')
        )
        return 2 * begun - all_events

    def ended(self) -> int:
        """Returns how many tasks routers have ended or cancelled."""
        endings = (b'"event":"task ended"', b'"event":"task cancelled"')
        return sum(self._tally.count(self._folder.router_log, text) for text in endings)

    def reverted(self) -> int:
        """Returns how many attempts routers have given up or taken back."""
        return self._tally.count(self._folder.router_log, b'"event":"task reverted"')


class Killer:
    """Kills and restarts processes until it is stopped."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        folder: Folder,
        progress: Progress,
        database: RunDatabase | None,
        network: Network | None,
    ) -> None:
        self._progress = progress
        self._network = network
        self._cut: asyncio.Task[None] | None = None
        """Heals a partition."""
        self._plan = plan
        self._mesh = mesh
        self._folder = folder
        self._random = Random(f"{plan.seed}/whom")  # noqa: S311 - the seed must decide it
        self._restarters: dict[str, asyncio.Task[None]] = {}
        self._stale: asyncio.Task[None] | None = None
        self._frozen: asyncio.Task[None] | None = None
        self._set: asyncio.Task[None] | None = None
        """Sets a clock right."""
        self._file = EventFile(folder.histories / "killer.jsonl", "killer")
        self.database = DatabaseFaults(plan, database, self._file)
        self.done: Counter[Target] = Counter()
        """Kills that hit a process, by target."""
        self.cuts: Counter[CutKind] = Counter()
        """Finished partitions."""
        self.exits: Counter[str] = Counter()
        """Unplanned exits, by process and exit code."""

    def restart_all(self) -> None:
        """Starts restarting every process that exits."""
        for member in self._mesh.members:
            self._restart_on_exit(member)

    async def run(self) -> None:
        """Kills until the planned number of kills has hit a process, and all database faults have occurred."""
        for pause, target in kills(self._plan):
            if self.done.total() >= self._plan.kills:
                break
            await asyncio.sleep(pause)
            await self._wait_for_tasks()
            if await self._kill(target):
                self.done[target] += 1
            self.database.begin_due(self.done.total() / self._plan.kills)
        await self.database.finish()
        for fault in self._lasting_faults:
            await fault

    @property
    def _lasting_faults(self) -> "Sequence[asyncio.Task[None]]":
        return [fault for fault in (self._stale, self._frozen, self._set, self._cut) if fault is not None]

    async def _wait_for_tasks(self) -> None:
        """Waits until the share of acknowledged tasks reaches the share of finished kills.

        Otherwise, on a slow machine, all kills would hit a mesh that is still restarting.
        """
        share = (self.done.total() - HEAD_START) / self._plan.kills
        while self._progress.acknowledgements() < share * self._plan.tasks:  # noqa: ASYNC110 - other processes write it
            await asyncio.sleep(KILL_POLL_SECONDS)

    async def submitters_done(self) -> None:
        """Waits until every submitter has ended with code 0."""
        await asyncio.gather(*(self._restarters[member.name] for member in self._mesh.submitters))

    async def end_submitters(self) -> None:
        """Kills the submitters after the run's time limit.

        A task that is submitted while the final states are read would count as lost.
        """
        for member in self._mesh.submitters:
            await stop_tasks([self._restarters[member.name]])
            await member.kill()

    async def stop(self) -> None:
        """Stops restarting processes, and ends database faults."""
        await self.database.stop()
        tasks = [*self._restarters.values(), *self._lasting_faults]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _restart_on_exit(self, member: Member) -> None:
        self._restarters[member.name] = asyncio.create_task(self._restart_loop(member))

    async def _restart_loop(self, member: Member) -> None:
        is_submitter = member in self._mesh.submitters
        is_rare = member is self._mesh.runners[-1]
        while (code := await member.wait()) != 0 or not is_submitter:
            if code != -signal.SIGKILL:
                self.exits[f"{member.name} with {code}"] += 1
                await asyncio.sleep(RESTART_SECONDS)
            elif is_rare:
                await asyncio.sleep(self._random.uniform(*RARE_PAUSE_SECONDS))
            await member.start()

    async def _kill(self, target: Target) -> bool:
        """Kills a target; returns whether it hit a process."""
        ways: dict[Target, Callable[[], Awaitable[bool]]] = {
            Target.SUBMITTER: lambda: self._random.choice(self._mesh.submitters).kill(),
            Target.BACKEND: self._kill_backend,
            Target.RUNNER: self._kill_runner,
            Target.ROUTER: self._kill_router,
            Target.GATEWAY: self._kill_gateway,
            Target.FROZEN: self._freeze,
            Target.REGISTRY: lambda: _kill_serving(self._random.choice(self._mesh.registries)),
            Target.CLOCK: self._set_clock,
            Target.PARTITION: self._partition,
            Target.STALE_ROUTER: self._make_stale,
        }
        return await ways[target]()

    async def _kill_router(self) -> bool:
        """Kills a router that has tasks at work, if any begins soon: on a busy machine it is idle most of the time."""
        await self._wait_for_work(1)
        return await _kill_serving(self._random.choice(self._mesh.routers))

    async def _kill_gateway(self) -> bool:
        gateway = self._random.choice(self._mesh.gateways)
        if not gateway.serves:
            return False
        # Before the kill, because its streams break before its exit is seen.
        self._file.write(Kind.KILLED, key=gateway.name)
        return await gateway.kill()

    async def _freeze(self) -> bool:
        """Pauses a process for a while; one at a time."""
        mesh = self._mesh
        registries = mesh.registries if self._plan.registries > 1 else ()
        member = self._random.choice([*mesh.routers, *mesh.gateways, *registries])
        if not (self._frozen is None or self._frozen.done()) or not member.serves:
            return False
        member.signal(signal.SIGSTOP)
        seconds = self._random.uniform(MIN_FREEZE_SECONDS, self._plan.max_freeze_seconds)
        self._frozen = asyncio.create_task(self._thaw(member, seconds))
        return True

    async def _thaw(self, member: Member, seconds: float) -> None:
        """Resumes a paused process after a while, unless it was killed meanwhile."""
        # Its connections are given up after the ping timeout, as in a partition.
        is_long = seconds > USUAL_FREEZE_SECONDS
        if is_long:
            self._file.write(Kind.PARTITION, key=member.name, note=f"{Target.FROZEN} {BEGINS}")
        try:
            await asyncio.sleep(seconds)
        finally:
            member.signal(signal.SIGCONT)
            if is_long:
                self._file.write(Kind.PARTITION, key=member.name, note=f"{Target.FROZEN} {ENDS}")

    async def _kill_backend(self) -> bool:
        backends = await asyncio.to_thread(self._mesh.backends)
        if not backends:
            return False
        with suppress(psutil.NoSuchProcess):
            self._killing(*(chosen := [self._random.choice(backends)]))
            chosen[0].kill()
            return True
        return False

    async def _kill_runner(self) -> bool:
        runner = self._random.choice(self._mesh.runners)
        if not runner.serves:
            return False
        # Its engines end with it.
        self._file.write(Kind.KILLED, key=runner.name)
        self._killing(*await asyncio.to_thread(self._mesh.backends, runner))
        return await runner.kill()

    def _killing(self, *backends: psutil.Process) -> None:
        for backend in backends:
            self._file.write(Kind.KILLED, key=f"{BACKEND_PREFIX}{backend.pid}")

    async def _partition(self) -> bool:
        """Cuts a connection for a while; one at a time."""
        if self._network is None or not (self._cut is None or self._cut.done()):
            return False
        kind = self._random.choice(list(CutKind))
        routers, registries = router_names(self._plan), registry_names(self._plan)
        # A gateway that is cut off from its clients would break their streams.
        names = [*routers, *registries, *runner_names(self._plan)]
        if kind in (CutKind.BOTH_WAYS, CutKind.ONE_WAY):
            names += gateway_names(self._plan)
        first = self._random.choice(names)
        databases = [HUB_NAME] if first in (*routers, *registries) else []
        others = [name for name in (*routers, *registries, *runner_names(self._plan), *databases) if name != first]
        second = self._random.choice(others)
        self._cut = asyncio.create_task(self._cut_off(kind, first, second, self._random.uniform(*CUT_SECONDS)))
        return True

    async def _cut_off(self, kind: CutKind, first: str, second: str, seconds: float) -> None:
        assert self._network is not None
        key = f"{first}, {second}"
        self._file.write(Kind.PARTITION, key=key, note=f"{kind} {BEGINS}")
        self._network.cut(kind, first, second)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._network.heal(kind, first, second)
            self._file.write(Kind.PARTITION, key=key, note=f"{kind} {ENDS}")
        self.cuts[kind] += 1

    async def _set_clock(self) -> bool:
        """Sets a clock by an hour, and sets it right after a while; one at a time."""
        member = self._random.choice([*self._mesh.routers, *self._mesh.gateways])
        if not (self._set is None or self._set.done()) or not member.serves:
            return False
        step = self._random.choice((-CLOCK_STEP_SECONDS, CLOCK_STEP_SECONDS))
        self._set = asyncio.create_task(_set_right(self._mesh, member.name, step))
        return True

    async def _make_stale(self) -> bool:
        """Pauses the router beyond its leases, with another one in its place; one at a time."""
        if self._stale is not None and not self._stale.done():
            return False
        if not await self._pause_router():
            return False
        old = self._mesh.replace_router()
        self._restarters[old.name].cancel()
        await self._mesh.router.start()
        self._restart_on_exit(self._mesh.router)
        self._stale = asyncio.create_task(self._wake(old, self._progress.reverted()))
        return True

    async def _pause_router(self) -> bool:
        """Pauses the router, or waits until it has stopped itself; returns whether it is paused."""
        router = self._mesh.router
        if self._plan.stop_before_end:
            while not router.is_stopped:  # noqa: ASYNC110 - the router does it; the run has a time limit
                await asyncio.sleep(MOMENT_SECONDS)
            return True
        await self._wait_for_work(MIN_AT_WORK)
        return router.serves and router.signal(signal.SIGSTOP)

    async def _wait_for_work(self, least: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(AT_WORK_SECONDS):
                while self._progress.at_work() < least:  # noqa: ASYNC110 - other processes write it
                    await asyncio.sleep(MOMENT_SECONDS)

    async def _wake(self, old: Member, reverted: int) -> None:
        """Resumes a paused router when its successor has taken back a task. `reverted`: reverts before the pause."""
        try:
            await asyncio.sleep(self._plan.sleep_seconds)
            # On a busy machine the successor starts later, and until then the old one has lost nothing.
            with suppress(TimeoutError):
                async with asyncio.timeout(TAKEOVER_SECONDS):
                    while self._progress.reverted() == reverted:  # noqa: ASYNC110 - another process writes it
                        await asyncio.sleep(KILL_POLL_SECONDS)
            old.signal(signal.SIGCONT)
            if self._plan.stop_before_end:
                while not _is_late(self._folder):  # noqa: ASYNC110 - the router writes it; the run has a time limit
                    await asyncio.sleep(KILL_POLL_SECONDS)
            else:
                await asyncio.sleep(WAKE_SECONDS)
        finally:
            await old.kill()


async def _set_right(mesh: Mesh, name: str, step: float) -> None:
    """Sets a clock by a step, and sets it right after a while."""
    mesh.set_clock(name, step)
    try:
        await asyncio.sleep(CLOCK_SECONDS)
    finally:
        mesh.set_clock(name, 0.0)


async def _kill_serving(member: Member) -> bool:
    """Kills a process that serves; returns whether it was hit. Spares one that is still starting."""
    return member.serves and await member.kill()


START_SECONDS = 180.0
SETTLE_SECONDS = 300.0
"""After the last kill: how long tasks are open while none ends."""
READ_SECONDS = 600.0
POLL_SECONDS = 0.2
PROGRESS_SECONDS = 10.0
MAX_SHOWN = 20
"""Maximum number of violations printed in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run."""

    plan: Plan
    folder: Folder
    kills: Counter[Target]
    database_faults: Counter[DatabaseFaultKind]
    exits: Counter[str]
    events: Counter[Kind]
    tasks: int
    """Acknowledged tasks."""
    states: Counter[int]
    again: int
    """Tasks with more than one attempt."""
    trouble: str
    """What did not end in time; empty: nothing."""
    violations: Sequence[Violation]
    growths: Sequence[Growth] = ()
    cuts: Mapping[CutKind, int] = field(default_factory=Counter)

    @property
    def shortfalls(self) -> list[str]:
        """Reasons why the run proves too little."""
        found = [self.trouble] if self.trouble else []
        if self.kills.total() < self.plan.kills:
            found.append(f"{self.kills.total()} kills of {self.plan.kills}")
        planned = {
            DatabaseFaultKind.RESTART: self.plan.database_restarts,
            DatabaseFaultKind.KILL: self.plan.database_kills,
            DatabaseFaultKind.CUT: self.plan.database_cuts,
        }
        found += [
            f"{self.database_faults[kind]} of {count} times {kind}"
            for kind, count in planned.items()
            if self.database_faults[kind] < count
        ]
        if self.tasks < self.plan.tasks:
            found.append(f"{self.tasks} tasks of {self.plan.tasks}")
        if self.plan.records_growth and not self.growths:
            found.append("too few moments in which everything ran")
        needed = [Kind.CLAIMED, Kind.BEGUN, Kind.ENDED]
        found += [f"there is no event {kind}" for kind in needed if not self.events[kind]]
        return found

    @property
    def is_good(self) -> bool:
        """Whether there is no violation, and enough was tried."""
        return not self.violations and not self.shortfalls

    def lines(self) -> list[str]:
        """Returns the report in lines of text."""
        plan = self.plan
        return [
            f"seed {plan.seed}, everything under {self.folder.root}",
            f"kills: {self.kills.total()}{_counted(self.kills)}",
            *([f"faults of the database{_counted(self.database_faults)}"] if self.database_faults else []),
            *([f"partitions{_counted(self.cuts)}"] if self.cuts else []),
            f"tasks acknowledged: {self.tasks}, begun more than once: {self.again}, states{_counted(self.states)}",
            f"history{_counted(self.events)}",
            *map(str, self.growths),
            *([f"ended by themselves{_counted(self.exits)}"] if self.exits else []),
            *(f"TOO LITTLE: {line}" for line in self.shortfalls),
            f"violations: {len(self.violations)}{_counted(rules_broken(self.violations))}",
            *map(str, self.violations[:MAX_SHOWN]),
            "PASSED" if self.is_good else "FAILED",
        ]


def _counted(counter: Mapping[Any, int]) -> str:
    return "".join(f"{',' if index else ':'} {count} {name}" for index, (name, count) in enumerate(counter.items()))


def _no_progress(_: str) -> None:
    pass


async def torture(
    plan: Plan,
    folder: Folder,
    report: Callable[[str], None] = _no_progress,
    database: RunDatabase | None = None,
    network: Network | None = None,
) -> Outcome:
    """Runs a plan; no process is left when it returns. Raises OSError for an unusable folder.

    `report`: called with the progress every PROGRESS_SECONDS. `database`: the server of the plan's database, required
    for database faults. `network`: the places of all services, required for partitions.
    """
    mesh = Mesh(plan, folder, database, network)
    progress = Progress(folder)
    killer = Killer(plan, mesh, folder, progress, database, network)
    streams = Streams(plan, mesh.gateway_addresses, folder.histories / "streams.jsonl")
    recorder = Recorder(mesh, folder.root, folder.root / "growth.jsonl", progress.acknowledgements)
    watchers: list[asyncio.Task[None]] = []
    try:
        await mesh.start()
        killer.restart_all()
        async with asyncio.timeout(START_SECONDS):
            await streams.until_served()
        streams.start()
        async with open_channel(mesh.router_addresses, mesh.security) as channel:
            stub = task_stub(channel)
            watchers.append(start_task(_report_progress(plan, progress, killer, report), name="torture-progress"))
            if plan.records_growth:
                watchers.append(start_task(recorder.run(), name="torture-growth"))
            trouble = await _wait_for_end(plan, folder, killer, streams, progress, stub)
            await stop_tasks(watchers)
            async with asyncio.timeout(READ_SECONDS):
                served = await read_service(stub, _acked(folder))
            orphans = await lasting(partial(_orphans, plan, mesh), SETTLE_ORPHANS_SECONDS)
    finally:
        await stop_tasks(watchers)
        await killer.stop()
        left = await mesh.kill_all()
        if database is not None:
            database.close()
    stored, damage = await read_database(database_url(plan, folder))
    history = History(
        events=_events(folder),
        served=served,
        stored=stored,
        # Usage includes streams.
        usage=None if plan.gateways else await read_usage(database_url(plan, folder)),
        slots=plan.slots,
        damage=[*damage, *_false_alarms(folder)],
        has_spares=plan.has_spares,
        orphans=[*orphans, *left],
    )
    found = growths(recorder.samples) if recorder.samples else []
    return Outcome(
        plan=plan,
        folder=folder,
        kills=killer.done,
        database_faults=killer.database.done,
        exits=killer.exits,
        events=Counter(event.kind for event in history.events),
        tasks=len({event.task for event in history.of_kind(Kind.ACKED)}),
        states=Counter(kept.state for kept in stored.values()),
        again=sum(kept.attempt > 1 for kept in stored.values()),
        trouble=trouble,
        violations=[*check(history), *grown(found)],
        growths=found,
        cuts=killer.cuts,
    )


async def _wait_for_end(
    plan: Plan,
    folder: Folder,
    killer: Killer,
    streams: Streams,
    progress: Progress,
    stub: "TaskServiceAsyncStub",
) -> str:
    """Waits until every task is terminal; returns what did not end in time, or an empty text."""
    stage, trouble = "no task was acknowledged", ""
    try:
        async with asyncio.timeout(START_SECONDS):
            while not _acked(folder):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(POLL_SECONDS)
        stage, began = "tasks do not reach their ends", asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(60.0 * plan.max_minutes) as limit:
                with _ended_by_ctrl_c(limit):
                    await asyncio.gather(killer.run(), killer.submitters_done())
        except TimeoutError:
            minutes = (asyncio.get_running_loop().time() - began) / 60.0
            trouble = f"kills and submitters are not done after {minutes:.1f} minutes"
            await killer.end_submitters()
        async with asyncio.timeout(SETTLE_SECONDS) as limit:
            # Live requests take precedence over tasks: while streams fill the slots, no task ends.
            await streams.stop()
            ended = 0
            while await is_any_open(stub):
                if (now_ended := progress.ended()) > ended:
                    ended = now_ended
                    limit.reschedule(asyncio.get_running_loop().time() + SETTLE_SECONDS)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        return "; ".join(filter(None, (trouble, stage)))
    return trouble


@contextmanager
def _ended_by_ctrl_c(limit: asyncio.Timeout) -> Iterator[None]:
    """Ends a block as if its time limit had passed at the first Ctrl-C, so that what has happened is still checked."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, limit.reschedule, loop.time())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _orphans(plan: Plan, mesh: Mesh) -> list[str]:
    """Returns the engines without a runner, and the leases without an engine. Raises AioRpcError."""
    models = {runner.model: runner.name for runner in (*plan.steady_runners, plan.rare_runner)}
    if plan.serves_demo:
        models[DEMO_MODEL] = DEMO_RUNNER
    leases = wrong_leases(await read_leases(mesh.registry_addresses, mesh.security), models)
    return [*await asyncio.to_thread(mesh.orphans), *leases]


async def _report_progress(plan: Plan, progress: Progress, killer: Killer, report: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        report(f"{killer.done.total()}/{plan.kills} kills, {progress.acknowledgements()}/{plan.tasks} acknowledgements")


def _false_alarms(folder: Folder) -> list[str]:
    """Returns losses reported by routers, which are false alarms because kills lose nothing."""
    return [f"a router found a loss: {path.read_text()}" for path in folder.home.glob("*.loss.json")]


def _submitted(folder: Folder) -> list[Event]:
    return [event for path in sorted(folder.histories.glob("*.jsonl")) for event in read_events(path)]


def _acked(folder: Folder) -> set[str]:
    return {event.task for event in _submitted(folder) if event.kind is Kind.ACKED}


def _is_late(folder: Folder) -> bool:
    """Whether an attempt that had been taken back was still ended, or its router detected the lost claim."""
    events = list(read_router_log(folder.router_log))
    reverted = {(event.task, event.attempt) for event in events if event.kind is Kind.REVERTED}
    late = (Kind.ENDED, Kind.LEASE_LOST)
    return any(event.kind in late and (event.task, event.attempt) in reverted for event in events)


def _events(folder: Folder) -> list[Event]:
    return [*_submitted(folder), *read_router_log(folder.router_log), *read_backend_log(folder.backend_log)]
