"""Usage by hour in the router's database: live requests in batches, tasks in the transaction of their end."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from typing_extensions import override

from router_svc.durable.limits import UsageLimits
from router_svc.durable.store_service import Rpcs, StoreService
from router_svc.policy.usage_rows import HourRows, UsageKey
from router_svc.store.database import RouterDatabase
from router_svc.usage import COLUMNS, HOUR_SECONDS, NOTHING, UsageRecorder, UsageSums, add_usage, hour_of
from weft.api.router.v1 import usage_pb2, usage_service_pb2, usage_service_pb2_grpc
from weft.api.router.v1 import usage_service_pb2 as pb
from weft.api.router.v1.usage_pb2 import UsageGroup
from weft.durable.usage import DEFAULT_ROWS, MAX_ROWS, UsageClient
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock, SystemClock
from weft.kernel.time.timestamps import stamp_of
from weft.kernel.values.names import MAX_NAME_CHARS, MAX_TENANT_CHARS, require_token
from weft.sql.connections import Row, Tx
from weft.sql.statements import insert
from weft.sql.sweeper import Sweeper

log = get_logger("weft.router")

FOLDED_AT_ONCE = 1_000
"""Maximum task entries that a transaction adds to their hours."""
MAX_KNOWN_HOURS = 4
"""Maximum hours with rows in memory; those of others are read before they are written."""
_MAX_HOUR = 10**8
"""Above every existing hour."""

Context = grpc.aio.ServicerContext[Any, Any]

_NAMES = ("tenant", "key", "model", "asked", "program", "agent", "purpose")
_KEY = ("hour", *_NAMES)
_TAKE_ENTRIES = f"""DELETE FROM usage_entries WHERE seq IN
    (SELECT seq FROM usage_entries ORDER BY seq LIMIT {FOLDED_AT_ONCE}) RETURNING *"""
_ADD = f"""{insert("usage_hours", *_KEY, *COLUMNS)} ON CONFLICT ({", ".join(_KEY)}) DO UPDATE SET
    {", ".join(f"{each} = usage_hours.{each} + excluded.{each}" for each in COLUMNS)}"""
_GROUPED: Mapping[int, tuple[str, str]] = {
    UsageGroup.USAGE_GROUP_HOUR: ("hour", "first_hour"),
    UsageGroup.USAGE_GROUP_DAY: ("hour - hour % 24", "first_hour"),
    UsageGroup.USAGE_GROUP_TENANT: ("tenant", "tenant"),
    UsageGroup.USAGE_GROUP_KEY: ("key", "key"),
    UsageGroup.USAGE_GROUP_MODEL: ("model", "model"),
    UsageGroup.USAGE_GROUP_ASKED: ("asked", "asked"),
    UsageGroup.USAGE_GROUP_PROGRAM: ("program", "program"),
    UsageGroup.USAGE_GROUP_AGENT: ("agent", "agent"),
    UsageGroup.USAGE_GROUP_PURPOSE: ("purpose", "purpose"),
}
"""Expression and name of each group, in the order of rows."""
_SUMS = ", ".join(f"CAST(sum({each}) AS BIGINT) AS {each}" for each in COLUMNS)


ObserveUsage = Callable[[Mapping[UsageKey, UsageSums]], None]
"""Called with the usage added to the database, after the commit."""


def ignore_usage(_added: Mapping[UsageKey, UsageSums]) -> None:
    """ObserveUsage of a router without metrics."""


class UsageServicer(AnsweringServicer, usage_service_pb2_grpc.UsageServiceServicer):
    """UsageService over a router's database, including usage of earlier leaders."""

    def __init__(
        self,
        database: RouterDatabase,
        recorder: UsageRecorder,
        settings: UsageLimits,
        clock: Clock,
        observe: ObserveUsage,
    ) -> None:
        self._database = database
        self._recorder = recorder
        self._settings = settings
        self._clock = clock
        self._observe = observe
        self._lock = asyncio.Lock()
        self._seen_writes = -1
        """The database's `write_count` when it last had no entries; only the leading router adds any."""
        self._rows: dict[int, HourRows] = {}

    async def flush(self) -> None:
        """Writes counted usage, and adds entries of ended tasks to their hours. Raises SERVICE_UNAVAILABLE."""
        # It continues if the caller is cancelled: usage that was given back after a commit would count twice.
        await asyncio.shield(asyncio.create_task(self._flush(), name="usage-flush"))

    async def _flush(self) -> None:
        async with self._lock:
            while await self._write_some() == FOLDED_AT_ONCE:
                pass

    async def sweep(self) -> None:
        """Deletes the hours past `keep_seconds`."""
        oldest = hour_of(self._clock.utc_now().timestamp() - self._settings.keep_seconds)
        await self._database.change("DELETE FROM usage_hours WHERE hour < :oldest", oldest=oldest)

    @override
    async def ListUsage(self, request: pb.ListUsageRequest, context: Context) -> pb.ListUsageResponse:
        wanted = _checked(request)
        await self.flush()
        first, end = _hours_of(wanted)
        limit = min(wanted.limit or DEFAULT_ROWS, MAX_ROWS)
        values: dict[str, Any] = {"first": first, "end": end, "tenant": wanted.tenant, "model": wanted.model}
        rows, total = await self._database.read(
            lambda tx: (
                tx.rows(_grouped(wanted), **values, limit=limit + 1),
                tx.rows(f"SELECT {_SUMS} FROM usage_hours WHERE {_where(wanted)}", **values)[0],
            )
        )
        return pb.ListUsageResponse(
            rows=[_row_of(row) for row in rows[:limit]],
            total=_counts_of(total),
            since=stamp_of(first * HOUR_SECONDS) if first else None,
            until=stamp_of(self._clock.utc_now() if end == _MAX_HOUR else end * HOUR_SECONDS),
            has_more=len(rows) > limit,
        )

    async def _write_some(self) -> int:
        """Writes one transaction; returns the number of processed task entries."""
        if not self._recorder.is_empty or await self._has_entries():
            taken = self._recorder.take()
            try:
                count, added = await self._database.run(lambda tx: self._fold(tx, taken))
            except BaseException:
                self._recorder.give_back(taken)
                # Rows that were not written do not exist.
                self._rows.clear()
                raise
            self._observe(added)
            return count
        return 0

    async def _has_entries(self) -> bool:
        writes = self._database.write_count
        if writes == self._seen_writes:
            return False
        if await self._database.row("SELECT seq FROM usage_entries LIMIT 1") is not None:
            return True
        self._seen_writes = writes
        return False

    def _fold(self, tx: Tx, counted: Mapping[UsageKey, UsageSums]) -> tuple[int, Mapping[UsageKey, UsageSums]]:
        """Adds counted usage and the oldest entries to their hours; returns the number of entries and the sums."""
        entries = tx.rows(_TAKE_ENTRIES)
        sums: defaultdict[UsageKey, UsageSums] = defaultdict(dict)
        for key, one in [*counted.items(), *map(_entry_of, entries)]:
            add_usage(sums[self._rows_of(tx, key).row_of(key)], one)
        tx.many(_ADD, [{**key._asdict(), **NOTHING, **sums[key]} for key in sorted(sums)])
        return len(entries), sums

    def _rows_of(self, tx: Tx, key: UsageKey) -> HourRows:
        known = self._rows.get(key.hour)
        if known is None:
            existing = tx.rows(f"SELECT {', '.join(_KEY)} FROM usage_hours WHERE hour = :hour", hour=key.hour)
            known = HourRows(self._settings.max_rows_per_hour, (UsageKey(*row) for row in existing))
            if len(self._rows) >= MAX_KNOWN_HOURS:
                del self._rows[min(self._rows)]
            self._rows[key.hour] = known
        return known


def _hours_of(wanted: pb.ListUsageRequest) -> tuple[int, int]:
    """Returns the first hour, and the hour after the last."""
    first = max(0, wanted.since.seconds // HOUR_SECONDS) if wanted.HasField("since") else 0
    if not wanted.HasField("until"):
        return first, _MAX_HOUR
    until = wanted.until.seconds + (1 if wanted.until.nanos else 0)
    return first, min(_MAX_HOUR, -(-until // HOUR_SECONDS))


def _checked(request: pb.ListUsageRequest) -> pb.ListUsageRequest:
    """Returns the usage that the caller may read. Raises INVALID_ARGUMENT naming the field."""
    wanted = pb.ListUsageRequest()
    wanted.CopyFrom(request)
    if wanted.limit < 0:
        raise invalid_field("limit", "must not be negative")
    if len(set(wanted.by)) < len(wanted.by) or any(group not in _GROUPED for group in wanted.by):
        raise invalid_field("by", "must be groups, each once")
    if wanted.tenant:
        require_token(wanted.tenant, "tenant", MAX_TENANT_CHARS)
    if wanted.model:
        require_token(wanted.model, "model", MAX_NAME_CHARS)
    known = caller()
    if not known.names_tenants:
        wanted.tenant = known.tenant_for(wanted.tenant, "tenant")
    return wanted


def _where(wanted: pb.ListUsageRequest) -> str:
    tenant, model = " AND tenant = :tenant" if wanted.tenant else "", " AND model = :model" if wanted.model else ""
    return f"hour >= :first AND hour < :end{tenant}{model}"


def _grouped(wanted: pb.ListUsageRequest) -> str:
    groups = [names for group, names in _GROUPED.items() if group in wanted.by]
    columns = "".join(f"{expression} AS {name}, " for expression, name in groups)
    by = ", ".join(expression for expression, _ in groups)
    ending = f"GROUP BY {by} ORDER BY {by}" if by else "HAVING count(*) > 0"
    return f"SELECT {columns}{_SUMS} FROM usage_hours WHERE {_where(wanted)} {ending} LIMIT :limit"


def _row_of(row: Row) -> usage_pb2.UsageRow:
    names = {name: getattr(row, name) for name in _NAMES if hasattr(row, name)}
    start = stamp_of(row.first_hour * HOUR_SECONDS) if hasattr(row, "first_hour") else None
    return usage_pb2.UsageRow(start_time=start, counts=_counts_of(row), **names)


def _counts_of(row: Row) -> usage_pb2.UsageCounts:
    values: dict[str, Any] = {name: getattr(row, name) or 0 for name in COLUMNS}
    nanoseconds, millijoules = values.pop("gpu_nanoseconds"), values.pop("energy_millijoules")
    nanodollars = values.pop("price_nanodollars")
    counts = usage_pb2.UsageCounts(**values)
    if counts.measured_energy_count:
        counts.energy_millijoules = millijoules
    if counts.priced_count:
        counts.price_nanodollars = nanodollars
    if nanoseconds or not counts.unknown_gpu_count:
        counts.gpu_time.FromNanoseconds(nanoseconds)
    return counts


def _entry_of(row: Row) -> tuple[UsageKey, UsageSums]:
    return UsageKey(*(getattr(row, each) for each in _KEY)), {name: getattr(row, name) for name in COLUMNS}


class UsageService(StoreService):
    """Writes and serves a router's usage. Starts before the router and stops after it, to count the last requests."""

    def __init__(
        self,
        database: RouterDatabase,
        recorder: UsageRecorder,
        settings: UsageLimits,
        *,
        clock: Clock | None = None,
        observe: ObserveUsage = ignore_usage,
    ) -> None:
        clock = clock or SystemClock()
        self._recorder = recorder
        self._settings = settings
        self.servicer = UsageServicer(database, recorder, settings, clock, observe)
        self.store = UsageClient(self.servicer)
        """Client of the service in this process."""
        self._writer = Sweeper("usage-writer", {"usage": self.servicer.flush}, settings.flush_interval_seconds, clock)
        super().__init__(
            database,
            Sweeper("usage-sweeper", {"usage": self.servicer.sweep}, settings.sweep_interval_seconds, clock),
            Rpcs(
                usage_service_pb2.DESCRIPTOR.services_by_name["UsageService"].full_name,
                usage_service_pb2_grpc.add_UsageServiceServicer_to_server,
                self.servicer,
            ),
        )

    @override
    async def begin(self) -> None:
        self._recorder.keep(self._settings.max_rows_per_hour)
        self._writer.start()

    @override
    async def end(self, grace_seconds: float) -> None:
        await self._writer.stop()
        try:
            await self.servicer.flush()
        except WeftError as error:
            log.error("usage not written", reason=error.reason.name)  # noqa: TRY400 - the cause is logged
