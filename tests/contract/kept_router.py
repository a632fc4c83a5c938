"""A router's records on a database: what it remembers, the service that keeps it, kills and restarts."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kit.request_endings import ending
from kit.scheduling import NothingRuns

from router_svc.client_registry import ClientsConfig
from router_svc.durable.limits import RecordLimits
from router_svc.durable.records import RecordService
from router_svc.durable.request_records import Writer
from router_svc.loop import RouterRecords
from router_svc.policy.decisions import Placed
from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.further_turns import FurtherTurns
from router_svc.policy.queue.fair_share import FairShare
from router_svc.policy.router_request import Request
from router_svc.policy.scheduler import SchedulerMemory
from router_svc.request_log import RequestLogLimits
from router_svc.request_servicer import RequestServicer
from router_svc.store.database import RouterDatabase
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import request_service_pb2
from weft.dispatch.fleet import FleetView
from weft.durable.requests import RequestClient
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft_testing.fake_clock import FakeClock

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
ENDED = request_service_pb2.REQUEST_SELECTION_ENDED
CANDIDATE = Candidate(
    model="demo",
    pool="demo",
    runner="titan",
    incarnation="run-1",
    readiness=Readiness.READY,
    slots=4,
    operations=frozenset({Operation.CHAT}),
)


def a_receipt(request_id: str, *, tokens: int = 5, reason: Reason = Reason.UNSPECIFIED) -> receipt_pb2.Receipt:
    """Of an answer of `tokens` tokens, or of a failure."""
    outcome = receipt_pb2.OUTCOME_FAILED if reason else receipt_pb2.OUTCOME_COMPLETED
    receipt = receipt_pb2.Receipt(request_id=request_id, outcome=outcome, model="demo")
    receipt.reason = reason.value  # type: ignore[assignment]  # same numbers
    receipt.attempts.add(runner="titan", model="demo")
    receipt.usage.prompt_tokens, receipt.usage.completion_tokens = 3, tokens
    receipt.time_to_first_token.FromMilliseconds(200)
    receipt.total_time.FromMilliseconds(1_000)
    return receipt


RARELY = {"flush_interval_seconds": 1e9, "state_interval_seconds": 1e9, "sweep_interval_seconds": 1e9}
"""Tests write and sweep themselves."""


class KeptRouter:
    """One process of a router. `kill` leaves behind what it has written, and nothing else."""

    def __init__(
        self,
        url: str,
        name: str = "alpha",
        *,
        clock: FakeClock | None = None,
        log: RequestLogLimits | None = None,
        weight_of: Callable[[str], float] = lambda _tenant: 1.0,
        **settings: Any,
    ) -> None:
        self.url, self.name, self.log_limits, self.settings = url, name, log, settings
        self.clock = clock or FakeClock(utc=NOON)
        self.database = RouterDatabase(url)
        self.records = RouterRecords.empty(self.clock, clients=ClientsConfig(max_clients=8), request_log=log)
        self.shares = FairShare(weight_of, max_lag=1e9, max_remembered=100)
        self.further_turns = FurtherTurns()
        self.dropped: list[int] = []
        self.service = RecordService(
            self.database,
            Writer.of(name),
            self.records,
            SchedulerMemory(self.shares, self.further_turns),
            RecordLimits(**RARELY | settings),
            self.clock,
            self.dropped.append,
        )
        loop: Any = NothingRuns()
        servicer = RequestServicer(self.records.requests, self.records.clients, self.clock, loop)
        servicer.look_back_in(self.service.store)
        self.requests = RequestClient(servicer)
        self._keys = iter(range(1, 10**6))

    async def start(self) -> "KeptRouter":
        await self.service.start()
        return self

    async def kill(self) -> None:
        """Ends it as kill -9 does: nothing more is written."""
        for each in (self.service._sweeper, self.service._writer, self.service._state_writer):
            await each.stop()
        await self.database.close()

    async def restarted(self, *, after: float = 0.0, monotonic: float = 50.0) -> "KeptRouter":
        """Kills it and starts it again, on a machine whose monotonic clock may have begun anew."""
        await self.kill()
        clock = FakeClock(utc=self.clock.utc_now(), monotonic=monotonic)
        await clock.advance(after)
        again = KeptRouter(self.url, self.name, clock=clock, log=self.log_limits, **self.settings)
        return await again.start()

    def arrive(self, request_id: str, tenant: str = "ann", **fields: Any) -> int:
        """A request that a runner works on; returns its key."""
        key, request = next(self._keys), self.asked(request_id, tenant, **fields)
        log, now = self.records.requests, self.clock.monotonic()
        log.note_arrival(Request.of(key, request, now), self.clock.utc_now())
        self.records.clients.admit(key, request)
        log.note_decisions([Placed(key=key, candidate=CANDIDATE, attempt=1)], now)
        return key

    def end(self, key: int, request_id: str, tenant: str = "ann", reason: Reason = Reason.UNSPECIFIED) -> None:
        """Its end, with a receipt."""
        receipt, now = a_receipt(request_id, reason=reason), self.clock.monotonic()
        self.records.requests.note_end(ending(key, now, reason, receipt))
        self.records.clients.note_end(ending(key, receipt=receipt))
        self.records.figures.note_end(ending(self.asked(request_id, tenant), now, reason, receipt, view=VIEW))

    def chat(self, request_id: str, tenant: str = "ann", **fields: Any) -> None:
        """A request that completed."""
        self.end(self.arrive(request_id, tenant, **fields), request_id, tenant)

    @staticmethod
    def asked(request_id: str, tenant: str, **fields: Any) -> PlacementRequest:
        return PlacementRequest(request_id=request_id, tenant=tenant, model="demo", operation=Operation.CHAT, **fields)

    async def flush(self) -> None:
        """Writes what there is, as it does every few seconds."""
        await self.service.flush()
        await self.service.flush_state()

    async def ended_ids(self, **fields: Any) -> list[str]:
        """The ids of all ended requests, the last first."""
        found = await self.requests.requests(selection=ENDED, **fields)
        return [record.request_id for record in found.requests]


VIEW = FleetView(revision=1)
