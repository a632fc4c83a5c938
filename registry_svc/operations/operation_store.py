"""SQL store of operations, the audit log and used nonces."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from registry_svc.operations.actions import action_bytes
from registry_svc.operations.audit_chain import chained, empty_head, head_of
from registry_svc.operations.governance import Admission
from registry_svc.operations.live_operations import OPERATION_PREFIX
from weft.api.operations.v1.operation_pb2 import Operation, OperationAction, OperationResult
from weft.api.operations.v1.operation_service_pb2 import AuditEntry, AuditHead
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import optional_datetime, optional_stamp
from weft.kernel.values.names import new_id
from weft.sql.connections import Row, Tx
from weft.sql.store import Store

_ENTRY_TEXTS = ("event", "actor", "operation", "detail", "previous_hash", "hash")
_BY_ID = "SELECT * FROM operations WHERE id = :key"
_BY_REQUEST = "SELECT * FROM operations WHERE request_id = :key"


@dataclass(frozen=True, slots=True)
class Saved:
    """The operation was stored."""

    operation: Operation
    head: AuditHead


@dataclass(frozen=True, slots=True)
class RequestKnown:
    """Nothing was written: an earlier operation has the request id."""

    earlier: Operation


@dataclass(frozen=True, slots=True)
class NonceUsed:
    """Nothing was written: the nonce was used before."""


class OperationStore:
    """Stores operations and their audit log in SQL. Writes are durable when the call returns.

    All methods raise SERVICE_UNAVAILABLE if the database fails; then nothing was written. Audit entries are numbered
    and chained in the writing transaction.
    """

    def __init__(self, database: Store) -> None:
        self._database = database

    @property
    def is_in_doubt(self) -> bool:
        """See `Store.is_in_doubt`."""
        return self._database.is_in_doubt

    async def newest_issued_at(self) -> datetime | None:
        """Returns the highest `Admission.mark` that was ever saved; None: none."""
        return await self._database.run(_newest_issued_at)

    async def load_unfinished(self) -> list[Operation]:
        """Returns unfinished operations, in order of acceptance."""
        statement = "SELECT * FROM operations WHERE ended_at IS NULL ORDER BY number"
        return [_operation_of(row) for row in await self._database.read(lambda tx: tx.rows(statement))]

    async def get(self, name: str) -> Operation | None:
        """Returns an operation, or None."""
        return await self._database.read(lambda tx: _found(tx, _BY_ID, name.removeprefix(OPERATION_PREFIX)))

    async def of_request(self, request_id: str) -> Operation | None:
        """Returns the operation that a request created, or None."""
        return await self._database.read(lambda tx: _found(tx, _BY_REQUEST, request_id))

    async def page(self, *, before_number: int | None, size: int, unfinished_only: bool = False) -> list[Operation]:
        """Returns at most `size` operations, newest first; with `before_number`, only those accepted before it."""
        before = "number < :before" if before_number is not None else "true"
        unfinished = "ended_at IS NULL" if unfinished_only else "true"
        statement = f"SELECT * FROM operations WHERE {before} AND {unfinished} ORDER BY number DESC LIMIT :size"  # noqa: S608
        rows = await self._database.read(lambda tx: tx.rows(statement, before=before_number, size=size))
        return [_operation_of(row) for row in rows]

    async def save_new(
        self, operation: Operation, audit: Sequence[AuditEntry], admission: Admission
    ) -> Saved | RequestKnown | NonceUsed:
        """Stores an operation with a new number, its audit entries, and its nonce and mark, atomically."""

        def work(tx: Tx) -> Saved | RequestKnown | NonceUsed:
            earlier = _found(tx, _BY_REQUEST, operation.request_id)
            if earlier is not None:
                return RequestKnown(earlier)
            nonce = admission.nonce
            if nonce and tx.row("SELECT nonce FROM used_nonces WHERE nonce = :nonce", nonce=nonce) is not None:
                return NonceUsed()
            saved = Operation()
            saved.CopyFrom(operation)
            saved.number = (tx.value("SELECT max(number) FROM operations") or 0) + 1
            row = _operation_row(saved)
            tx.insert("operations", row)
            if nonce:
                kept_until = admission.nonce_kept_until
                tx.insert("used_nonces", {"nonce": nonce, "operation_id": row["id"], "kept_until": kept_until})
            _raise_mark(tx, admission.mark)
            return Saved(saved, _append(tx, audit))

        return await self._database.run(work)

    async def update(self, operation: Operation, audit: Sequence[AuditEntry]) -> AuditHead:
        """Replaces a stored operation and writes audit entries. Raises NOT_FOUND if it was never stored.

        Writes nothing if the operation is unchanged, so that a call without an acknowledgement can be repeated.
        """

        def work(tx: Tx) -> AuditHead:
            row = _operation_row(operation)
            stored = _found(tx, _BY_ID, row["id"])
            if stored is None:
                raise WeftError(Reason.NOT_FOUND, "there is no operation with this name")
            if _operation_row(stored) == row:
                return _head(tx)
            tx.update("operations", "id", row)
            return _append(tx, audit)

        return await self._database.run(work)

    async def append_audit(self, audit: Sequence[AuditEntry]) -> AuditHead:
        """Writes entries that belong to no operation."""
        return await self._database.run(lambda tx: _append(tx, audit))

    async def page_audit(self, *, after_sequence: int, size: int) -> list[AuditEntry]:
        """Returns at most `size` entries after a sequence number, oldest first."""
        statement = "SELECT * FROM audit_entries WHERE sequence > :after ORDER BY sequence LIMIT :size"
        rows = await self._database.read(lambda tx: tx.rows(statement, after=after_sequence, size=size))
        return [_entry_of(row) for row in rows]

    async def audit_head(self) -> AuditHead:
        """Returns the head of the log."""
        return await self._database.read(_head)

    async def delete_expired(self, *, ended_before: datetime, now: datetime) -> bool:
        """Deletes operations that ended before `ended_before`, and nonces that need not be kept at `now`.

        Returns whether any remain that may expire later. Nonces are kept at least until the time of the mark.
        """

        def work(tx: Tx) -> bool:
            # Keeps unfinished operations, since a comparison with NULL is not true.
            tx.execute("DELETE FROM operations WHERE ended_at < :before", before=ended_before)
            newest = tx.value("SELECT newest_issued_at FROM governance_marks")
            # A clock that is briefly ahead would expire all nonces; only an admitted token that was issued later
            # proves the time.
            before = now if newest is None else min(now, newest)
            tx.execute("DELETE FROM used_nonces WHERE kept_until < :before", before=before)
            return bool(tx.value("SELECT EXISTS (SELECT 1 FROM operations) OR EXISTS (SELECT 1 FROM used_nonces)"))

        return await self._database.run(work)


def _newest_issued_at(tx: Tx) -> datetime | None:
    row = tx.row("SELECT newest_issued_at FROM governance_marks")
    if row is not None:
        newest: datetime | None = row.newest_issued_at
        return newest
    # The release before reads the audience, and may share the database or take it over again.
    tx.insert("governance_marks", {"id": 1, "audience": new_id("reg"), "newest_issued_at": None})
    return None


def _found(tx: Tx, statement: str, key: str) -> Operation | None:
    row = tx.row(statement, key=key)
    return None if row is None else _operation_of(row)


def _raise_mark(tx: Tx, mark: datetime | None) -> None:
    if mark is None:
        return
    row = tx.row("SELECT * FROM governance_marks")
    if row is None:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "governance records are missing from the registry's database")
    if row.newest_issued_at is None or row.newest_issued_at < mark:
        tx.execute("UPDATE governance_marks SET newest_issued_at = :mark", mark=mark)


def _head(tx: Tx) -> AuditHead:
    row = tx.row("SELECT sequence, hash FROM audit_entries ORDER BY sequence DESC LIMIT 1")
    return empty_head() if row is None else AuditHead(sequence=row.sequence, hash=row.hash)


def _append(tx: Tx, drafts: Sequence[AuditEntry]) -> AuditHead:
    head = _head(tx)
    entries = chained(head, drafts)
    if not entries:
        return head
    tx.insert("audit_entries", *map(_entry_row, entries))
    return head_of(entries[-1])


def _operation_row(operation: Operation) -> dict[str, Any]:
    return {
        "number": operation.number,
        "id": operation.name.removeprefix(OPERATION_PREFIX),
        "request_id": operation.request_id,
        "action": action_bytes(operation.action),
        "state": Operation.State.Name(operation.state).removeprefix("STATE_").lower(),
        "requested_by": operation.requested_by,
        "signers": json.dumps(list(operation.signers)),
        "runner": operation.runner,
        "reason": Reason(operation.reason).name.lower(),
        "detail": operation.detail,
        "result": operation.result.SerializeToString(deterministic=True),
        "cancel_requested": operation.cancel_requested,
        "created_at": optional_datetime(operation, "create_time"),
        "started_at": optional_datetime(operation, "start_time"),
        "ended_at": optional_datetime(operation, "end_time"),
    }


def _operation_of(row: Row) -> Operation:
    # A newer release may have unknown reasons.
    reason = Reason.__members__.get(row.reason.upper(), Reason.INTERNAL)
    return Operation(
        number=row.number,
        name=OPERATION_PREFIX + row.id,
        request_id=row.request_id,
        action=OperationAction.FromString(bytes(row.action)),
        state=Operation.State.Value(f"STATE_{row.state.upper()}"),
        requested_by=row.requested_by,
        signers=json.loads(row.signers),
        runner=row.runner,
        reason=reason.value,  # type: ignore[arg-type]  # same numbers
        detail=row.detail,
        result=OperationResult.FromString(bytes(row.result)),
        cancel_requested=row.cancel_requested,
        create_time=optional_stamp(row.created_at),
        start_time=optional_stamp(row.started_at),
        end_time=optional_stamp(row.ended_at),
    )


def _entry_row(entry: AuditEntry) -> dict[str, Any]:
    texts = {name: getattr(entry, name) for name in _ENTRY_TEXTS}
    return {**texts, "sequence": entry.sequence, "at": entry.time.ToDatetime(UTC)}


def _entry_of(row: Row) -> AuditEntry:
    entry = AuditEntry(sequence=row.sequence, **{name: getattr(row, name) for name in _ENTRY_TEXTS})
    entry.time.FromDatetime(row.at)
    return entry
