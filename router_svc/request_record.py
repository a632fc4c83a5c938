"""An ended request in a router's memory, the port to those in its database, and the decisions of a record."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

import msgspec

from router_svc.policy.decisions import FailedAttempt, Loads, LoadStart, Noted, Placed, Rejects, Waits
from router_svc.policy.endpoints.choice import MAX_CONSIDERED, Considered
from weft.api.router.v1 import request_pb2 as pb
from weft.durable.requests import Selection
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft.kernel.timestamps import set_seconds
from weft.kernel.units import wait_words


class EndedRequest(msgspec.Struct, gc=False, kw_only=True):
    """A finished request. Times are monotonic seconds.

    Serialized, because thousands are stored: bytes take a third of the memory of messages and are not scanned by the
    garbage collector, whose pauses caused most of the tail latency (bench, "edge: a fixed rate").
    """

    key: int
    request_id: str
    tenant: str
    client_id: str
    model: str
    """See `PlacementRequest.model`."""
    priority: Priority
    arrived_at: float
    arrived_wall: datetime
    ended_at: float
    reason: Reason
    message: str
    decisions: bytes
    """A RequestRecord with only the decisions."""
    receipt: bytes | None = None
    """A Receipt; None: not reported."""
    cancelled_by: str = ""
    """Who cancelled it; empty: it was not cancelled."""
    asked_model: str = ""
    """The requested alias; empty: none."""
    number: int = 0
    """Sequence number of the end at a router, across its restarts."""
    quotes_content: bool = False
    """Whether the receipt may quote content (signals, warnings, engine log lines), which is not stored for a
    restart."""

    @property
    def ended_wall(self) -> datetime:
        """Its end by the clock of its arrival, in whole microseconds, as databases store no finer times."""
        return self.arrived_wall + timedelta(seconds=self.ended_at - self.arrived_at)

    @property
    def is_lost(self) -> bool:
        """Whether its router ended before its end was recorded."""
        return self.reason is Reason.ROUTER_LOST

    @property
    def was_left(self) -> bool:
        """Whether its dispatcher left this process without a report, which counts as a cancellation."""
        return self.key >= 0 and self.reason is Reason.CANCELLED and self.receipt is None and not self.cancelled_by

    @property
    def lacks_end(self) -> bool:
        """Whether its outcome is unknown: it was lost, or its dispatcher left."""
        return self.is_lost or self.was_left


class RequestHistory(Protocol):
    """Port to the requests in a router's database. Raises SERVICE_UNAVAILABLE."""

    async def find(self, request_id: str, tenant: str) -> "StoredRequest | None":
        """Return a tenant's newest request with this id; of any tenant if empty."""
        ...

    async def older(
        self, limit: int, tenant: str, selection: Selection, before_number: int
    ) -> tuple[Sequence[EndedRequest], int]:
        """Return ended requests before a number, last first, and their total number."""
        ...


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request in the database."""

    is_under_way: bool
    """Whether its end is not recorded."""
    ended: EndedRequest
    """Without an end if it is under way."""


def add_decisions(record: pb.RequestRecord, decisions: Sequence[tuple[float, Noted]], arrived_at: float) -> None:
    """Add decisions with their times, relative to `arrived_at` on the same clock."""
    last_placed = max((place for place, (_, noted) in enumerate(decisions) if isinstance(noted, Placed)), default=-1)
    for place, (at, noted) in enumerate(decisions):
        _fill_decision(record.decisions.add(), noted, at - arrived_at, is_retried=place < last_placed)


def _fill_decision(record: pb.DecisionRecord, noted: Noted, age_seconds: float, *, is_retried: bool) -> None:
    set_seconds(record.age, age_seconds)
    match noted:
        case Waits():
            record.kind = pb.DecisionRecord.KIND_QUEUED
            record.detail = f"{noted.reason} (position {noted.position}{_eta(noted.eta_seconds)})"
            _fill_candidates(record, noted.considered, len(noted.considered))
        case Loads():
            record.kind = pb.DecisionRecord.KIND_LOADING
            record.detail = f"{noted.stage}{_eta(noted.eta_seconds)}"
        case LoadStart():
            record.kind = pb.DecisionRecord.KIND_LOAD_STARTED
            wakes = noted.wakes
            where = f" on {wakes.runner}" if wakes.runner else ""
            record.detail = f"{wakes.model}{where} is loaded{f': {wakes.why}' if wakes.why else ''}"
        case Placed():
            record.kind = pb.DecisionRecord.KIND_PLACED
            record.detail = f"attempt {noted.attempt} sent to {noted.candidate.model} on {noted.candidate.runner}"
            if noted.choice is not None:
                record.policy = noted.choice.policy
                _fill_candidates(record, noted.choice.considered, noted.choice.count)
        case FailedAttempt():
            record.kind = pb.DecisionRecord.KIND_RETRIED if is_retried else pb.DecisionRecord.KIND_FAILED
            when = "after its answer had begun and is not retried" if noted.has_content else "before any content"
            words = f": {noted.message}" if noted.message else ""
            record.detail = f"attempt {noted.attempt} failed {when}: {_reason_name(noted.reason)}{words}"
        case Rejects():
            record.kind = pb.DecisionRecord.KIND_REJECTED
            record.detail = f"{_reason_name(noted.reason)}: {noted.message}"


def _fill_candidates(record: pb.DecisionRecord, considered: tuple[Considered, ...], count: int) -> None:
    record.candidate_count = count
    for candidate in considered[:MAX_CONSIDERED]:
        record.candidates.add(
            model=candidate.model,
            runner=candidate.runner,
            score=candidate.score,
            gate=candidate.gate,
            chosen=candidate.chosen,
            engine_load=candidate.engine_load,
        )


def _eta(seconds: float | None) -> str:
    return "" if seconds is None else f", about {wait_words(seconds)} s"


def _reason_name(reason: Reason) -> str:
    return reason.name.lower()
