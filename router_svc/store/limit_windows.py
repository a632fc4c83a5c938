"""The ledgers of limits in PostgreSQL: a slice of a window is leased, and what was spent is counted, by one UPDATE.

Each statement is a transaction of its own: no row stays locked while a router is thinking, or is stopped. Times are the
database's, of the statement's arrival: it cannot be before the router sent it, so that a lease ends there no sooner
than the router stops spending it.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from string import Template
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from router_svc.limit_leases import LeasedUse, LeaseStore, NewWindow, RouterContact
from router_svc.policy.leased_window import REPORTED_STEPS, Answer, Report, routers_share
from router_svc.store.database import RouterDatabase
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_CHANGED = 10_000
"""Changed windows that one contact reads."""
MAX_USES = 10_000
"""Windows that one read of uses returns."""
KEPT_SECONDS = 3600.0
"""How long a window is kept after everything has left it."""


def _sql(statement: str) -> TextClause:
    """Returns a statement with our own constants in their places."""
    return text(Template(statement).substitute(_CONSTANTS))


_CONSTANTS = {
    "NOW": "CAST(extract(epoch FROM statement_timestamp()) AS double precision)",
    "STEPS": str(REPORTED_STEPS),
    "MAX_CHANGED": str(MAX_CHANGED),
    "MAX_USES": str(MAX_USES),
    "KEPT": str(KEPT_SECONDS),
}
_EXCHANGE = _sql("""
WITH asked AS (
    SELECT * FROM json_to_recordset(CAST(:reports AS json)) AS a(
        id text, number bigint, most bigint, spent json, keep bigint, need bigint, least bigint, want bigint,
        hold double precision)
), clock AS (
    SELECT $NOW AS now
), mesh AS (
    SELECT greatest(1, count(*)) AS routers,
           count(*) FILTER (WHERE name <> :router AND contact_at <= now - CAST(:silence AS double precision)) AS silent
    FROM limit_routers CROSS JOIN clock
), locked AS (
    SELECT w.id FROM limit_windows w JOIN asked USING (id) ORDER BY w.id FOR UPDATE OF w
)
UPDATE limit_windows AS w SET (most, counted, leases, total, changed_at) = (
    SELECT a.most, counted.list,
           CAST(others.list AS jsonb) || jsonb_build_array(jsonb_build_array(
               CAST(:holder AS text), lease.amount, lease.until, lease.number)),
           counted.total + others.total + lease.amount, t.now
    FROM (
        SELECT own.*, own.number IS NULL OR own.number < a.number AS is_new
        FROM (SELECT 1) AS one LEFT JOIN (
            SELECT CAST(e ->> 1 AS bigint) AS amount, CAST(e ->> 2 AS double precision) AS until,
                   CAST(e ->> 3 AS bigint) AS number
            FROM json_array_elements(w.leases) AS e
            WHERE e ->> 0 = :holder AND CAST(e ->> 2 AS double precision) + w.seconds > t.now
        ) AS own ON true
    ) AS own
    CROSS JOIN LATERAL (
        SELECT coalesce(json_agg(json_build_array(leaves, amount) ORDER BY leaves), '[]') AS list,
               coalesce(sum(amount), 0) AS total
        FROM (
            SELECT max(leaves) AS leaves, sum(amount) AS amount
            FROM (
                SELECT CAST(e ->> 0 AS double precision) AS leaves, CAST(e ->> 1 AS bigint) AS amount
                FROM json_array_elements(w.counted) AS e
                UNION ALL
                SELECT t.now - CAST(e ->> 0 AS double precision) + w.seconds, CAST(e ->> 1 AS bigint)
                FROM json_array_elements(a.spent) AS e WHERE own.is_new
            ) AS each_of WHERE leaves > t.now
            GROUP BY floor(leaves / (w.seconds / $STEPS.0)) HAVING sum(amount) <> 0
        ) AS steps
    ) AS counted
    CROSS JOIN LATERAL (
        SELECT coalesce(json_agg(e), '[]') AS list, coalesce(sum(CAST(e ->> 1 AS bigint)), 0) AS total
        FROM json_array_elements(w.leases) AS e
        WHERE e ->> 0 <> :holder AND CAST(e ->> 2 AS double precision) + w.seconds > t.now
    ) AS others
    CROSS JOIN LATERAL (
        SELECT a.most - (m.silent * (a.most / m.routers) + least(m.silent, a.most % m.routers))
               - counted.total - others.total - a.keep AS room
    ) AS ledger
    CROSS JOIN LATERAL (
        SELECT CASE WHEN own.is_new THEN a.keep + CASE
                   WHEN room >= a.need THEN
                       least(room, greatest(a.need, least(a.want, a.need + ceil((room - a.need) / m.routers))))
                   WHEN 0 < a.least AND a.least <= room THEN room ELSE 0 END
               ELSE own.amount END AS amount,
               CASE WHEN own.is_new THEN t.now + a.hold ELSE own.until END AS until,
               CASE WHEN own.is_new THEN a.number ELSE own.number END AS number
    ) AS lease
)
FROM asked AS a JOIN locked USING (id), clock AS t, mesh AS m
WHERE w.id = a.id
RETURNING w.id, w.counted, w.leases, t.now, m.silent, m.routers, w.most
""")
_CREATE = _sql("""
INSERT INTO limit_windows (id, tenant, key, model, client, unit, seconds, most, total, changed_at, counted, leases)
SELECT n.*, 0, 0, $NOW, '[]', '[]' FROM json_to_recordset(CAST(:windows AS json)) AS n(
    id text, tenant text, key text, model text, client text, unit smallint, seconds integer)
ORDER BY id ON CONFLICT (id) DO NOTHING
""")
_CONTACT = _sql("""
INSERT INTO limit_routers (name, contact_at) VALUES (:router, $NOW)
ON CONFLICT (name) DO UPDATE SET contact_at = excluded.contact_at
""")
_ROUTERS = _sql("SELECT name, $NOW - contact_at AS age, $NOW AS now FROM limit_routers")
_GONE = _sql("""
DELETE FROM limit_routers WHERE name = ANY(:names) AND contact_at < $NOW - CAST(:silence AS double precision)
""")
_LEAVE = _sql("DELETE FROM limit_routers WHERE name = :router")
_CHANGED = _sql("""
SELECT id, total, $NOW - changed_at AS age FROM limit_windows
WHERE changed_at > CAST(:since AS double precision) ORDER BY changed_at DESC LIMIT $MAX_CHANGED
""")
_FORGET = _sql("DELETE FROM limit_windows WHERE changed_at < $NOW - seconds - $KEPT")
_USES = _sql("""
SELECT tenant, key, model, client, unit, seconds, most, counted, leases, $NOW AS now FROM limit_windows
WHERE (:tenant = '' OR tenant = :tenant) AND changed_at > $NOW - seconds - $KEPT
ORDER BY tenant, key, model, client, seconds, unit LIMIT $MAX_USES
""")
_SERVED = _sql("""
INSERT INTO tenant_service (router, tenant, tokens, changed_at)
SELECT :holder, s.tenant, s.tokens, $NOW FROM json_to_recordset(CAST(:served AS json)) AS s(
    tenant text, tokens double precision)
ON CONFLICT (router, tenant) DO UPDATE SET tokens = excluded.tokens, changed_at = excluded.changed_at
""")
_SERVED_BY_OTHERS = _sql("""
SELECT router, tenant, tokens, changed_at FROM tenant_service
WHERE router <> :holder AND changed_at > CAST(:since AS double precision) ORDER BY changed_at
""")
_FORGET_SERVED = _sql("DELETE FROM tenant_service WHERE changed_at < $NOW - $KEPT")


@dataclass(slots=True)
class _Link:
    connection: AsyncConnection
    closing: AsyncExitStack


class SqlLeaseStore(LeaseStore):
    """A LeaseStore over a connection of its own: one that waits for the pool of tasks would make requests wait."""

    def __init__(self, database: RouterDatabase, router: str, life: str, *, silence_seconds: float) -> None:
        """`life`: of this process; what an earlier one of the same name held is not this one's."""
        self._database = database
        self._router = router
        self._holder = f"{router}/{life}"
        self._silence = silence_seconds
        self._link: _Link | None = None
        self._turn = asyncio.Lock()
        """One statement at a time."""
        self._read_until = 0.0
        self._served_until = 0.0

    @override
    async def open(self) -> None:
        await self._database.open()

    @override
    async def close(self) -> None:
        await self._drop()
        await self._database.close()

    @override
    async def exchange(self, reports: Mapping[str, Report]) -> Mapping[str, Answer]:
        asked = [{"id": window, **_columns(report)} for window, report in sorted(reports.items())]
        rows = await self._run(
            _EXCHANGE, reports=json.dumps(asked), holder=self._holder, router=self._router, silence=self._silence
        )
        return {row.id: self._answer(row) for row in rows}

    @override
    async def create(self, windows: Sequence[NewWindow]) -> None:
        await self._run(_CREATE, windows=json.dumps([each.columns() for each in windows]))

    @override
    async def contact(self, gone: Sequence[str]) -> RouterContact:
        await self._run(_CONTACT, router=self._router)
        if gone:
            await self._run(_GONE, names=list(gone), silence=self._silence)
        routers = await self._run(_ROUTERS)
        # A transaction may become visible after one that began later.
        changed = await self._run(_CHANGED, since=self._read_until)
        now = max((row.now for row in routers), default=0.0)
        self._read_until = now - self._silence
        return RouterContact(
            ages={row.name: row.age for row in routers}, totals={row.id: (row.total, row.age) for row in changed}
        )

    @override
    async def forget(self) -> None:
        await self._run(_FORGET)
        await self._run(_FORGET_SERVED)

    @override
    async def leave(self) -> None:
        await self._run(_LEAVE, router=self._router)

    @override
    async def uses(self, tenant: str) -> Sequence[LeasedUse]:
        # Over another connection: it may read much, and no request should wait for it.
        return [_use_of(row) for row in await self._database.rows(_USES, tenant=tenant)]

    @override
    async def publish(self, served: Mapping[str, float]) -> Mapping[tuple[str, str], float]:
        if served:
            rows = [{"tenant": tenant, "tokens": tokens} for tenant, tokens in sorted(served.items())]
            await self._run(_SERVED, holder=self._holder, served=json.dumps(rows))
        found = await self._run(_SERVED_BY_OTHERS, holder=self._holder, since=self._served_until)
        self._served_until = max([self._served_until, *(row.changed_at - self._silence for row in found)])
        return {(row.router, row.tenant): row.tokens for row in found}

    def _answer(self, row: Any) -> Answer:
        own = next(each for each in row.leases if each[0] == self._holder)
        silent, routers = row.silent, row.routers
        return Answer(
            number=own[3],
            lease=int(own[1]),
            lease_seconds=own[2] - row.now,
            counted=tuple((leaves - row.now, int(amount)) for leaves, amount in row.counted),
            others=tuple((each[2] - row.now, int(each[1])) for each in row.leases if each[0] != self._holder),
            reserved=routers_share(row.most, silent, routers),
        )

    async def _run(self, statement: Any, **values: object) -> Sequence[Any]:
        """Runs one statement, and commits it. Raises SERVICE_UNAVAILABLE; the next one then connects again."""
        async with self._turn:
            try:
                link = self._link or await self._connected()
                result = await link.connection.execute(statement, values)
                return result.all() if result.returns_rows else ()
            except BaseException as error:
                await self._drop()
                if isinstance(error, (SQLAlchemyError, OSError)):
                    message = f"the database failed: {type(error).__name__}"
                    raise WeftError(Reason.SERVICE_UNAVAILABLE, message) from error
                raise

    async def _connected(self) -> _Link:
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(self._database.dedicated())
            connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
            self._link = _Link(connection, stack.pop_all())
        return self._link

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        try:
            await link.connection.invalidate()
            await link.closing.aclose()
        except Exception:  # noqa: BLE001 - a broken connection need not be closed properly
            return


def _columns(report: Report) -> dict[str, object]:
    return {
        "number": report.number,
        "most": report.most,
        "spent": [list(each) for each in report.spent],
        "keep": report.keep,
        "need": report.need,
        "least": report.least,
        "want": report.want,
        "hold": report.hold_seconds,
    }


def _use_of(row: Any) -> LeasedUse:
    held: dict[str, int] = {}
    for holder, amount, until, _ in row.leases:
        if until > row.now and amount:
            # Of a router that was started again, its former life may still hold something.
            router = holder.rpartition("/")[0]
            held[router] = held.get(router, 0) + int(amount)
    counted = [(leaves - row.now, int(amount)) for leaves, amount in row.counted if leaves > row.now]
    return LeasedUse(
        tenant=row.tenant,
        key=row.key,
        model=row.model,
        client=row.client,
        unit=row.unit,
        seconds=row.seconds,
        most=row.most,
        used=sum(amount for _, amount in counted),
        reset_seconds=max((leaves for leaves, _ in counted), default=0.0),
        held=held,
    )
