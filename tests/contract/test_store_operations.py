"""One suite that every OperationStore passes, on each kind of database."""

import asyncio
from datetime import datetime, timedelta
from itertools import product
from typing import Any

import pytest
from kit.refusals import refused
from stored_values import ELSEWHERE, NOW, WORDS

from registry_svc.mesh.store import SqlStore
from registry_svc.operations.audit_chain import AuditCheck, Damage, Fault, empty_head
from registry_svc.operations.audit_log import entry_draft
from registry_svc.operations.governance import Admission
from registry_svc.operations.operation_store import NonceUsed, OperationStore, RequestKnown, Saved
from weft.api.operations.v1.operation_pb2 import LoadModel, Operation, OperationAction, OperationResult
from weft.api.operations.v1.operation_service_pb2 import AuditEntry
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of

pytest_plugins = ("database_fixtures",)


@pytest.fixture
def operations(store: SqlStore) -> OperationStore:
    return OperationStore(store)


def changed(earlier: Operation, **changes: Any) -> Operation:
    made = Operation()
    made.CopyFrom(earlier)
    made.MergeFrom(Operation(**changes))
    return made


def operation(number: int = 1, **changes: Any) -> Operation:
    """With every field set to something that a careless store would lose."""
    made = Operation(
        name=f"operations/op-{number}",
        state=Operation.STATE_PENDING,
        request_id=f"request-{number}",
        action=OperationAction(load_model=LoadModel(model="m1", evict_model="m2")),
        requested_by=WORDS,
        signers=("alice-2026", "bob-2026"),
        runner="gpu-1",
        detail=WORDS,
        result=OperationResult(models=["m1"]),
        create_time=stamp_of(NOW.astimezone(ELSEWHERE)),
    )
    return changed(made, **changes)


def entry(event: str = "operation.accepted", at: timedelta = timedelta(0)) -> AuditEntry:
    return entry_draft(
        at=NOW.astimezone(ELSEWHERE) + at, event=event, actor=WORDS, operation="operations/op-1", detail='{"a":"ü"}'
    )


New = tuple[Operation, list[AuditEntry], Admission]


def new(number: int = 1, nonce: str = "", mark: datetime | None = None, **changes: Any) -> New:
    kept_until = NOW + timedelta(minutes=6) if nonce else None
    admission = Admission(nonce=nonce, nonce_kept_until=kept_until, mark=mark)
    return operation(number, **changes), [entry()], admission


async def saved(operations: OperationStore, number: int = 1, nonce: str = "") -> Operation:
    outcome = await operations.save_new(*new(number, nonce))
    assert isinstance(outcome, Saved)
    return outcome.operation


async def test_operation_round_trips_with_its_number(operations: OperationStore) -> None:
    first, second = await saved(operations), await saved(operations, 2)
    assert first == changed(operation(), number=1)
    assert second.number == 2
    assert await operations.get("operations/op-1") == first
    assert await operations.of_request("request-2") == second
    assert await operations.get("operations/op-3") is None
    assert await operations.of_request("op-1") is None


@pytest.mark.slow("writes every pair of a state and a reason")
async def test_every_state_and_reason_round_trips(operations: OperationStore) -> None:
    first = await saved(operations)
    for state, reason in product(Operation.State.values()[1:], Reason):
        later = changed(first, state=state)
        later.reason = reason.value  # type: ignore[assignment]  # same numbers
        await operations.update(later, [])
        assert await operations.get("operations/op-1") == later


async def test_request_id_creates_one_operation_and_a_repeat_writes_nothing(operations: OperationStore) -> None:
    first = await saved(operations)
    other = new(2, request_id="request-1")
    assert await operations.save_new(*other) == RequestKnown(first)
    assert await operations.get("operations/op-2") is None
    assert (await operations.audit_head()).sequence == 1


async def test_used_nonce_writes_nothing(operations: OperationStore) -> None:
    await saved(operations, 1, nonce="n1")
    head = await operations.audit_head()
    assert await operations.save_new(*new(2, nonce="n1")) == NonceUsed()
    assert await operations.get("operations/op-2") is None
    assert await operations.audit_head() == head
    assert isinstance(await operations.save_new(*new(2, nonce="n2")), Saved)


async def test_exactly_one_of_100_concurrent_uses_of_a_nonce_wins(operations: OperationStore) -> None:
    outcomes = await asyncio.gather(*(operations.save_new(*new(number, nonce="n1")) for number in range(1, 101)))
    assert sum(isinstance(outcome, Saved) for outcome in outcomes) == 1
    assert outcomes.count(NonceUsed()) == 99
    assert len(await operations.page(before_number=None, size=1000)) == 1
    assert (await operations.audit_head()).sequence == 1


async def test_nonce_remains_used_for_the_next_database_owner(
    store: SqlStore, operations: OperationStore, database_url: str
) -> None:
    await saved(operations, 1, nonce="n1")
    await store.close()
    again = SqlStore(database_url)
    await again.open()
    assert await OperationStore(again).save_new(*new(2, nonce="n1")) == NonceUsed()
    await again.close()


async def kept_nonces(store: SqlStore, now: datetime) -> int:
    await OperationStore(store).delete_expired(ended_before=NOW, now=now)
    return len(await store.read(lambda tx: tx.rows("SELECT nonce FROM used_nonces")))


async def test_nonce_is_stored_until_its_expiry(store: SqlStore, operations: OperationStore) -> None:
    await saved(operations, 1, nonce="n1")
    assert await kept_nonces(store, NOW + timedelta(minutes=6)) == 1
    assert await kept_nonces(store, NOW + timedelta(minutes=6, seconds=1)) == 0
    assert isinstance(await operations.save_new(*new(2, nonce="n1")), Saved)


async def test_nonce_is_stored_until_a_later_token_proves_its_expiry(
    store: SqlStore, operations: OperationStore
) -> None:
    await operations.newest_issued_at()
    await operations.save_new(*new(1, nonce="n1", mark=NOW))
    long_after = NOW + timedelta(days=300)
    assert await kept_nonces(store, long_after) == 1
    await operations.save_new(*new(2, nonce="n2", mark=NOW + timedelta(minutes=7)))
    assert await kept_nonces(store, long_after) == 0
    assert isinstance(await operations.save_new(*new(3, nonce="n1")), Saved)


async def test_rejected_operation_leaves_neither_nonce_nor_audit_entry(
    store: SqlStore, operations: OperationStore
) -> None:
    await store.run(lambda tx: tx.execute("ALTER TABLE audit_entries RENAME TO away"))
    admission = Admission(nonce="n1", nonce_kept_until=NOW)
    with pytest.raises(WeftError) as failure:
        await operations.save_new(operation(1), [entry(), entry()], admission)
    await store.run(lambda tx: tx.execute("ALTER TABLE away RENAME TO audit_entries"))
    assert failure.value.reason is Reason.SERVICE_UNAVAILABLE
    assert await operations.get("operations/op-1") is None
    assert await operations.audit_head() == empty_head()
    assert isinstance(await operations.save_new(*new(1, nonce="n1")), Saved)


async def test_pages_are_newest_first_without_gaps_or_duplicates(operations: OperationStore) -> None:
    for number in range(1, 8):
        await saved(operations, number)
    await operations.update(changed(operation(4), end_time=stamp_of(NOW), number=4), [])
    seen: list[str] = []
    before: int | None = None
    while page := await operations.page(before_number=before, size=3):
        seen += [each.name for each in page]
        before = page[-1].number
    assert seen == [f"operations/op-{number}" for number in range(7, 0, -1)]
    unfinished = await operations.page(before_number=None, size=10, unfinished_only=True)
    assert [each.number for each in unfinished] == [7, 6, 5, 3, 2, 1]
    assert [each.number for each in await operations.load_unfinished()] == [1, 2, 3, 5, 6, 7]


async def test_only_ended_operations_are_purged(operations: OperationStore) -> None:
    for number in (1, 2, 3):
        await saved(operations, number)
    await operations.update(changed(operation(1), end_time=stamp_of(NOW), number=1), [])
    await operations.update(changed(operation(2), end_time=stamp_of(NOW + timedelta(seconds=1)), number=2), [])
    assert await operations.delete_expired(ended_before=NOW + timedelta(seconds=1), now=NOW)
    assert [each.number for each in await operations.page(before_number=None, size=10)] == [3, 2]
    assert isinstance(await operations.save_new(*new(9, request_id="request-1")), Saved)


async def test_repeated_update_writes_no_second_entry(operations: OperationStore) -> None:
    first = await saved(operations)
    running = changed(first, state=Operation.STATE_RUNNING, start_time=stamp_of(NOW))
    head = await operations.update(running, [entry("operation.started")])
    assert await operations.update(running, [entry("operation.started")]) == head
    assert head.sequence == 2


async def test_updating_an_unsaved_operation_fails(operations: OperationStore) -> None:
    with refused(Reason.NOT_FOUND):
        await operations.update(operation(5), [entry()])
    assert await operations.audit_head() == empty_head()


async def test_audit_entries_are_numbered_without_gaps_and_chained_in_any_write_order(
    operations: OperationStore,
) -> None:
    first = await saved(operations)
    running = changed(first, state=Operation.STATE_RUNNING)
    # Others write at the same time.
    await asyncio.gather(
        *(operations.append_audit([entry(f"event-{number}"), entry("second")]) for number in range(20)),
        operations.update(running, [entry("operation.started")]),
        *(operations.save_new(*new(number)) for number in range(2, 12)),
    )
    entries = await operations.page_audit(after_sequence=0, size=1000)
    assert [each.sequence for each in entries] == list(range(1, 53))
    check = AuditCheck(kept=await operations.audit_head())
    check.read(entries)
    assert check.verdict() is None
    (found,) = (each for each in entries if each.event == "event-7")
    for name in ("sequence", "previous_hash", "hash"):
        found.ClearField(name)
    assert found == entry("event-7")
    page = await operations.page_audit(after_sequence=10, size=5)
    assert page == entries[10:15]


async def test_tampered_audit_entry_is_detected(store: SqlStore, operations: OperationStore) -> None:
    await operations.append_audit([entry(f"event-{number}") for number in range(5)])
    await store.run(lambda tx: tx.execute("UPDATE audit_entries SET actor = 'nobody' WHERE sequence = 3"))
    check = AuditCheck()
    check.read(await operations.page_audit(after_sequence=0, size=100))
    assert check.verdict() == Fault(damage=Damage.CHANGED, sequence=3)


async def test_issue_time_mark_never_decreases(store: SqlStore, operations: OperationStore, database_url: str) -> None:
    assert await operations.newest_issued_at() is None
    for number, mark in enumerate((NOW, NOW - timedelta(seconds=1), None), start=1):
        await operations.save_new(*new(number, mark=mark))
        assert (await operations.newest_issued_at()) == NOW
    await operations.save_new(*new(9, mark=NOW + timedelta(seconds=1)))
    await store.close()
    again = SqlStore(database_url)
    await again.open()
    assert await OperationStore(again).newest_issued_at() == NOW + timedelta(seconds=1)
    await again.close()
