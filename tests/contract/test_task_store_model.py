"""Whatever is done to tasks in whatever order: what the store keeps is what a few lines of Python say."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from kit.refusals import refused
from stored_tasks import CRASH, LANE, LEASE, MUCH, NOW, a_chunk, a_task, failed, said

from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import Lane, NewTask, TaskLease, TaskOutcome
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.durable.tasks import event_number
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority

pytest_plugins = ("database_fixtures",)

LANES = [LANE, LANE._replace(model="large"), Lane("demo", "bob", Priority.HIGH)]
OWNERS = ["r1", "r2"]
KEEP = 500.0
P, R, C, F, X = (
    task_pb2.TASK_STATE_PENDING,
    task_pb2.TASK_STATE_RUNNING,
    task_pb2.TASK_STATE_COMPLETED,
    task_pb2.TASK_STATE_FAILED,
    task_pb2.TASK_STATE_CANCELLED,
)


@dataclass(slots=True)
class ModelTask:
    """What a task should be."""

    row: NewTask
    state: "task_pb2.TaskState.ValueType" = P
    attempt: int = 0
    failures: int = 0
    owner: str = ""
    lease_until: float = 0.0
    ready_at: float = NOW
    expires_at: float = NOW
    ended_at: float = 0.0
    words: list[str] = field(default_factory=list)
    ended_by: "tuple[TaskLease, task_pb2.TaskState.ValueType] | None" = None

    def is_held_by(self, claim: TaskLease) -> bool:
        return self.state is R and (self.owner, self.attempt) == (claim.owner, claim.attempt)

    def may_begin(self, now: float) -> bool:
        return self.state is P and self.ready_at <= now < self.expires_at

    def wait_again(self, now: float, ready_at: float) -> None:
        window = self.row.window_ends_at
        self.expires_at = now + self.row.pending_limit_seconds if window is None else window
        self.state, self.owner, self.ready_at, self.words = P, "", ready_at, []

    def finish(self, state: "task_pb2.TaskState.ValueType", now: float) -> None:
        self.state, self.owner, self.ended_at = state, "", now


class Fenced(SqlTaskStore):
    """As it is."""


class Unfenced(SqlTaskStore):
    """Whoever has claimed a task once may write to it for ever."""

    fence = f"({SqlTaskStore.fence} OR id = :id)"


class TaskStoreMachine(RuleBasedStateMachine):
    """Does the same to both. A subclass says to which store."""

    store: ClassVar[SqlTaskStore]
    runner: ClassVar[asyncio.Runner]

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.tasks: dict[str, ModelTask] = {}
        self.claims: list[TaskLease] = []
        self.count = 0

    @rule(
        lane=st.sampled_from(LANES),
        key=st.sampled_from(["", "", "k1", "k2"]),
        prompt=st.sampled_from(["hi", "hi", "bye"]),
        window=st.sampled_from([None, None, 30.0]),
    )
    def submit(self, lane: Lane, key: str, prompt: str, window: float | None) -> None:
        self.count += 1
        ends = None if window is None else self.now + window
        row = a_task(
            f"task-{self.count}",
            lane=lane,
            idempotency_key=key,
            prompt=prompt,
            window_ends_at=ends,
            created_at=self.now,
            pending_limit_seconds=100.0,
        )
        same = [
            t for t in self.tasks.values() if key and (t.row.task.tenant, t.row.idempotency_key) == (lane.tenant, key)
        ]
        if same and same[0].row.digest != row.digest:
            self.refused(Reason.IDEMPOTENCY_CONFLICT, self.store.submit(row))
            return
        done = self.do(self.store.submit(row))
        assert (done.existed, done.task.id) == ((True, same[0].row.task.id) if same else (False, row.task.id))
        if not same:
            self.tasks[row.task.id] = ModelTask(row, ready_at=self.now, expires_at=row.expires_at)

    @rule(seconds=st.sampled_from([1.0, 10.0, LEASE, 120.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def claim(self, data: st.DataObject, owner: str) -> None:
        task = self.any_task(data)
        found = self.do(self.store.claim(task.row.task.id, owner, self.now, self.now + LEASE))
        if not task.may_begin(self.now):
            assert found is None
            return
        task.state, task.owner, task.lease_until = R, owner, self.now + LEASE
        task.attempt += 1
        assert found == (task.row.task.id, owner, task.attempt)
        self.claims.append(found)

    @rule(owner=st.sampled_from(OWNERS))
    def renew(self, owner: str) -> None:
        mine = [task for task in self.tasks.values() if task.state is R and task.owner == owner]
        for task in mine:
            task.lease_until = self.now + LEASE
        expected = {TaskLease(task.row.task.id, owner, task.attempt) for task in mine}
        assert self.do(self.store.renew(owner, self.now + LEASE)) == expected

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), words=st.lists(st.sampled_from("abc"), min_size=1, max_size=3), again=st.booleans())
    def append(self, data: st.DataObject, words: list[str], *, again: bool) -> None:
        claim, task = self.any_claim(data)
        is_held = task is not None and task.is_held_by(claim)
        first = 1 if again or task is None or not is_held else len(task.words) + 1
        assert self.do(self.store.append(claim, [a_chunk(first, *words)])) is is_held
        if is_held and task is not None:
            task.words[first - 1 :] = words

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), state=st.sampled_from([C, C, F]))
    def end(self, data: st.DataObject, state: "task_pb2.TaskState.ValueType") -> None:
        claim, task = self.any_claim(data)
        outcome = TaskOutcome(state=C) if state is C else failed()
        is_held = task is not None and task.is_held_by(claim)
        is_done = task is not None and task.ended_by == (claim, state)
        assert self.do(self.store.end(claim, outcome, self.now)) is (is_held or is_done)
        if is_held and task is not None:
            task.finish(state, self.now)
            task.ended_by = (claim, state)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), counts=st.booleans(), pause=st.sampled_from([0.0, 5.0]))
    def revert(self, data: st.DataObject, pause: float, *, counts: bool) -> None:
        claim, task = self.any_claim(data)
        is_held = task is not None and task.is_held_by(claim)
        ready_at = self.now + pause
        done = self.do(self.store.revert(claim, CRASH, receipt=b"", counts=counts, now=self.now, ready_at=ready_at))
        assert done is is_held
        if is_held and task is not None:
            task.failures += int(counts)
            task.wait_again(self.now, ready_at)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), tenant=st.sampled_from(["ann", "bob"]))
    def cancel(self, data: st.DataObject, tenant: str) -> None:
        task = self.any_task(data)
        found, is_ended_here = self.do(self.store.cancel(tenant, task.row.task.id, self.now))
        if task.row.task.tenant != tenant:
            assert (found, is_ended_here) == (None, False)
            return
        owner = task.owner
        assert is_ended_here is (task.state < task_pb2.TASK_STATE_COMPLETED)
        if is_ended_here:
            task.finish(X, self.now)
        assert (found.state, found.owner) == (task.state, owner)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def forget_one(self, data: st.DataObject) -> None:
        task = self.any_task(data)
        if task.state < task_pb2.TASK_STATE_COMPLETED:
            self.refused(Reason.RESOURCE_IN_USE, self.store.delete(task.row.task.tenant, task.row.task.id))
            return
        assert self.do(self.store.delete(task.row.task.tenant, task.row.task.id)).state is task.state
        del self.tasks[task.row.task.id]

    @rule()
    def revert_expired(self) -> None:
        over = [task for task in self.tasks.values() if task.state is R and task.lease_until <= self.now]
        expected = set()
        for task in over:
            task.failures += 1
            claim = TaskLease(task.row.task.id, task.owner, task.attempt)
            if task.failures < task.row.task.max_attempts:
                task.wait_again(self.now, self.now)
            else:
                task.finish(F, self.now)
                task.words = []
            expected.add((claim, task.row.lane, task.state))
        lost = self.do(self.store.revert_expired(self.now, 100))
        assert {(each.claim, each.lane, each.state) for each in lost} == expected

    @rule()
    def fail_expired(self) -> None:
        over = [task for task in self.tasks.values() if task.state is P and task.expires_at <= self.now]
        for task in over:
            task.finish(F, self.now)
        assert set(self.do(self.store.fail_expired(self.now, 100, {}))) == {task.row.task.id for task in over}

    @rule()
    def purge_ended(self) -> None:
        before = self.now - KEEP
        old = [
            name
            for name, task in self.tasks.items()
            if task.state >= task_pb2.TASK_STATE_COMPLETED and task.ended_at < before
        ]
        assert set(self.do(self.store.purge_ended(before, 100))) == set(old)
        for name in old:
            del self.tasks[name]

    @invariant()
    def everybody_sees_what_should_be(self) -> None:
        for tenant in ("ann", "bob"):
            mine = [task for task in reversed(self.tasks.values()) if task.row.task.tenant == tenant]
            listed = self.do(self.store.list_page(tenant, task_service_pb2.ListTasksRequest(page_size=1000))).tasks
            assert [(t.id, t.state, t.attempt, t.owner, t.last_event) for t in listed] == [
                (t.row.task.id, t.state, t.attempt, t.owner, event_number(t.attempt, len(t.words)) if t.words else 0)
                for t in mine
            ]

    @invariant()
    def those_who_may_begin_are_found(self) -> None:
        ready = [task for task in self.tasks.values() if task.may_begin(self.now)]
        lanes = self.do(self.store.lanes(self.now, None, 10))
        assert lanes == sorted({task.row.lane for task in ready})
        for lane in lanes:
            found = self.do(self.store.pending(lane, self.now, 100, MUCH))
            assert [(each.id, each.attempt, each.failures) for each in found] == [
                (task.row.task.id, task.attempt, task.failures) for task in ready if task.row.lane == lane
            ]

    @invariant()
    def answers_are_those_of_the_last_attempt(self) -> None:
        for claim in self.claims[-3:]:
            task = self.tasks.get(claim.task_id)
            expected = task.words if task is not None and task.attempt == claim.attempt else []
            assert self.do(said(self.store, claim.task_id, claim.attempt)) == expected

    @invariant()
    def pauses_and_open_tasks_are_known(self) -> None:
        pauses = [task.ready_at for task in self.tasks.values() if task.state is P and task.ready_at > self.now]
        assert self.do(self.store.next_ready_at(self.now)) == min(pauses, default=None)
        tenants = [task.row.task.tenant for task in self.tasks.values() if task.state < task_pb2.TASK_STATE_COMPLETED]
        assert self.do(self.store.open_counts()) == {tenant: tenants.count(tenant) for tenant in tenants}

    def do(self, awaited: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(awaited)

    def any_task(self, data: st.DataObject) -> ModelTask:
        return self.tasks[data.draw(st.sampled_from(list(self.tasks)))]

    def any_claim(self, data: st.DataObject) -> tuple[TaskLease, ModelTask | None]:
        """The task is None where it is forgotten."""
        claim = data.draw(st.sampled_from(self.claims))
        return claim, self.tasks.get(claim.task_id)

    def refused(self, reason: Reason, awaited: Coroutine[Any, Any, Any]) -> None:
        with refused(reason):
            self.do(awaited)


@pytest.fixture
def in_one_loop() -> Iterator[asyncio.Runner]:
    """Runs what is awaited, always in the same event loop."""
    with asyncio.Runner() as runner:
        yield runner


def try_out(kind: type[SqlTaskStore], loop: asyncio.Runner, database_url: str, examples: int, **more: Any) -> None:
    """Raises where the store and the model differ."""
    database = RouterDatabase(database_url)
    opened = kind(database)

    async def empty() -> None:
        await database.change("DELETE FROM tasks")

    class Machine(TaskStoreMachine):
        store = opened
        runner = loop

        def __init__(self) -> None:
            super().__init__()
            loop.run(empty())

    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    plan = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=checks,
        database=None,
        **more,
    )
    loop.run(opened.start())
    try:
        run_state_machine_as_test(Machine, settings=plan)
    finally:
        loop.run(opened.stop())


@pytest.mark.slow("hundreds of transactions")
def test_model_based_test_passes_on_sqlite(sqlite_url: str, in_one_loop: asyncio.Runner) -> None:
    # 8 in the quick profile.
    try_out(Fenced, in_one_loop, sqlite_url, examples=settings().max_examples * 2 // 5)


@pytest.mark.nightly("hundreds of transactions on PostgreSQL")
def test_model_based_test_passes_on_postgres(postgres_url: str, in_one_loop: asyncio.Runner) -> None:
    try_out(Fenced, in_one_loop, postgres_url, examples=6)


@pytest.mark.nightly("up to 300 runs until one fails")
def test_model_based_test_detects_a_store_without_fencing(sqlite_url: str, in_one_loop: asyncio.Runner) -> None:
    with pytest.raises(AssertionError):
        try_out(Unfenced, in_one_loop, sqlite_url, examples=300, phases=[Phase.generate])
