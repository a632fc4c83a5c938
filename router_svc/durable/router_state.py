"""A router's state besides requests, in its database: fair-share accounts, turns, clients and figures.

Changes are written every few seconds; a new process continues with them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router_svc.client_registry import ClientRegistry, KeptClient
from router_svc.durable.limits import RecordLimits
from router_svc.durable.request_records import Writer
from router_svc.figures import FigureLimits, FiguresRecorder
from router_svc.policy.queue.fair_share import KeptAccount, aged
from router_svc.policy.scheduler import SchedulerMemory
from router_svc.store.database import RouterDatabase
from weft.api.router.v1.figure_step_pb2 import FigureStep
from weft.api.router.v1.request_pb2 import ClientRecord
from weft.kernel.time.clock import Clock
from weft.sql.connections import Tx
from weft.sql.statements import Values, upsert

ACCOUNT_MEMORY_SECONDS = 600.0
"""How long after a router's end its fair-share accounts count, with a weight that shrinks over time."""

_PUT_ACCOUNT = upsert(
    "fair_accounts", ("router", "tenant"), "incarnation", "tokens", "mean_cost", "is_active", "saved_at"
)
_PUT_CLIENT = upsert("known_clients", ("router", "tenant", "client_id"), "last_seen_at", "cooldown_seconds", "record")
_PUT_TURNS = upsert("further_turns", ("router", "pool"), "share", "prompts", "saved_at")
_FORGET_STEP = """DELETE FROM figure_steps WHERE router = :router AND seconds = :seconds
    AND begins_at > :begins_at - :seconds / 2 AND begins_at < :begins_at + :seconds / 2"""
"""A process continues the step of the one before, whose row begins at a slightly different time."""
_PUT_STEP = upsert("figure_steps", ("router", "begins_at"), "seconds", "step")
_STEPS = "SELECT * FROM figure_steps WHERE seconds = :seconds"
_SWEEP_STEPS = "DELETE FROM figure_steps WHERE begins_at < :first AND seconds = :seconds"
_APART_SECONDS = 0.001
"""Steps of different lengths may begin simultaneously, but their begin is their key, also of the release before."""


class RouterState:
    """State of the leading router across restarts and changes of the leader."""

    def __init__(
        self,
        database: RouterDatabase,
        writer: Writer,
        settings: RecordLimits,
        clock: Clock,
        *,
        memory: SchedulerMemory,
        clients: ClientRegistry,
        figures: FiguresRecorder,
    ) -> None:
        self._database = database
        self._writer = writer
        self._settings = settings
        self._clock = clock
        self._shares, self._turns = memory
        self._clients = clients
        self._figures = figures

    async def load(self) -> None:
        """Restores what the last leader wrote. Raises SERVICE_UNAVAILABLE."""
        accounts = await self._database.rows("SELECT * FROM fair_accounts")
        # The last seen one last; the newer one of two rows with the same client.
        clients = await self._database.rows(
            "SELECT * FROM known_clients ORDER BY last_seen_at DESC LIMIT :limit", limit=self._clients.max_clients
        )
        steps = [
            (recorder, await self._database.rows(_STEPS, seconds=recorder.limits.step_seconds))
            for recorder in self._figures.recorders
        ]
        self._restore_accounts(accounts)
        turns = await self._database.rows("SELECT * FROM further_turns")
        self._turns.restore({row.pool: (row.share, row.prompts) for row in turns})
        self._clients.restore(
            [
                KeptClient(row.tenant, ClientRecord.FromString(row.record), row.cooldown_seconds)
                for row in reversed(clients)
            ]
        )
        for recorder, rows in steps:
            recorder.restore({row.begins_at: FigureStep.FromString(row.step) for row in rows})

    async def save(self) -> None:
        """Writes the changes since the last call in one transaction. Raises SERVICE_UNAVAILABLE."""
        accounts, clients = self._shares.take_changed(), self._clients.take_changed()
        turns = self._turns.take_changed()
        unwritten = [(recorder, *recorder.unwritten()) for recorder in self._figures.recorders]
        if not (accounts or clients or turns or any(steps for _, steps, _ in unwritten)):
            return
        try:
            steps = [
                row for at, (each, steps, _) in enumerate(unwritten) for row in self._step_rows(at, each.limits, steps)
            ]
            rows = self._account_rows(accounts), [*map(self._client_row, clients)], steps, self._turn_rows(turns)
            await self._database.run(lambda tx: self._write(tx, *rows))
        except BaseException:
            self._shares.give_back(accounts)
            self._clients.give_back(clients)
            self._turns.give_back(turns)
            raise
        for recorder, _, upto in unwritten:
            recorder.note_written(upto)

    async def sweep(self) -> None:
        """Deletes outdated state, and clients beyond the maximum."""
        now = self._clock.utc_now().timestamp()
        values: dict[str, Any] = {
            "oldest": now - self._settings.keep_seconds,
            "most": self._clients.max_clients,
        }
        for limits in (recorder.limits for recorder in self._figures.recorders):
            first = now - limits.max_steps * limits.step_seconds
            await self._database.change(_SWEEP_STEPS, first=first, seconds=limits.step_seconds)
        for statement in (
            "DELETE FROM fair_accounts WHERE saved_at < :oldest",
            "DELETE FROM further_turns WHERE saved_at < :oldest",
            "DELETE FROM known_clients WHERE last_seen_at < :oldest",
            """DELETE FROM known_clients WHERE last_seen_at <=
            (SELECT last_seen_at FROM known_clients ORDER BY last_seen_at DESC LIMIT 1 OFFSET :most)""",
        ):
            await self._database.change(statement, **values)

    def _restore_accounts(self, rows: Sequence[Any]) -> None:
        if not rows:
            return
        # An unchanged account stays valid while its router runs, so the age counts from the last write of any.
        age = self._clock.utc_now().timestamp() - max(row.saved_at for row in rows)
        kept = [
            KeptAccount(tenant=row.tenant, tokens=row.tokens, mean_cost_tokens=row.mean_cost, is_active=row.is_active)
            for row in rows
        ]
        self._shares.restore(aged(kept, age, ACCOUNT_MEMORY_SECONDS))

    def _write(
        self,
        tx: Tx,
        accounts: Sequence[Values],
        clients: Sequence[Values],
        steps: Sequence[Values],
        turns: Sequence[Values],
    ) -> None:
        if accounts:
            # Accounts of an earlier process have another origin; the restored ones are written with the first change.
            earlier = "DELETE FROM fair_accounts WHERE incarnation <> :own"
            tx.execute(earlier, own=self._writer.incarnation)
        tx.many(_PUT_ACCOUNT, accounts)
        tx.many(_PUT_CLIENT, clients)
        tx.many(_PUT_TURNS, turns)
        tx.many(_FORGET_STEP, steps)
        tx.many(_PUT_STEP, steps)

    def _account_rows(self, accounts: Iterable[KeptAccount]) -> Sequence[Values]:
        now = self._clock.utc_now().timestamp()
        return [
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

    def _turn_rows(self, turns: Mapping[str, tuple[float, float]]) -> Sequence[Values]:
        now, router = self._clock.utc_now().timestamp(), self._writer.router
        return [
            {"router": router, "pool": pool, "share": share, "prompts": prompts, "saved_at": now}
            for pool, (share, prompts) in turns.items()
        ]

    def _client_row(self, kept: KeptClient) -> Values:
        return {
            "router": self._writer.router,
            "tenant": kept.tenant,
            "client_id": kept.record.client_id,
            "last_seen_at": kept.record.last_seen_time.ToNanoseconds() / 1e9,
            "cooldown_seconds": kept.cooldown_seconds,
            "record": kept.record.SerializeToString(),
        }

    def _step_rows(self, at: int, limits: FigureLimits, steps: Mapping[float, FigureStep]) -> Sequence[Values]:
        return [
            {
                "router": self._writer.router,
                "begins_at": begin + at * _APART_SECONDS,
                "seconds": limits.step_seconds,
                "step": step.SerializeToString(),
            }
            for begin, step in steps.items()
        ]
