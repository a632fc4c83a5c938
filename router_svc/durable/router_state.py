"""What a router knows besides its requests, in its database: accounts of fair share, clients, and figures.

Only what has changed is written, every few seconds; a new process of the router goes on from there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Table, delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.client_registry import ClientRegistry, KeptClient
from router_svc.durable.limits import RecordLimits
from router_svc.durable.request_records import Writer, insert_for
from router_svc.figures import FiguresRecorder
from router_svc.policy.queue.fair_share import FairShare, KeptAccount, aged
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import fair_accounts, figure_steps, known_clients
from weft.api.router.v1.figure_step_pb2 import FigureStep
from weft.api.router.v1.request_pb2 import ClientRecord
from weft.kernel.clock import Clock

ACCOUNT_MEMORY_SECONDS = 600.0
"""How long after the end of a router its accounts of fair share count: the longer it was away, the less."""


class RouterState:
    """What the router that leads knows, over restarts and changes of the leader."""

    def __init__(
        self,
        database: RouterDatabase,
        writer: Writer,
        settings: RecordLimits,
        clock: Clock,
        *,
        shares: FairShare,
        clients: ClientRegistry,
        figures: FiguresRecorder,
    ) -> None:
        self._database = database
        self._writer = writer
        self._settings = settings
        self._clock = clock
        self._shares = shares
        self._clients = clients
        self._figures = figures

    async def load(self) -> None:
        """Restores what the last leader wrote. Raises SERVICE_UNAVAILABLE."""
        async with self._database.reading() as connection:
            accounts = (await connection.execute(select(fair_accounts))).all()
            clients = await self._stored_clients(connection)
            wanted = select(figure_steps).where(figure_steps.c.seconds == self._figures.limits.step_seconds)
            steps = (await connection.execute(wanted)).all()
        self._restore_accounts(accounts)
        self._clients.restore(clients)
        self._figures.restore({row.begins_at: FigureStep.FromString(row.step) for row in steps})

    async def save(self) -> None:
        """Writes what has changed since the last call, in one transaction. Raises SERVICE_UNAVAILABLE."""
        accounts, clients = self._shares.take_changed(), self._clients.take_changed()
        steps, upto = self._figures.unwritten()
        if not (accounts or clients or steps):
            return
        try:
            async with self._database.writing() as connection:
                if accounts:
                    await self._write_accounts(connection, accounts)
                if clients:
                    await _write(connection, known_clients, [self._client_row(kept) for kept in clients])
                if steps:
                    await self._write_steps(connection, steps)
        except BaseException:
            self._shares.give_back(accounts)
            self._clients.give_back(clients)
            raise
        self._figures.note_written(upto)

    async def sweep(self) -> None:
        """Deletes what is too old to be of use, and clients beyond those that are remembered."""
        now = self._clock.utc_now().timestamp()
        oldest, limits, clients = now - self._settings.keep_seconds, self._figures.limits, known_clients.c
        last = await self._database.first(
            select(clients.last_seen_at)
            .order_by(clients.last_seen_at.desc())
            .offset(self._clients.max_clients)
            .limit(1)
        )
        wanted = [
            delete(fair_accounts).where(fair_accounts.c.saved_at < oldest),
            delete(figure_steps).where(figure_steps.c.begins_at < now - limits.max_steps * limits.step_seconds),
            delete(known_clients).where(clients.last_seen_at < oldest),
        ]
        if last is not None:
            beyond = clients.last_seen_at <= last.last_seen_at
            wanted.append(delete(known_clients).where(beyond))
        for statement in wanted:
            await self._database.change(statement)

    def _restore_accounts(self, rows: Sequence[Any]) -> None:
        if not rows:
            return
        # An account that rested was as good as when it was written for as long as its router was there.
        age = self._clock.utc_now().timestamp() - max(row.saved_at for row in rows)
        kept = [
            KeptAccount(tenant=row.tenant, tokens=row.tokens, mean_cost_tokens=row.mean_cost, is_active=row.is_active)
            for row in rows
        ]
        self._shares.restore(aged(kept, age, ACCOUNT_MEMORY_SECONDS))

    async def _stored_clients(self, connection: AsyncConnection) -> Sequence[KeptClient]:
        """Returns the clients that are remembered, the last seen one last; of one with two rows the newer."""
        wanted = select(known_clients).order_by(known_clients.c.last_seen_at.desc())
        rows = (await connection.execute(wanted.limit(self._clients.max_clients))).all()
        return [
            KeptClient(row.tenant, ClientRecord.FromString(row.record), row.cooldown_seconds) for row in reversed(rows)
        ]

    async def _write_accounts(self, connection: AsyncConnection, accounts: Iterable[KeptAccount]) -> None:
        now = self._clock.utc_now().timestamp()
        # Those of an earlier process were counted from elsewhere. All that were restored are written with the first.
        await connection.execute(delete(fair_accounts).where(fair_accounts.c.incarnation != self._writer.incarnation))
        rows = [
            {
                "router": self._writer.router,
                "tenant": account.tenant,
                "incarnation": self._writer.incarnation,
                "tokens": account.tokens,
                "mean_cost": account.mean_cost_tokens,
                "is_active": account.is_active,
                "saved_at": now,
            }
            for account in accounts
        ]
        await _write(connection, fair_accounts, rows)

    def _client_row(self, kept: KeptClient) -> dict[str, object]:
        return {
            "router": self._writer.router,
            "tenant": kept.tenant,
            "client_id": kept.record.client_id,
            "last_seen_at": kept.record.last_seen_time.ToNanoseconds() / 1e9,
            "cooldown_seconds": kept.cooldown_seconds,
            "record": kept.record.SerializeToString(),
        }

    async def _write_steps(self, connection: AsyncConnection, steps: Mapping[float, FigureStep]) -> None:
        seconds = self._figures.limits.step_seconds
        rows = [
            {"router": self._writer.router, "begins_at": begin, "seconds": seconds, "step": step.SerializeToString()}
            for begin, step in steps.items()
        ]
        await _write(connection, figure_steps, rows)


async def _write(connection: AsyncConnection, table: Table, rows: Sequence[Mapping[str, object]]) -> None:
    """Writes rows, in place of those with the same keys."""
    new = insert_for(connection, table)
    keys = {column.name for column in table.primary_key}
    others = {column.name: new.excluded[column.name] for column in table.c if column.name not in keys}
    await connection.execute(new.on_conflict_do_update(index_elements=sorted(keys), set_=others), list(rows))
