"""One torture run: start the mesh, kill its processes, wait for all tasks, read the final state, and check it."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.kernel.rpc import open_channel
from weft.kernel.service import start_task, stop_tasks
from weft_testing.torture.checker import Violation, check, rules_broken
from weft_testing.torture.final_state import is_any_open, read_database, read_service
from weft_testing.torture.history import (
    Event,
    History,
    Kind,
    occurrences,
    read_backend_log,
    read_events,
    read_router_log,
)
from weft_testing.torture.killer import Killer
from weft_testing.torture.mesh import Folder, Mesh, database_url
from weft_testing.torture.plan import Plan, Target
from weft_testing.torture.task_client import task_stub

if TYPE_CHECKING:
    from weft.api.router.v1.task_service_pb2_grpc import TaskServiceAsyncStub

START_SECONDS = 60.0
SETTLE_SECONDS = 300.0
"""How long tasks may take to become terminal after the last kill."""
READ_SECONDS = 600.0
POLL_SECONDS = 0.2
PROGRESS_SECONDS = 10.0
MAX_SHOWN = 20
"""Violations that are printed in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run."""

    plan: Plan
    folder: Folder
    kills: Counter[Target]
    exits: Counter[str]
    events: Counter[Kind]
    tasks: int
    """Acknowledged tasks."""
    states: Counter[int]
    again: int
    """Tasks with more than one attempt."""
    trouble: str
    """What did not end in time; empty: everything did."""
    violations: Sequence[Violation]

    @property
    def shortfalls(self) -> list[str]:
        """Reasons why the run proves too little."""
        found = [self.trouble] if self.trouble else []
        if self.kills.total() < self.plan.kills:
            found.append(f"{self.kills.total()} kills of {self.plan.kills}")
        if self.tasks < self.plan.tasks:
            found.append(f"{self.tasks} tasks of {self.plan.tasks}")
        needed = (Kind.CLAIMED, Kind.BEGUN, Kind.ENDED)
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
            f"tasks acknowledged: {self.tasks}, begun more than once: {self.again}, states{_counted(self.states)}",
            f"history{_counted(self.events)}",
            *([f"ended by themselves{_counted(self.exits)}"] if self.exits else []),
            *(f"TOO LITTLE: {line}" for line in self.shortfalls),
            f"violations: {len(self.violations)}{_counted(rules_broken(self.violations))}",
            *map(str, self.violations[:MAX_SHOWN]),
            "PASSED" if self.is_good else "FAILED",
        ]


def _counted(counter: Counter[Target] | Counter[Kind] | Counter[int] | Counter[str]) -> str:
    return "".join(f"{',' if place else ':'} {count} {name}" for place, (name, count) in enumerate(counter.items()))


def _no_progress(_: str) -> None:
    pass


async def torture(plan: Plan, folder: Folder, report: Callable[[str], None] = _no_progress) -> Outcome:
    """Runs a plan; no process is left when it returns. Raises OSError for an unusable folder.

    `report`: called with the progress every PROGRESS_SECONDS.
    """
    mesh = Mesh(plan, folder)
    killer = Killer(plan, mesh, lambda: _acknowledgements(folder), lambda: _at_work(folder))
    reporter: asyncio.Task[None] | None = None
    try:
        await mesh.start()
        killer.restart_all()
        async with open_channel(folder.address) as channel:
            stub = task_stub(channel)
            reporter = start_task(_report_progress(plan, folder, killer, report), name="torture-progress")
            trouble = await _wait_for_end(plan, folder, killer, stub)
            async with asyncio.timeout(READ_SECONDS):
                served = await read_service(stub, _acked(folder))
    finally:
        if reporter is not None:
            await stop_tasks([reporter])
        await killer.stop()
        await mesh.kill_all()
    stored, damage = await read_database(database_url(plan, folder))
    history = History(events=_events(folder), served=served, stored=stored, damage=[*damage, *_false_alarms(folder)])
    return Outcome(
        plan=plan,
        folder=folder,
        kills=killer.done,
        exits=killer.exits,
        events=Counter(event.kind for event in history.events),
        tasks=len({event.task for event in history.of_kind(Kind.ACKED)}),
        states=Counter(kept.state for kept in stored.values()),
        again=sum(kept.attempt > 1 for kept in stored.values()),
        trouble=trouble,
        violations=check(history),
    )


async def _wait_for_end(plan: Plan, folder: Folder, killer: Killer, stub: "TaskServiceAsyncStub") -> str:
    """Waits until every task is terminal; returns what did not end in time, empty: everything did."""
    stage = "no task was acknowledged"
    try:
        async with asyncio.timeout(START_SECONDS):
            while not _acked(folder):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(POLL_SECONDS)
        stage = f"kills and submitters are not done after {plan.max_minutes} minutes"
        async with asyncio.timeout(60.0 * plan.max_minutes):
            await asyncio.gather(killer.run(), killer.submitters_done())
        stage = "tasks do not reach their ends"
        async with asyncio.timeout(SETTLE_SECONDS):
            while await is_any_open(stub):  # noqa: ASYNC110 - another process ends them
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        return stage
    return ""


async def _report_progress(plan: Plan, folder: Folder, killer: Killer, report: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        report(f"{killer.done.total()}/{plan.kills} kills, {_acknowledgements(folder)}/{plan.tasks} acknowledgements")


def _false_alarms(folder: Folder) -> list[str]:
    """Returns losses that routers reported: false alarms, because kills alone lose nothing."""
    return [f"a router found a loss: {path.read_text()}" for path in folder.home.glob("*.loss.json")]


def _submitted(folder: Folder) -> list[Event]:
    return [event for path in sorted(folder.histories.glob("*.jsonl")) for event in read_events(path)]


def _acked(folder: Folder) -> set[str]:
    return {event.task for event in _submitted(folder) if event.kind is Kind.ACKED}


def _acknowledgements(folder: Folder) -> int:
    """Returns about the number of tasks (some are sent twice). Counts bytes, because parsing would be too slow."""
    return sum(occurrences(path, b'"kind":"acked"') for path in folder.histories.glob("*.jsonl"))


def _at_work(folder: Folder) -> int:
    """Returns the requests that backends have begun and not ended, including those of killed backends."""
    return 2 * occurrences(folder.backend_log, b'"event":"begun"') - occurrences(folder.backend_log, b'"event":')


def _events(folder: Folder) -> list[Event]:
    return [*_submitted(folder), *read_router_log(folder.router_log), *read_backend_log(folder.backend_log)]
