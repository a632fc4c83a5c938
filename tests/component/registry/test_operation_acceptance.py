"""Which operations are accepted, what a refusal leaves behind, and what a restart carries on."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kit.refusals import refused
from operation_stage import Action, Stage, load, loaded, running_stage, said, unload
from structlog.testing import capture_logs

from registry_svc.operations.audit_chain import AuditCheck
from registry_svc.operations.audit_log import (
    ENTRIES_PER_OPERATION,
    MAX_ENTRIES_PER_WINDOW,
    SHARE_FOR_REFUSALS,
    WINDOW_SECONDS,
)
from registry_svc.operations.executor import RESUME_PATIENCE_SECONDS
from registry_svc.operations.governance import Admission, Gatekeeper
from registry_svc.operations.live_operations import ENDED, MAX_WATCHERS
from registry_svc.operations.operation_store import OperationStore
from registry_svc.operations.operations import HOUSEKEEPING_INTERVAL_SECONDS
from registry_svc.operations.policy.governance import Refused
from weft.api.operations.v1.operation_pb2 import Operation
from weft.api.operations.v1.operation_service_pb2 import AuditEntry, AuditHead, GetGovernanceResponse
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.sql.sweeper import Sweeper
from weft_testing.fake_clock import FakeClock

KILLED_AFTER_A_COMMIT = """
import asyncio, os, signal, sys
sys.path.insert(0, {folder!r})
from operation_stage import load, loaded, running_stage

async def main():
    async with running_stage(url={url!r}) as stage:
        commits = 0
        def killed_after(write):
            async def written(*args):
                nonlocal commits
                result = await write(*args)
                commits += 1
                if commits == {commits}:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result
            return written
        stage.store.save_new = killed_after(stage.store.save_new)
        stage.store.update = killed_after(stage.store.update)
        stage.calls.answer("m1", loaded())
        await stage.end(await stage.create(load(), "the-request"))

asyncio.run(main())
"""
# Accepted, begun, its runner, its load, its end.
COMMITS = 5


class ScriptedGate(Gatekeeper):
    """Admits what is authorized as "nonce:<nonce>"; everything else is refused with the authorization as why."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[datetime | None] = []
        self.seen: list[bytes] = []

    def recall(self, newest_issued_at: datetime | None) -> None:
        self.marks.append(newest_issued_at)

    def admit(self, action: Action, authorization: str, now_utc: datetime) -> Admission:
        self.seen.append(action.SerializeToString(deterministic=True))
        kind, _, nonce = authorization.partition(":")
        if kind != "nonce":
            raise Refused(authorization or "there was no token")
        return Admission(
            signers=("alice-2026", "bob-2026"),
            nonce=nonce,
            nonce_kept_until=now_utc + timedelta(minutes=6),
            issued_at=now_utc,
            mark=now_utc,
        )

    def describe(self) -> GetGovernanceResponse:
        return GetGovernanceResponse(mode=GetGovernanceResponse.MODE_SIGNATURES, required_signers=2)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with running_stage() as stage:
        yield stage


@pytest.fixture
async def guarded() -> AsyncIterator[Stage]:
    async with running_stage(ScriptedGate()) as stage:
        yield stage


async def refusal_of(stage: Stage, authorization: str) -> WeftError:
    with pytest.raises(WeftError) as refusal:
        await stage.create(load(), authorization=authorization)
    return refusal.value


async def test_repeated_request_returns_the_same_operation_in_any_state(stage: Stage) -> None:
    first, existed = await stage.operations.create(stage.asked(load(), "r1"))
    assert not existed
    for _ in range(2):
        again, existed = await stage.operations.create(stage.asked(load(), "r1"))
        assert (again.name, existed) == (first.name, True)
        stage.calls.answer("m1", loaded())
        await stage.end(first.name)
    assert (await stage.events()).count("accepted") == 1
    assert stage.calls.heard == ["load m1 on r1"]


async def test_repeat_is_answered_after_its_model_was_deleted(stage: Stage) -> None:
    first = await stage.create(load(), "r1")
    stage.calls.answer("m1", loaded())
    await stage.end(first)
    del stage.directory.models["m1"]
    assert await stage.create(load(), "r1") == first
    with refused(Reason.MODEL_NOT_FOUND):
        await stage.create(load(), "r2")


async def test_100_calls_with_one_request_id_create_one_operation(stage: Stage) -> None:
    answers = await asyncio.gather(*(stage.operations.create(stage.asked(load(), "r1")) for _ in range(100)))
    assert len({view.name for view, _ in answers}) == 1
    assert [existed for _, existed in answers].count(False) == 1


async def test_caller_cancellation_does_not_undo_an_accepted_operation(stage: Stage) -> None:
    calling = asyncio.create_task(stage.create(load(), "r1"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    view, _ = await stage.operations.create(stage.asked(load(), "r1"))
    stage.calls.answer("m1", loaded())
    assert (await stage.end(view.name)).state == Operation.STATE_SUCCEEDED
    assert stage.calls.heard == ["load m1 on r1"]


async def test_caller_sees_only_refused_and_the_audit_log_has_the_reason(guarded: Stage) -> None:
    error = await refusal_of(guarded, "expired by 1 s")
    assert (error.reason, error.message, error.metadata) == (Reason.OPERATION_REFUSED, "refused", {})
    (entry,) = await guarded.audit()
    detail = json.loads(entry.detail)
    assert (entry.event, entry.actor, entry.operation) == ("operation.refused", "alice", "")
    assert (detail["why"], detail["action"]) == ("expired by 1 s", {"load_model": {"model": "m1"}})
    assert await guarded.operations.page(before_number=None, size=10, unfinished_only=False) == []


async def test_admitted_operation_is_stored_with_its_signers_and_mark(guarded: Stage) -> None:
    operation = await guarded.create(load(), authorization="nonce:n1")
    assert list((await guarded.operations.get(operation)).signers) == ["alice-2026", "bob-2026"]
    await guarded.restart()
    gate = guarded.gatekeeper
    assert isinstance(gate, ScriptedGate)
    assert gate.marks == [None, guarded.clock.utc_now()]


async def test_operation_rejected_by_the_limit_keeps_its_nonce() -> None:
    async with running_stage(ScriptedGate(), max_unfinished=1) as stage:
        first = await stage.create(load(), authorization="nonce:n1")
        with refused(Reason.TOO_MANY_RESOURCES):
            await stage.create(load(), authorization="nonce:n2")
        stage.calls.answer("m1", loaded())
        await stage.end(first)
        await stage.create(load(), authorization="nonce:n2")


@pytest.mark.slow("floods a service")
async def test_flood_of_rejections_is_counted_instead_of_logged_individually(guarded: Stage) -> None:
    for number in range(200):
        await refusal_of(guarded, "bad" if number % 2 else "worse")
    assert await guarded.events() == ["refused"] * MAX_ENTRIES_PER_WINDOW
    await guarded.clock.advance(WINDOW_SECONDS)
    await guarded.operations.housekeep()
    last = (await guarded.audit())[-1]
    counted = json.loads(last.detail)
    assert (last.event, counted["count"], counted["why"]) == (
        "operation.refusals_counted",
        180,
        {"bad": 90, "worse": 90},
    )
    await refusal_of(guarded, "bad")
    assert (await guarded.events())[-1] == "refused"


async def test_pending_rejection_count_is_written_at_stop(guarded: Stage) -> None:
    for _ in range(MAX_ENTRIES_PER_WINDOW + 5):
        await refusal_of(guarded, "bad")
    await guarded.restart()
    assert json.loads((await guarded.audit())[-1].detail)["count"] == 5


@pytest.mark.slow("steps hours of a registry's life")
async def test_rejections_leave_audit_space_for_operations() -> None:
    limit = 40
    async with running_stage(ScriptedGate(), max_audit_entries=limit) as stage:
        for _ in range(10):
            for _ in range(MAX_ENTRIES_PER_WINDOW):
                await refusal_of(stage, "bad")
            await stage.clock.advance(WINDOW_SECONDS)
        assert len(await stage.events()) == limit * SHARE_FOR_REFUSALS
        await stage.create(load(), authorization="nonce:n1")


async def test_nearly_full_audit_log_rejects_new_operations() -> None:
    async with running_stage(max_audit_entries=3 * ENTRIES_PER_OPERATION) as stage:
        accepted = [await stage.create(load(name)) for name in ("m1", "m3")]
        with refused(Reason.TOO_MANY_RESOURCES) as refusal:
            await stage.create(load("m2"))
        assert "max_audit_entries" in refusal[0].message
        for operation in accepted:
            await stage.operations.cancel(operation, "bob")
            await stage.end(operation)
        assert stage.operations.audit.head.sequence == 2 * ENTRIES_PER_OPERATION


async def test_restart_resumes_unfinished_operations_in_order(stage: Stage) -> None:
    first, second = await stage.create(load()), await stage.create(unload())
    stage.calls.answer("m1", said("loading"))
    await stage.until_stage(first, "loading")
    await stage.restart()
    assert stage.calls.heard == ["load m1 on r1", "load m1 stopped"]
    stage.calls.answer("m1", loaded())
    assert (await stage.end(first)).state == Operation.STATE_SUCCEEDED
    assert (await stage.end(second)).state == Operation.STATE_SUCCEEDED
    assert stage.calls.heard[2:] == ["load m1 on r1", "unload m1 on r1"]
    assert (await stage.events()).count("started") == 2


async def test_cancel_requested_before_a_restart_is_executed_after_it(stage: Stage) -> None:
    operation = await stage.create(load())
    await stage.until_heard("load m1 on r1")
    stage.calls.held["m1"] = asyncio.Event()
    await stage.operations.cancel(operation, "bob")
    await stage.until_heard("load m1 on r1", "load m1 stopped", "unload m1 on r1")
    await stage.restart()
    stage.calls.held["m1"].set()
    assert (await stage.end(operation)).state == Operation.STATE_CANCELLED
    assert stage.calls.heard[3:] == ["unload m1 on r1"]


@pytest.mark.slow("kills or restarts a service")
async def test_runner_has_limited_time_to_reconnect_after_a_restart(stage: Stage) -> None:
    first, second = await stage.create(load("m1")), await stage.create(load("m3"))
    await stage.until_heard("load m1 on r1", "load m3 on r2")
    stage.directory.lose("r1")
    stage.directory.lose("r2")
    await stage.restart()
    restarted_at = stage.clock.monotonic()
    await stage.clock.wait_for_sleepers(4)
    stage.directory.restart("r1")
    stage.calls.answer("m1", loaded())
    end = await stage.end_as_time_passes(second, step_seconds=2.0)
    assert (end.state, Reason(end.reason)) == (Operation.STATE_FAILED, Reason.NO_RUNNER_AVAILABLE)
    assert stage.clock.monotonic() - restarted_at >= RESUME_PATIENCE_SECONDS
    assert (await stage.end(first)).state == Operation.STATE_SUCCEEDED


async def test_time_elapsed_before_a_restart_counts() -> None:
    async with running_stage(timeout_seconds=60.0) as stage:
        operation = await stage.create(load())
        await stage.until_heard("load m1 on r1")
        await stage.clock.advance(50.0)
        await stage.restart()
        await stage.until_heard("load m1 on r1", "load m1 stopped", "load m1 on r1")
        await stage.clock.advance(10.0)
        assert Reason((await stage.end(operation)).reason) is Reason.DEADLINE_EXCEEDED


async def test_operation_end_is_published_only_after_it_is_stored(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = await stage.create(load())
    await stage.until_heard("load m1 on r1")
    update, failing = stage.store.update, 3

    async def failing_update(*args: object) -> object:
        nonlocal failing
        if failing:
            failing -= 1
            assert await stage.state(operation) == Operation.STATE_RUNNING
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database failed")
        return await update(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(stage.store, "update", failing_update)
    stage.calls.answer("m1", loaded())
    assert (await stage.end_as_time_passes(operation, step_seconds=1.0)).state == Operation.STATE_SUCCEEDED
    assert failing == 0
    assert await stage.events() == ["accepted", "started", "succeeded"]


async def test_operation_cancelled_as_its_turn_comes_does_not_start(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await stage.create(load()), await stage.create(unload())
    await stage.until_heard("load m1 on r1")
    update, ending, gate = stage.store.update, asyncio.Event(), asyncio.Event()

    async def held_update(operation: Operation, audit: Sequence[AuditEntry]) -> AuditHead:
        if operation.name == first:
            ending.set()
            await gate.wait()
        else:
            await asyncio.sleep(0.05)  # the end of the first one is told meanwhile, and with it comes the turn
        return await update(operation, audit)

    monkeypatch.setattr(stage.store, "update", held_update)
    stage.calls.answer("m1", loaded())
    await ending.wait()
    with capture_logs() as logs:
        cancelling = asyncio.create_task(stage.operations.cancel(second, "bob"))
        await asyncio.sleep(0)
        gate.set()
        assert (await cancelling).state == Operation.STATE_CANCELLED
        assert (await stage.end(first)).state == Operation.STATE_SUCCEEDED
        third = await stage.create(load("m3"))
        await stage.until_heard("load m1 on r1", "load m3 on r2")
        await stage.operations.cancel(third, "bob")
        await stage.end(third)
    assert [each["event"] for each in logs if each["log_level"] == "critical"] == []


@pytest.mark.slow("kills or restarts a service")
@pytest.mark.parametrize("commits", range(1, COMMITS + 1))
async def test_retry_finds_the_operation_after_kill_9_at_any_commit_and_it_ends_once(
    tmp_path: Path, commits: int
) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    script = KILLED_AFTER_A_COMMIT.format(folder=str(Path(__file__).parent), url=url, commits=commits)
    process = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script], timeout=60, check=False)
    assert process.returncode == -signal.SIGKILL
    async with running_stage(url=url) as stage:
        (kept,) = await stage.store.page(before_number=None, size=10)
        assert (kept.state in ENDED) == (commits == COMMITS)
        view, existed = await stage.operations.create(stage.asked(load(), "the-request"))
        assert (view.name, existed) == (kept.name, True)
        stage.calls.answer("m1", loaded())
        assert (await stage.end(kept.name)).state == Operation.STATE_SUCCEEDED
        assert await stage.events() == ["accepted", "started", "succeeded"]
        check = AuditCheck(kept=stage.operations.audit.head)
        check.read(await stage.audit())
        assert check.verdict() is None


async def test_acceptance_with_a_lost_database_response_is_found_by_the_retry(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_new = stage.store.save_new

    async def saved_and_lost(*new: Any) -> object:
        await save_new(*new)
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database failed")

    monkeypatch.setattr(stage.store, "save_new", saved_and_lost)
    with pytest.raises(WeftError):
        await stage.create(load(), "r1")
    monkeypatch.undo()
    view, existed = await stage.operations.create(stage.asked(load(), "r1"))
    assert existed
    stage.calls.answer("m1", loaded())
    assert (await stage.end(view.name)).state == Operation.STATE_SUCCEEDED


async def test_calls_outside_start_and_stop_fail_and_watchers_end_with_shutting_down(stage: Stage) -> None:
    operation = await stage.create(load())
    followed = await stage.operations.watch(operation)
    await stage.operations.stop(1.0)
    with refused(Reason.SHUTTING_DOWN):
        async for _ in followed:  # type: ignore[union-attr]
            pass
    for call in (
        stage.operations.get(operation),
        stage.operations.create(stage.asked(load())),
        stage.operations.cancel(operation, ""),
        stage.operations.page(before_number=None, size=1, unfinished_only=False),
        stage.operations.audit_page(0, 1),
        stage.operations.housekeep(),
    ):
        with refused(Reason.SHUTTING_DOWN):
            await call


async def test_watcher_over_the_limit_is_rejected_until_another_leaves(stage: Stage) -> None:
    operation = await stage.create(load())
    followed = [await stage.operations.watch(operation) for _ in range(MAX_WATCHERS)]
    with refused(Reason.TOO_MANY_RESOURCES):
        await stage.operations.watch(operation)
    assert not isinstance(followed[0], Operation)
    with followed[0]:
        pass
    await stage.operations.watch(operation)


async def test_housekeeping_skips_a_store_without_operations_and_nonces(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []
    delete_expired = stage.store.delete_expired

    async def counted(*, ended_before: datetime, now: datetime) -> bool:
        looked.append(await delete_expired(ended_before=ended_before, now=now))
        return looked[-1]

    monkeypatch.setattr(stage.store, "delete_expired", counted)
    for _ in range(3):
        await stage.operations.housekeep()
    assert looked == [False]
    await stage.create(load())
    for _ in range(3):
        await stage.operations.housekeep()
    assert looked[1:] == [True] * 3


async def test_old_operations_are_purged_and_their_audit_entries_remain() -> None:
    async with running_stage(keep_seconds=3600.0, timeout_seconds=36_000.0) as stage:
        ended = await stage.create(load())
        stage.calls.answer("m1", loaded())
        await stage.end(ended)
        waiting = await stage.create(load("m3"))
        await stage.clock.advance(3599.0)
        await stage.operations.housekeep()
        assert await stage.state(ended) == Operation.STATE_SUCCEEDED
        await stage.clock.advance(2.0)
        await stage.operations.housekeep()
        with refused(Reason.NOT_FOUND):
            await stage.operations.get(ended)
        assert await stage.state(waiting) == Operation.STATE_RUNNING
        assert len(await stage.audit()) == 5


async def test_housekeeping_task_reports_the_audit_head_and_survives_a_failure(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, rounds = FakeClock(), 0

    async def housekeep() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database failed")

    monkeypatch.setattr(stage.operations, "housekeep", housekeep)
    await stage.create(load())
    await stage.until_heard("load m1 on r1")
    sweepers = (
        Sweeper("housekeeping", {"housekeeping": stage.operations.housekeep}, HOUSEKEEPING_INTERVAL_SECONDS, clock),
        Sweeper("audit-head", {"audit head": stage.operations.tell_head}, 3600.0, clock),
    )
    with capture_logs() as logs:
        for sweeper in sweepers:
            sweeper.start()
        await clock.advance(3600.0, sleepers=2)
        for sweeper in (*sweepers, *sweepers):
            await sweeper.stop()
    head = stage.operations.audit.head
    assert rounds == 3600 / HOUSEKEEPING_INTERVAL_SECONDS
    told = [(each["sequence"], each["hash"]) for each in logs if each["event"] == "audit head"]
    assert told == [(head.sequence, head.hash)]


async def test_audit_head_is_logged_at_stop(stage: Stage) -> None:
    await stage.create(load())
    await stage.until_heard("load m1 on r1")
    with capture_logs() as logs:
        await stage.operations.stop(1.0)
    head = await OperationStore(stage.database).audit_head()
    told = [(each["sequence"], each["hash"]) for each in logs if each["event"] == "audit head"]
    assert told == [(head.sequence, head.hash)]
    assert head.sequence == 2
