"""The store of leases: its port, and its implementation on SQL."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Row, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from registry_svc.ledger.policy.leases import Grant, Holder, HolderKind
from registry_svc.store.database import Transactions, delete_rows, parts_of
from registry_svc.store.schema import lease_counter, leases
from weft.gpu.snapshot import ProcessId
from weft.kernel.request import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLedger:
    """Everything on disk."""

    grants: tuple[Grant, ...] = ()
    """In order of their fencing numbers."""
    last_fencing_number: int = 0
    """The highest fencing number ever issued; 0: none."""


class LeaseStore(Protocol):
    """Store of leases, from their grant to their end.

    Every write is one transaction that is on disk when the call returns. All methods raise SERVICE_UNAVAILABLE when the
    database fails; then nothing was written, unless the acknowledgement of the commit was lost.
    """

    async def load(self) -> StoredLedger:
        """Everything there is."""
        ...

    async def grant(self, grant: Grant) -> None:
        """Store a new lease and its fencing number, which is never issued again."""
        ...

    async def save_releasing(self, lease_ids: Sequence[str]) -> None:
        """Mark these leases as releasing; unknown ids are ignored."""
        ...

    async def save_processes(self, lease_id: str, processes: Sequence[ProcessId]) -> None:
        """Store the processes of a lease; an unknown id is ignored."""
        ...

    async def remove(self, lease_ids: Sequence[str]) -> None:
        """Delete leases that have ended; unknown ids are ignored."""
        ...


_COUNTER_ID = 1


class SqlLeaseStore(LeaseStore):
    """See LeaseStore."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    @override
    async def load(self) -> StoredLedger:
        async with self._transactions.transaction() as connection:
            rows = (await connection.execute(select(leases).order_by(leases.c.fencing_number))).all()
            last = (await connection.execute(select(lease_counter.c.last_fencing_number))).scalar_one_or_none()
        grants = tuple(_grant_of(row) for row in rows)
        return StoredLedger(
            grants=grants, last_fencing_number=max([last or 0, *(each.fencing_number for each in grants)])
        )

    @override
    async def grant(self, grant: Grant) -> None:
        async with self._transactions.transaction() as connection:
            await connection.execute(insert(leases), [_row_of(grant)])
            await _count(connection, grant.fencing_number)

    @override
    async def save_releasing(self, lease_ids: Sequence[str]) -> None:
        async with self._transactions.transaction() as connection:
            for some in parts_of(lease_ids):
                await connection.execute(update(leases).where(leases.c.id.in_(some)).values(releasing=True))

    @override
    async def save_processes(self, lease_id: str, processes: Sequence[ProcessId]) -> None:
        async with self._transactions.transaction() as connection:
            changed = update(leases).where(leases.c.id == lease_id).values(processes=_processes_text(processes))
            await connection.execute(changed)

    @override
    async def remove(self, lease_ids: Sequence[str]) -> None:
        async with self._transactions.transaction() as connection:
            await delete_rows(connection, leases.c.id, lease_ids)


async def _count(connection: AsyncConnection, number: int) -> None:
    counted = await connection.execute(
        update(lease_counter).where(lease_counter.c.id == _COUNTER_ID).values(last_fencing_number=number)
    )
    if not counted.rowcount:
        await connection.execute(insert(lease_counter), [{"id": _COUNTER_ID, "last_fencing_number": number}])


def _processes_text(processes: Iterable[ProcessId]) -> str:
    return json.dumps([[each.pid, each.start_ticks] for each in processes])


def _row_of(grant: Grant) -> dict[str, Any]:
    return {
        "id": grant.id,
        "fencing_number": grant.fencing_number,
        "request_id": grant.request_id,
        "host": grant.host,
        "holder_kind": int(grant.holder.kind),
        "holder_name": grant.holder.name,
        "holder_incarnation": grant.holder.incarnation,
        "purpose": grant.purpose,
        "shares": json.dumps([list(share) for share in grant.shares]),
        "processes": _processes_text(grant.processes),
        "pinned": grant.pinned,
        "priority": int(grant.priority),
        "releasing": grant.releasing,
        "created_at": grant.created_at,
    }


def _grant_of(row: Row[Any]) -> Grant:
    return Grant(
        id=row.id,
        fencing_number=row.fencing_number,
        request_id=row.request_id,
        host=row.host,
        holder=Holder(kind=HolderKind(row.holder_kind), name=row.holder_name, incarnation=row.holder_incarnation),
        purpose=row.purpose,
        shares=tuple((index, size) for index, size in json.loads(row.shares)),
        processes=tuple(ProcessId(pid, start_ticks) for pid, start_ticks in json.loads(row.processes)),
        pinned=row.pinned,
        priority=Priority(row.priority),
        releasing=row.releasing,
        created_at=row.created_at,
    )
