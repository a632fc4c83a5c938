"""What a run counts, and what its processes leave in their files."""

import asyncio
import json
import os
import signal
from collections import Counter
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import pytest

from tools.torture.checker import Violation
from tools.torture.history import (
    COMPLETED,
    EventFile,
    Kind,
    Tally,
    read_backend_log,
    read_events,
    read_router_log,
)
from tools.torture.mesh import Folder
from tools.torture.plan import (
    APART_WEIGHTS,
    CLOCK_WEIGHTS,
    CLUSTER_WEIGHTS,
    RARE_MODEL,
    STEADY_MODEL,
    DatabaseFaultKind,
    Plan,
    Target,
    database_faults,
    kills,
    submission,
)
from tools.torture.record import HEAD, record, row
from tools.torture.run import Outcome, _ended_by_ctrl_c

PLAN = Plan(seed=7, kills=3, tasks=5)
ENOUGH = Outcome(
    plan=PLAN,
    folder=Folder(Path("/tmp/nowhere")),
    kills=Counter({Target.ROUTER: 2, Target.RUNNER: 1}),
    database_faults=Counter(),
    exits=Counter(),
    events=Counter({Kind.CLAIMED: 6, Kind.BEGUN: 6, Kind.ENDED: 5}),
    tasks=5,
    states=Counter({COMPLETED: 5}),
    again=1,
    trouble="",
    violations=(),
)


def test_run_with_enough_events_and_no_violations_passes() -> None:
    assert ENOUGH.is_good
    assert ENOUGH.lines()[-1] == "PASSED"
    assert "seed 7" in ENOUGH.lines()[0]


def test_run_with_too_few_kills_fails() -> None:
    few = replace(ENOUGH, kills=Counter({Target.ROUTER: 2}))
    assert not few.is_good
    assert few.shortfalls == ["2 kills of 3"]


def test_run_with_too_few_tasks_fails() -> None:
    assert replace(ENOUGH, tasks=4).shortfalls == ["4 tasks of 5"]


def test_run_without_router_events_fails() -> None:
    assert not replace(ENOUGH, events=Counter()).is_good


def test_run_without_the_planned_database_restarts_and_outages_fails() -> None:
    plan = replace(PLAN, database_restarts=2, database_cuts=1)
    faults = Counter({DatabaseFaultKind.RESTART: 2})
    short = replace(ENOUGH, plan=plan, database_faults=faults)
    assert short.shortfalls == ["0 of 1 times database cut"]
    assert replace(short, database_faults=faults + Counter({DatabaseFaultKind.CUT: 1})).is_good


def test_run_that_did_not_end_in_time_fails() -> None:
    assert not replace(ENOUGH, trouble="tasks do not reach their ends").is_good


def test_violation_is_reported_and_fails_the_run() -> None:
    broken = replace(ENOUGH, violations=[Violation("double", "task-1", "ended 2 times")])
    assert not broken.is_good
    assert "double: task-1: ended 2 times" in broken.lines()


def test_seed_determines_kills_and_requests() -> None:
    assert list(islice(kills(PLAN), 50)) == list(islice(kills(PLAN), 50))
    assert list(islice(kills(PLAN), 50)) != list(islice(kills(replace(PLAN, seed=8)), 50))
    assert submission(7, "s0", 3) == submission(7, "s0", 3)
    assert submission(7, "s0", 3) != submission(7, "s1", 3)


def test_seed_determines_database_faults() -> None:
    plan = replace(PLAN, database_restarts=3, database_cuts=4)
    faults = database_faults(plan)
    assert faults == database_faults(plan) != database_faults(replace(plan, seed=8))
    assert Counter(fault.kind for fault in faults) == {DatabaseFaultKind.RESTART: 3, DatabaseFaultKind.CUT: 4}
    many = database_faults(replace(PLAN, database_restarts=20, database_cuts=20, database_kills=20))
    assert {(fault.kind, fault.is_abrupt) for fault in many} == set(product(DatabaseFaultKind, (True, False)))


def test_plan_has_every_kind_of_kill_and_submission() -> None:
    others = [replace(PLAN, weights=weights) for weights in (CLUSTER_WEIGHTS, CLOCK_WEIGHTS, APART_WEIGHTS)]
    kinds = {target for plan in (PLAN, *others) for _, target in islice(kills(plan), 500)}
    assert kinds == set(Target)
    sent = [submission(7, "s0", number) for number in range(500)]
    assert {planned.model == RARE_MODEL for planned in sent} == {True, False}
    assert {planned.is_sent_twice for planned in sent} == {True, False}
    assert {planned.is_contradicted for planned in sent} == {True, False}
    assert {planned.cancel_after_seconds is None for planned in sent} == {True, False}


def test_default_plan_has_one_steady_and_one_rare_runner_on_this_machine() -> None:
    assert PLAN.steady_pools == [STEADY_MODEL]
    assert [(runner.name, runner.host) for runner in (*PLAN.steady_runners, PLAN.rare_runner)] == [
        ("steady", ""),
        ("rare", ""),
    ]


def test_plan_with_many_runners_has_a_host_each_and_small_pools() -> None:
    plan = replace(PLAN, runners=20)
    runners = (*plan.steady_runners, plan.rare_runner)
    assert len({runner.name for runner in runners}) == len({runner.host for runner in runners}) == 20
    assert sorted(Counter(runner.pool for runner in runners).values()) == [1, 1, 3, 3, 3, 3, 3, 3]
    assert plan.slots == 1
    asked = {submission(7, "s0", number, plan.steady_pools).model for number in range(100)}
    assert asked == {runner.pool for runner in runners}


def test_partial_line_of_a_killed_writer_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "s0.jsonl"
    file = EventFile(path, "s0")
    file.write(Kind.INTENT, key="k1", tokens=3)
    file.write(Kind.ACKED, key="k1", task="t1")
    file.close()
    with path.open("ab") as torn:
        torn.write(b'{"kind": "ack')
    assert [(event.kind, event.key) for event in read_events(path)] == [(Kind.INTENT, "k1"), (Kind.ACKED, "k1")]


def test_missing_file_has_no_events(tmp_path: Path) -> None:
    assert not list(read_events(tmp_path / "none.jsonl"))
    assert Tally().count(tmp_path / "none.jsonl", b"x") == 0


def test_acknowledgements_are_counted_once_as_lines_are_completed(tmp_path: Path) -> None:
    path, acked, tally = tmp_path / "s0.jsonl", b'"kind":"acked"', Tally()
    file = EventFile(path, "s0")
    for kind in (Kind.INTENT, Kind.ACKED, Kind.ACKED):
        file.write(kind, key="k1")
    file.close()
    with path.open("ab", buffering=0) as torn:
        torn.write(b'{"kind":"ac')
        assert [tally.count(path, acked), tally.count(path, acked)] == [2, 2]
        torn.write(b'ked"}\n')
    assert tally.count(path, acked) == 3


def test_only_task_lines_of_router_logs_are_events(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    when = '"timestamp": "2026-11-20T10:00:00.500000Z"'
    log.write_text(
        f'{{"event": "request", "request_id": "r1", {when}}}\n'
        f'{{"event": "task claimed", "task": "t1", "attempt": 2, "owner": "r1", {when}}}\n'
        f'{{"event": "task ended", "task": "t1", "attempt": 2, "state": "COMPLETED", {when}}}\n'
    )
    claimed, ended = read_router_log(log)
    assert (claimed.kind, claimed.task, claimed.attempt, claimed.owner) == (Kind.CLAIMED, "t1", 2, "r1")
    assert (ended.kind, ended.state) == (Kind.ENDED, COMPLETED)
    assert claimed.at % 1 == 0.5


def test_backend_log_lines_are_events_of_the_task_in_the_request_id(tmp_path: Path) -> None:
    log = tmp_path / "backends.jsonl"
    line = {"event": "begun", "at": 5.5, "pid": 9, "opened_at": 5.0}
    lines = (json.dumps({**line, "request_id": own}) + "\n" for own in ("check-1", "t1"))
    log.write_text("".join(lines))
    (begun,) = read_backend_log(log)
    assert (begun.kind, begun.task, begun.at, begun.key, begun.note) == (Kind.BEGUN, "t1", 5.5, "5.0", "begun")


def test_row_of_a_recorded_run_has_faults_counts_violations_seed_and_commit() -> None:
    kills = Counter({Target.ROUTER: 2, Target.RUNNER: 1, Target.CLOCK: 4})
    broken = replace(ENOUGH, kills=kills, violations=[Violation("double", "task-1", "ended 2 times")])
    cells = row(broken, ["--kills", "3"], "abc1234", 2.4).strip("| ").split(" | ")
    assert cells[1:] == [
        *("abc1234", "7", "SQLite", "3: 2 router, 1 runner", "4 clock step"),
        *("5", "-", "1<br>double", "2", "`--kills 3`"),
    ]


def test_recorded_rows_are_added_below_one_heading(tmp_path: Path) -> None:
    table = tmp_path / "faults-run.md"
    for _ in range(2):
        record(table, ENOUGH, ["--kills", "3"], 1.0)
    text = table.read_text()
    assert text.startswith(HEAD)
    assert text.removeprefix(HEAD).count("\n") == text.removeprefix(HEAD).count("--kills 3") == 2


async def test_ctrl_c_ends_kills_as_their_time_limit_does() -> None:
    async def killing() -> None:
        async with asyncio.timeout(60.0) as limit:
            with _ended_by_ctrl_c(limit):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await killing()
