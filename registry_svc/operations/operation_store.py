"""Stores operations, the audit log and spent nonces in the registry's database."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Row, delete, exists, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from registry_svc.operations.audit_chain import chained, empty_head, head_of
from registry_svc.operations.governance import Admission, GovernanceMarks
from registry_svc.operations.policy.lifecycle import GovernedOperation, OperationState
from registry_svc.store.database import Transactions
from registry_svc.store.schema import audit_entries, governance_marks, operations, used_nonces
from weft.api.operations.v1.operation_service_pb2 import AuditEntry, AuditHead
from weft.kernel.errors import WeftError
from weft.kernel.names import new_id
from weft.kernel.reasons import Reason

_ENTRY_TEXTS = ("event", "actor", "operation", "detail", "previous_hash", "hash")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOperation:
    """Everything that one accepted operation leaves on disk."""

    operation: GovernedOperation
    """Its `number` is assigned by the store."""
    audit: tuple[AuditEntry, ...]
    admission: Admission
    """Its nonce is remembered, and its mark raises the mark of issue times."""


@dataclass(frozen=True, slots=True)
class Saved:
    """It is on disk."""

    operation: GovernedOperation
    head: AuditHead


@dataclass(frozen=True, slots=True)
class RequestKnown:
    """Nothing was written: an earlier operation has this request id."""

    earlier: GovernedOperation


@dataclass(frozen=True, slots=True)
class NonceUsed:
    """Nothing was written: the nonce was used before."""


class Expired(NamedTuple):
    """The rows that were deleted because they had expired."""

    operations: int
    nonces: int
    is_any_left: bool
    """Whether there are operations or nonces that may expire later."""


class OperationStore:
    """Store of operations and their audit log, beside the tables of `Store`.

    Every write is one transaction that is on disk when the call returns. All methods raise SERVICE_UNAVAILABLE when the
    database fails; then nothing was written. Audit entries are numbered and chained inside the writing transaction.
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    async def load_marks(self) -> GovernanceMarks:
        """Return what a gatekeeper must know of earlier runs; the audience is created at the first call."""
        async with self._transactions.transaction() as connection:
            row = (await connection.execute(select(governance_marks))).one_or_none()
            if row is not None:
                return GovernanceMarks(audience=row.audience, newest_issued_at=row.newest_issued_at)
            audience = new_id("reg")
            values = {"id": 1, "audience": audience, "newest_issued_at": None}
            await connection.execute(insert(governance_marks), values)
            return GovernanceMarks(audience=audience)

    async def load_unfinished(self) -> list[GovernedOperation]:
        """Operations that have not ended, in order of acceptance."""
        statement = select(operations).where(operations.c.ended_at.is_(None)).order_by(operations.c.number)
        async with self._transactions.transaction() as connection:
            return [_operation_of(row) for row in await connection.execute(statement)]

    async def get(self, operation_id: str) -> GovernedOperation | None:
        """One operation."""
        async with self._transactions.transaction() as connection:
            return await _found(connection, operations.c.id == operation_id)

    async def of_request(self, request_id: str) -> GovernedOperation | None:
        """The operation that a request created."""
        async with self._transactions.transaction() as connection:
            return await _found(connection, operations.c.request_id == request_id)

    async def page(
        self, *, before_number: int | None, size: int, unfinished_only: bool = False
    ) -> list[GovernedOperation]:
        """Return at most `size` operations, newest first; `before_number`: only those accepted before that one."""
        statement = select(operations).order_by(operations.c.number.desc()).limit(size)
        if before_number is not None:
            statement = statement.where(operations.c.number < before_number)
        if unfinished_only:
            statement = statement.where(operations.c.ended_at.is_(None))
        async with self._transactions.transaction() as connection:
            return [_operation_of(row) for row in await connection.execute(statement)]

    async def save_new(self, new: NewOperation) -> Saved | RequestKnown | NonceUsed:
        """Save an operation with its audit entries, its nonce and its mark: all of it, or nothing."""
        async with self._transactions.transaction() as connection:
            earlier = await _found(connection, operations.c.request_id == new.operation.request_id)
            if earlier is not None:
                return RequestKnown(earlier)
            admission = new.admission
            if admission.nonce:
                spent = select(used_nonces.c.nonce).where(used_nonces.c.nonce == admission.nonce)
                if (await connection.execute(spent)).one_or_none() is not None:
                    return NonceUsed()
            newest = (await connection.execute(select(func.max(operations.c.number)))).scalar()
            row = {**_operation_row(new.operation), "number": (newest or 0) + 1}
            await connection.execute(insert(operations), row)
            if admission.nonce:
                values = {"nonce": admission.nonce, "operation_id": new.operation.id}
                kept_until = {"kept_until": admission.nonce_kept_until}
                await connection.execute(insert(used_nonces), values | kept_until)
            await _raise_mark(connection, admission.mark)
            head = await _append(connection, new.audit)
            saved = await _found(connection, operations.c.id == new.operation.id)
            assert saved is not None, "what was inserted can be read in the same transaction"
            return Saved(saved, head)

    async def update(self, operation: GovernedOperation, audit: Sequence[AuditEntry]) -> AuditHead:
        """Replace the stored form of `operation`; raises NOT_FOUND when it was never saved.

        An equal form writes nothing, so that a call whose answer was lost may be repeated.
        """
        async with self._transactions.transaction() as connection:
            stored = await _found(connection, operations.c.id == operation.id)
            if stored is None:
                raise WeftError(Reason.NOT_FOUND, "no operation of this name is known")
            if stored == operation:
                return await _head(connection)
            await connection.execute(
                update(operations).where(operations.c.id == operation.id).values(**_operation_row(operation))
            )
            return await _append(connection, audit)

    async def append_audit(self, audit: Sequence[AuditEntry]) -> AuditHead:
        """Write entries that belong to no operation."""
        async with self._transactions.transaction() as connection:
            return await _append(connection, audit)

    async def page_audit(self, *, after_sequence: int, size: int) -> list[AuditEntry]:
        """At most `size` entries after that one, oldest first."""
        statement = (
            select(audit_entries)
            .where(audit_entries.c.sequence > after_sequence)
            .order_by(audit_entries.c.sequence)
            .limit(size)
        )
        async with self._transactions.transaction() as connection:
            return [_entry_of(row) for row in await connection.execute(statement)]

    async def audit_head(self) -> AuditHead:
        """The end of the log."""
        async with self._transactions.transaction() as connection:
            return await _head(connection)

    async def delete_expired(self, *, ended_before: datetime, now: datetime) -> Expired:
        """Delete operations that ended before `ended_before`, and nonces that need not be kept at `now`.

        Unfinished operations are never deleted, and nonces are kept until the time of the mark at least.
        """
        async with self._transactions.transaction() as connection:
            # A comparison with NULL is not true, so unfinished operations stay.
            ended = await connection.execute(delete(operations).where(operations.c.ended_at < ended_before))
            newest = (await connection.execute(select(governance_marks.c.newest_issued_at))).scalar_one_or_none()
            # A clock that is ahead for a moment would expire all nonces; only a token that was issued after that
            # time, and admitted, proves the time.
            before = now if newest is None else min(now, newest)
            nonces = await connection.execute(delete(used_nonces).where(used_nonces.c.kept_until < before))
            left = select(exists(select(operations.c.id)) | exists(select(used_nonces.c.nonce)))
            is_any_left = bool((await connection.execute(left)).scalar_one())
            return Expired(operations=ended.rowcount, nonces=nonces.rowcount, is_any_left=is_any_left)


async def _found(connection: AsyncConnection, condition: Any) -> GovernedOperation | None:
    row = (await connection.execute(select(operations).where(condition))).one_or_none()
    return None if row is None else _operation_of(row)


async def _raise_mark(connection: AsyncConnection, mark: datetime | None) -> None:
    if mark is None:
        return
    row = (await connection.execute(select(governance_marks))).one_or_none()
    if row is None:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database lost its marks of governance")
    if row.newest_issued_at is None or row.newest_issued_at < mark:
        await connection.execute(update(governance_marks).values(newest_issued_at=mark))


async def _head(connection: AsyncConnection) -> AuditHead:
    newest = select(audit_entries.c.sequence, audit_entries.c.hash).order_by(audit_entries.c.sequence.desc()).limit(1)
    row = (await connection.execute(newest)).one_or_none()
    return empty_head() if row is None else AuditHead(sequence=row.sequence, hash=row.hash)


async def _append(connection: AsyncConnection, drafts: Sequence[AuditEntry]) -> AuditHead:
    head = await _head(connection)
    entries = chained(head, drafts)
    if not entries:
        return head
    await connection.execute(insert(audit_entries), [_entry_row(entry) for entry in entries])
    return head_of(entries[-1])


def _operation_row(operation: GovernedOperation) -> dict[str, Any]:
    """Return the columns, which have the names of the fields."""
    values = {each.name: getattr(operation, each.name) for each in fields(operation)}
    return values | {
        "state": operation.state.name.lower(),
        "signers": json.dumps(operation.signers),
        "reason": operation.reason.name.lower(),
    }


def _operation_of(row: Row[Any]) -> GovernedOperation:
    values = dict(row._mapping) | {  # noqa: SLF001 - the documented name of a row's mapping
        "state": OperationState[row.state.upper()],
        "signers": tuple(json.loads(row.signers)),
        # A newer release may have reasons that this one does not know.
        "reason": Reason.__members__.get(row.reason.upper(), Reason.INTERNAL),
    }
    return GovernedOperation(**values)


def _entry_row(entry: AuditEntry) -> dict[str, Any]:
    texts = {name: getattr(entry, name) for name in _ENTRY_TEXTS}
    return {**texts, "sequence": entry.sequence, "at": entry.time.ToDatetime(UTC)}


def _entry_of(row: Row[Any]) -> AuditEntry:
    entry = AuditEntry(sequence=row.sequence, **{name: getattr(row, name) for name in _ENTRY_TEXTS})
    entry.time.FromDatetime(row.at)
    return entry
