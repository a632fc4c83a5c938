"""SQL store of leases."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from registry_svc.ledger.policy.leases import Grant, Holder, HolderKind
from weft.gpu.snapshot import ProcessId
from weft.kernel.requests.request_values import Priority
from weft.sql.connections import Row, Tx
from weft.sql.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLedger:
    """The stored leases and fencing number."""

    grants: tuple[Grant, ...] = ()
    """Sorted by fencing number."""
    last_fencing_number: int = 0
    """The highest fencing number ever issued; 0: none."""


_COUNTER_ID = 1


class LeaseStore:
    """Stores leases from their grant to their end. Writes are durable when the call returns.

    All methods raise SERVICE_UNAVAILABLE if the database fails; then nothing was written.
    """

    def __init__(self, database: Store) -> None:
        self._database = database

    @property
    def is_in_doubt(self) -> bool:
        """See `Store.is_in_doubt`."""
        return self._database.is_in_doubt

    async def load(self) -> StoredLedger:
        """Returns everything that is stored."""
        rows, last = await self._database.read(
            lambda tx: (
                tx.rows("SELECT * FROM leases ORDER BY fencing_number"),
                tx.value("SELECT last_fencing_number FROM lease_counter"),
            )
        )
        grants = tuple(_grant_of(row) for row in rows)
        return StoredLedger(
            grants=grants, last_fencing_number=max([last or 0, *(each.fencing_number for each in grants)])
        )

    async def grant(self, grant: Grant) -> None:
        """Stores a new lease and its fencing number, which is never issued again."""
        row, count = _row_of(grant), {"id": _COUNTER_ID, "last_fencing_number": grant.fencing_number}

        def work(tx: Tx) -> None:
            tx.insert("leases", row)
            tx.replace("lease_counter", "id", count)

        await self._database.run(work)

    async def save_releasing(self, lease_ids: Sequence[str]) -> None:
        """Marks leases as releasing. Ignores unknown ids."""
        await self._database.run(
            lambda tx: tx.execute("UPDATE leases SET releasing = true WHERE id IN :ids", ids=list(lease_ids))
        )

    async def save_processes(self, lease_id: str, processes: Sequence[ProcessId]) -> None:
        """Stores the processes of a lease. Ignores an unknown id."""
        text = _processes_text(processes)
        await self._database.run(
            lambda tx: tx.execute("UPDATE leases SET processes = :text WHERE id = :id", text=text, id=lease_id)
        )

    async def remove(self, lease_ids: Sequence[str]) -> None:
        """Deletes ended leases. Ignores unknown ids."""
        await self._database.run(lambda tx: tx.delete("leases", "id", lease_ids))


def _processes_text(processes: Iterable[ProcessId]) -> str:
    return json.dumps([[each.pid, each.start_ticks] for each in processes])


_PLAIN = ("id", "fencing_number", "request_id", "host", "purpose", "pinned", "releasing", "created_at")
"""Columns that are fields of a grant."""


def _row_of(grant: Grant) -> dict[str, Any]:
    return {
        **{name: getattr(grant, name) for name in _PLAIN},
        "holder_kind": int(grant.holder.kind),
        "holder_name": grant.holder.name,
        "holder_incarnation": grant.holder.incarnation,
        "shares": json.dumps([list(share) for share in grant.shares]),
        "processes": _processes_text(grant.processes),
        "priority": int(grant.priority),
    }


def _grant_of(row: Row) -> Grant:
    return Grant(
        **{name: getattr(row, name) for name in _PLAIN},
        holder=Holder(kind=HolderKind(row.holder_kind), name=row.holder_name, incarnation=row.holder_incarnation),
        shares=tuple((index, size) for index, size in json.loads(row.shares)),
        processes=tuple(ProcessId(pid, start_ticks) for pid, start_ticks in json.loads(row.processes)),
        priority=Priority(row.priority),
    )
