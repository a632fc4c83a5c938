"""Ended requests in a router's memory, the port to those in its database, and the parts of a record."""

import asyncio
import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

import msgspec

from router_svc.policy.decisions import FailedAttempt, Loads, LoadStart, Noted, Pauses, Placed, Rejects, Waits
from router_svc.policy.endpoints.choice import MAX_CONSIDERED, Considered
from router_svc.policy.router_request import Request
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import request_pb2 as pb
from weft.api.router.v1 import task_pb2
from weft.durable.requests import Selection
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import AGENT_LABELS, PlacementRequest
from weft.kernel.time.timestamps import seconds_of, set_seconds, stamp_of
from weft.kernel.values.units import wait_words


class EndedRequest(msgspec.Struct, gc=False, kw_only=True):
    """A finished request: what is compared, and its record. Times are UTC seconds since the epoch.

    Serialized, because thousands are stored: bytes take a third of the memory of messages and are not scanned by the
    garbage collector, whose pauses caused most of the tail latency (bench, "edge: a fixed rate").
    """

    key: int
    number: int
    """Sequence number of the end at a router, across its restarts."""
    request_id: str
    tenant: str
    arrived_at: float
    ended_at: float
    reason: Reason
    record: bytes
    """A RequestRecord."""
    forget_at: float
    """When memory forgets it, in seconds on this router's clock."""
    quotes_content: bool = False
    """Whether the receipt may quote content (signals, warnings, engine log lines), which is not stored for a
    restart."""

    def read(self) -> pb.RequestRecord:
        """Return its record."""
        return pb.RequestRecord.FromString(self.record)


def begun_record(spec: PlacementRequest, arrived_wall: datetime) -> pb.RequestRecord:
    """Return the record of a request that arrived, without a state. `arrived_wall`: UTC."""
    record = pb.RequestRecord(
        request_id=spec.request_id,
        tenant=spec.tenant,
        client_id=spec.client_id,
        target=spec.model,
        asked_model=spec.asked_model,
        priority=spec.priority.wire,  # type: ignore[arg-type]  # same numbers
    )
    # As an argument it takes twice as long.
    record.arrive_time.CopyFrom(stamp_of(arrived_wall))
    for label in spec.labels:
        name, _, value = label.partition("=")
        if name in AGENT_LABELS:
            record.labels[name] = value
    return record


def mark_lost(record: pb.RequestRecord, end: datetime, message: str) -> None:
    """End the record of a request that its router did not end. `end`: UTC."""
    record.state = pb.RequestRecord.STATE_ENDED
    record.reason = Reason.ROUTER_LOST.value  # type: ignore[assignment]  # same numbers
    record.message = message
    record.end_time.CopyFrom(stamp_of(end))


def is_lost(record: pb.RequestRecord) -> bool:
    """Whether the router of a request ended before its end was recorded."""
    return record.reason == Reason.ROUTER_LOST.value


def was_left(record: pb.RequestRecord) -> bool:
    """Whether the dispatcher of a request left without a report, which counts as a cancellation."""
    return record.reason == Reason.CANCELLED.value and not record.HasField("receipt") and not record.cancelled_by


@dataclass(slots=True, eq=False, kw_only=True)
class RecordedTask:
    """A task that has not ended, over all its placements, with the fields of a `Request` that records show."""

    key: int
    spec: PlacementRequest
    arrived_at: float
    """When it was submitted, in seconds on this router's clock."""
    arrived_wall: datetime
    attempts: list[receipt_pb2.Attempt] = field(default_factory=list)
    """Those of ended placements."""
    past: list[tuple[float, Noted]] = field(default_factory=list)
    """The decisions of ended placements."""
    placement: Request | None = None
    """None: it waits for its next attempt."""
    retry: task_pb2.TaskRetry | None = None
    """Why its last attempt failed, until the next one starts; None: none failed."""
    cancelled_by: str = ""
    ended: asyncio.Future[None] | None = None
    """Completed at its end; None: nothing waits for it."""

    @property
    def decisions(self) -> list[tuple[float, Noted]]:
        """All decisions, with its attempts counted through."""
        return [*self.past, *self._own_decisions()]

    @property
    def status(self) -> object:
        """The last status of its placement."""
        return None if self.placement is None else self.placement.status

    @property
    def waits_for(self) -> str:
        """Why it has no placement: its last offer was refused, or its last attempt failed; empty: unknown."""
        last = self.past[-1][1] if self.past else None
        if isinstance(last, Rejects):
            return last.message
        return "" if self.retry is None else f"the next attempt; the last one failed: {self.retry.error.message}"

    @property
    def all_attempts(self) -> list[receipt_pb2.Attempt]:
        """All attempts, those of the present placement included."""
        own = () if self.placement is None else attempts_of(self.placement.decisions, self.arrived_at)
        return [*self.attempts, *own]

    def leave(self, receipt: receipt_pb2.Receipt | None, max_decisions: int) -> None:
        """End its placement; `receipt`: of the placement, if known."""
        placement = self.placement
        if placement is None:
            return
        known = attempts_of(placement.decisions, self.arrived_at)
        if receipt is not None:
            # Copied, as the task stores the receipt as it is.
            known = list(copy.deepcopy(receipt).attempts)
            for attempt in known:
                set_seconds(attempt.start, placement.arrived_at - self.arrived_at + seconds_of(attempt.start))
        decisions = self._own_decisions()
        past = self.past
        # A task is offered again and again: of equal refusals the newest is kept.
        if decisions and past and _is_same_refusal(past[-1][1], decisions[-1][1]):
            past, decisions = past[:-1], decisions[-1:]
        self.past = [*past, *decisions][-max_decisions:]
        self.attempts += known
        self.placement = None

    def _own_decisions(self) -> list[tuple[float, Noted]]:
        if self.placement is None:
            return []
        before = len(self.attempts)
        return [
            (at, replace(noted, attempt=noted.attempt + before) if isinstance(noted, Placed | FailedAttempt) else noted)
            for at, noted in self.placement.decisions
        ]


UnderWay = Request | RecordedTask


def _is_same_refusal(one: Noted, other: Noted) -> bool:
    return isinstance(one, Rejects) and isinstance(other, Rejects) and one.reason is other.reason


def attempts_of(decisions: Iterable[tuple[float, Noted]], arrived_at: float) -> list[receipt_pb2.Attempt]:
    """Return the attempts that decisions tell of, as in a receipt."""
    found: list[receipt_pb2.Attempt] = []
    for at, noted in decisions:
        if isinstance(noted, Placed):
            chosen = noted.candidate
            found.append(receipt_pb2.Attempt(runner=chosen.runner, runner_incarnation=chosen.incarnation))
            found[-1].model = chosen.model
            set_seconds(found[-1].start, at - arrived_at)
        elif isinstance(noted, FailedAttempt) and found:
            found[-1].reason, found[-1].message = noted.reason.value, noted.message  # type: ignore[assignment]
            set_seconds(found[-1].duration, at - arrived_at - seconds_of(found[-1].start))
    return found


class RequestHistory(Protocol):
    """Port to the requests in a router's database. Raises SERVICE_UNAVAILABLE."""

    async def find(self, request_id: str, tenant: str) -> pb.RequestRecord | None:
        """Return a tenant's newest request with this id; of any tenant if empty. Without a state: it is under way."""
        ...

    async def older(
        self, limit: int, tenant: str, selection: Selection, before_number: int, placed_again: Collection[str]
    ) -> tuple[Sequence[pb.RequestRecord], int]:
        """Return ended requests before a number, last first, and their total number.

        Lost ones with an id in `placed_again` are left out.
        """
        ...


def add_decisions(
    record: pb.RequestRecord, decisions: Sequence[tuple[float, Noted]], arrived_at: float, *, has_ended: bool
) -> None:
    """Add decisions with their times, relative to `arrived_at` on the same clock."""
    last_placed = 0
    for index, (_, noted) in enumerate(decisions):
        if isinstance(noted, Placed):
            last_placed = index
    for index, (at, noted) in enumerate(decisions):
        is_retried = index < last_placed
        _fill_decision(record.decisions.add(), noted, at - arrived_at, is_retried=is_retried, has_ended=has_ended)


def _fill_decision(
    record: pb.DecisionRecord, noted: Noted, age_seconds: float, *, is_retried: bool, has_ended: bool
) -> None:
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
            final = " and is not retried" if has_ended and not is_retried else ""
            when = f"after its answer had begun{final}" if noted.has_content else "before any content"
            words = f": {noted.message}" if noted.message else ""
            record.detail = f"attempt {noted.attempt} failed {when}: {_reason_name(noted.reason)}{words}"
        case Pauses():
            record.kind = pb.DecisionRecord.KIND_QUEUED
            failed = f"{noted.failed_count} of {noted.max_attempts} attempts failed" if noted.failed_count else "again"
            when = f"in {wait_words(noted.seconds)} s" if noted.seconds else "with a free slot"
            record.detail = f"attempt {noted.attempt} starts {when} ({failed})"
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
