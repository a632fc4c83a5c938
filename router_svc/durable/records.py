"""The service that stores a router's state for a restart: restores it at the start, and writes it continuously."""

from collections.abc import Callable

from typing_extensions import override

from router_svc.durable.limits import RecordLimits
from router_svc.durable.request_records import ROWS_AT_ONCE, RequestStore, Writer
from router_svc.durable.router_state import RouterState
from router_svc.loop import RouterRecords
from router_svc.policy.scheduler import SchedulerMemory
from router_svc.request_log import RequestLog
from router_svc.store.database import RouterDatabase
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.sql.sweeper import Sweeper, Sweeps

log = get_logger("weft.router")

RETURN_SECONDS = 30.0
"""Time after a start in which tenants with requests that waited at the last end keep their claim: gateways place such
requests again within `ReconnectConfig.router_outage_limit_seconds`."""

ObserveDropped = Callable[[int], None]
"""Called with the number of dropped records."""


def ignore_dropped(_count: int) -> None:
    """ObserveDropped of a router without metrics."""


class RecordService(Service):
    """Stores requests, clients, accounts and figures of a router.

    Started before the router and stopped after it, so that the last requests are written.
    """

    def __init__(
        self,
        database: RouterDatabase,
        writer: Writer,
        records: RouterRecords,
        memory: SchedulerMemory,
        settings: RecordLimits,
        clock: Clock,
        observe: ObserveDropped = ignore_dropped,
    ) -> None:
        self._database = database
        self._records = records
        self._shares = memory.shares
        self._settings = settings
        self._clock = clock
        self._observe = observe
        self.store = RequestStore(database, writer, settings, clock)
        """The stored requests, for readers in this process."""
        self._state = RouterState(
            database,
            writer,
            settings,
            clock,
            memory=memory,
            clients=records.clients,
            figures=records.figures,
        )
        self._started_at = clock.monotonic()
        self._reported_dropped = 0
        self._sweeps: Sweeps = {"request records": self.store.sweep, "router state": self._state.sweep}
        self._sweeper = Sweeper("record-sweeper", self._sweeps, settings.sweep_interval_seconds, clock)
        self._writer = Sweeper("record-writer", {"request records": self.flush}, settings.flush_interval_seconds, clock)
        self._state_writer = Sweeper(
            "state-writer", {"router state": self.flush_state}, settings.state_interval_seconds, clock
        )

    @override
    async def start(self) -> None:
        """Restores what the last leader wrote, and starts writing. Raises SERVICE_UNAVAILABLE."""
        await self._database.open()
        lost = await self.store.mark_lost()
        requests = self._records.requests
        requests.number_from(await self.store.next_number())
        await self._state.load()
        if lost:
            log.info("requests were lost", count=lost)
        requests.unwritten.keep(self._settings.max_unwritten)
        self._started_at = self._clock.monotonic()
        self._sweeper.start(immediately=True)
        self._writer.start()
        self._state_writer.start()

    async def flush(self) -> None:
        """Writes the requests that arrived or ended since the last call. Raises SERVICE_UNAVAILABLE."""
        requests = self._records.requests
        try:
            while not (batch := requests.unwritten.take(ROWS_AT_ONCE)).is_empty:
                try:
                    await self.store.write(batch)
                except BaseException:
                    requests.unwritten.give_back(batch, requests.is_under_way)
                    raise
        finally:
            self._tell_dropped(requests)

    async def flush_state(self) -> None:
        """Writes changed accounts, clients and figures. Raises SERVICE_UNAVAILABLE."""
        if self._clock.monotonic() - self._started_at >= RETURN_SECONDS:
            self._shares.end_return()
        await self._state.save()

    def _tell_dropped(self, requests: RequestLog) -> None:
        dropped, self._reported_dropped = (
            requests.unwritten.dropped_count - self._reported_dropped,
            requests.unwritten.dropped_count,
        )
        if dropped:
            self._observe(dropped)
            log.warning(
                "request records dropped: too many waited to be written",
                count=dropped,
                max_unwritten=self._settings.max_unwritten,
            )

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Writes everything pending, and stops."""
        if not self._sweeper.is_started:
            return
        for each in (self._sweeper, self._writer, self._state_writer):
            await each.stop()
        try:
            await self.flush()
            await self._state.save()
            await self.store.leave()
        except WeftError as error:
            log.error("records not written", reason=error.reason.name)  # noqa: TRY400 - the cause is logged
        await self._database.close()
