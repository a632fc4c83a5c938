"""A token is good once: at the same time, after a crash, after a restore, and whatever clocks do."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from governance_stage import (
    LIFETIME,
    SKEW,
    Scope,
    Stage,
    config,
    flush,
    load,
    unload,
    with_code,
)
from operation_stage import FakeDirectory
from operation_stage import Stage as OperationStage

from registry_svc.mesh.store import SqlStore
from registry_svc.operations.governance import build_gate
from registry_svc.operations.operation_store import OperationStore
from registry_svc.operations.operations import Operations
from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1.operation_service_pb2 import CreateOperationRequest
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.signing.tokens import token_fields
from weft_testing.fake_clock import FakeClock

DATABASE = "registry.db"

PARALLEL = 100


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def asked(action: operation_pb2.OperationAction, token: str, request_id: str) -> CreateOperationRequest:
    """A request within all limits."""
    return CreateOperationRequest(request_id=request_id, action=action, requested_by="a test", authorization=token)


def _makers(clock: FakeClock) -> Stage:
    """Whoever makes tokens, now; its gate is nobody's."""
    stage = Stage(clock=clock)
    stage.seconds_later = 0.0
    return stage


@asynccontextmanager
async def _life(folder: Path, clock: FakeClock) -> AsyncIterator[Operations]:
    """Operations on the database in `folder` behind a new gate, from start to stop; no runner is there."""
    database = SqlStore(f"sqlite:///{folder / DATABASE}")
    await database.open()
    stage = OperationStage(
        database,
        OperationStore(database),
        clock=clock,
        directory=FakeDirectory(models={"qwen": "", "other": ""}, runners={}),
        gatekeeper=build_gate(config(), clock),
    )
    await stage.start()
    try:
        yield stage.operations
    finally:
        await stage.operations.stop(5.0)
        await database.close()


async def _refused(operations: Operations, action: operation_pb2.OperationAction, token: str, request_id: str) -> str:
    """Why, from the audit log; and the caller has heard nothing of it."""
    with pytest.raises(WeftError) as refused:
        await operations.create(asked(action, token, request_id))
    assert (refused.value.reason, refused.value.message) == (Reason.OPERATION_REFUSED, "refused")
    assert refused.value.metadata == {}
    entries, _ = await operations.audit_page(0, 1000)
    refusals = [entry for entry in entries if entry.event == "operation.refused"]
    return str(json.loads(refusals[-1].detail)["why"])


@pytest.mark.slow("floods a service")
async def test_exactly_one_of_a_hundred_concurrent_uses_wins(tmp_path: Path, clock: FakeClock) -> None:
    token = _makers(clock).signed(load())
    async with _life(tmp_path, clock) as operations:
        outcomes = await asyncio.gather(
            *(operations.create(asked(load(), token, f"request-{number}")) for number in range(PARALLEL)),
            return_exceptions=True,
        )
        won = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        lost = [outcome for outcome in outcomes if isinstance(outcome, WeftError)]
        assert (len(won), len(lost)) == (1, PARALLEL - 1)
        assert {(error.reason, error.message) for error in lost} == {(Reason.OPERATION_REFUSED, "refused")}
        assert len(await operations.page(before_number=None, size=1000, unfinished_only=False)) == 1


async def test_repeating_the_same_request_is_not_a_second_use(tmp_path: Path, clock: FakeClock) -> None:
    token = _makers(clock).signed(load())
    async with _life(tmp_path, clock) as operations:
        first, existed = await operations.create(asked(load(), token, "mine"))
        again, known = await operations.create(asked(load(), token, "mine"))
        assert (existed, known, first.name) == (False, True, again.name)
        assert await _refused(operations, load(), token, "other") == "its nonce was used before"
    clock_later = FakeClock(utc=clock.utc_now() + timedelta(seconds=LIFETIME * 2))
    async with _life(tmp_path, clock_later) as operations:
        later, known = await operations.create(asked(load(), token, "mine"))
        assert (known, later.name) == (True, first.name)


async def test_used_tokens_are_rejected_after_a_database_restore(tmp_path: Path, clock: FakeClock) -> None:
    stage = _makers(clock)
    used, late = stage.signed(load()), stage.signed(load("other"))
    async with _life(tmp_path, clock) as operations:
        await operations.create(asked(load(), stage.signed(load()), "before the copy"))
    copy = tmp_path / "copy.db"
    shutil.copy(tmp_path / DATABASE, copy)
    async with _life(tmp_path, clock) as operations:
        await operations.create(asked(load(), used, "after the copy"))
    shutil.copy(copy, tmp_path / DATABASE)
    await clock.advance(1.0)
    async with _life(tmp_path, clock) as operations:
        assert "before the registry started" in await _refused(operations, load(), used, "again")
        assert "before the registry started" in await _refused(operations, load("other"), late, "never used, as old")
        stage.seconds_later = 1.0
        await clock.advance(1.0)
        await operations.create(asked(load(), stage.signed(load()), "signed after it"))


async def test_clock_set_back_does_not_revalidate_used_tokens(tmp_path: Path, clock: FakeClock) -> None:
    stage = _makers(clock)
    used, unused = stage.signed(load()), stage.signed(load())
    async with _life(tmp_path, clock) as operations:
        await operations.create(asked(load(), used, "one"))
        await clock.advance(3600.0)
        await operations.housekeep()
        stage.seconds_later = 3600.0
        await operations.create(asked(load(), stage.signed(load()), "two"))
    set_back = FakeClock(utc=clock.utc_now() - timedelta(seconds=3590))
    async with _life(tmp_path, set_back) as operations:
        why = await _refused(operations, load(), used, "again")
        assert why == "it was issued before the registry started"
        assert await _refused(operations, load(), unused, "never used, as old") == why


async def test_all_rejections_look_identical_to_callers_and_the_log_has_the_reason(
    tmp_path: Path, clock: FakeClock
) -> None:
    stage = _makers(clock)
    now = stage.now
    used = stage.signed(load())
    hostile: dict[str, str] = {
        "nothing": "",
        "nonsense": "nonsense",
        "one signer": stage.signed(load(), signers=["alice"]),
        "one twice": stage.signed(load(), signers=["alice", "alice"]),
        "unknown": stage.signed(load(), signers=["mallory"]),
        "revoked": stage.signed(load(), signers=["alice", "eve"]),
        "forged": with_code(stage.op_token(token_fields(load())), bytes(40)),
        "expired": stage.signed(load(), issuedAt=now - 301),
        "future": stage.signed(load(), issuedAt=now + SKEW + 1),
        "action": stage.signed(load("another")),
        "used": used,
    }
    whys = {}
    async with _life(tmp_path, clock) as operations:
        await operations.create(asked(load(), used, "first"))
        for name, token in hostile.items():
            whys[name] = await _refused(operations, load(), token, name.replace(" ", "-"))
    assert len(set(whys.values())) == len(whys) - 1, "one signer twice is one signer; all else differs"
    assert not any(part in why for why in whys.values() for part in (used[:40], "mallory"))


async def test_clock_that_briefly_ran_ahead_does_not_revalidate_used_tokens(tmp_path: Path, clock: FakeClock) -> None:
    token = _makers(clock).signed(load())
    async with _life(tmp_path, clock) as operations:
        await operations.create(asked(load(), token, "first"))
    async with _life(tmp_path, FakeClock(utc=clock.utc_now() + timedelta(days=3))) as operations:
        await operations.housekeep()
    async with _life(tmp_path, clock) as operations:
        assert await _refused(operations, load(), token, "again") == "its nonce was used before"


async def test_every_operation_kind_is_governed(tmp_path: Path, clock: FakeClock) -> None:
    stage = _makers(clock)
    async with _life(tmp_path, clock) as operations:
        for number, action in enumerate([load(), unload(), flush(Scope.SCOPE_ALL)]):
            assert await _refused(operations, action, "", f"without-{number}") == "there is no authorization"
            view, _ = await operations.create(asked(action, stage.signed(action), f"with-{number}"))
            assert list(view.signers) == ["alice", "bob"]
