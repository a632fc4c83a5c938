"""What a router remembers of requests: bounded, in memory, cheap to write.

Every arrival and decision is noted as the value it came as; with the end of a request all of that becomes bytes.
Messages are made when somebody reads (`router_svc.request_servicer`). Nothing of it is kept over a restart.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec
from google.protobuf.duration_pb2 import Duration

from router_svc.policy.decisions import Decision, Loads, Placed, Rejects, StopsWaking, Waits, Wakes
from router_svc.policy.endpoints.choice import MAX_CONSIDERED, Considered
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import request_pb2 as pb
from weft.dispatch.placement import PlacementRequest
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason, reason_of
from weft.kernel.request import Priority


@dataclass(frozen=True, slots=True)
class Retry:
    """An attempt failed, and the request is placed again."""

    attempt: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class LoadStart:
    """A model is loaded, and the request is among those who waited for one then."""

    wakes: Wakes
    at: float
    """When it was begun."""


Noted = Waits | Loads | Placed | Rejects | Retry | LoadStart


class RequestEntry:
    """One request under way. Times are seconds on the router's monotonic clock."""

    __slots__ = (
        "arrived_at", "arrived_wall", "client_id", "decisions", "key", "priority", "request_id", "target", "tenant",
        "word",
    )  # fmt: skip

    def __init__(self, key: int, request: PlacementRequest, now: float, wall: datetime) -> None:
        self.key = key
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.client_id = request.client_id
        self.target = request.model
        self.priority = request.priority
        self.arrived_at = now - request.age_seconds
        """When it first arrived anywhere."""
        self.arrived_wall = wall - timedelta(seconds=request.age_seconds) if request.age_seconds else wall
        self.decisions: list[tuple[float, Noted]] = []
        """What was decided, each with when; words about waiting that differ only in figures are one."""
        self.word: Waits | Loads | Placed | Retry | None = None
        """Its state: the last of these."""

    def knows(self, noted: Noted) -> bool:
        """Whether this very thing was noted before."""
        return any(known is noted for _, known in self.decisions)


class EndedRequest(msgspec.Struct, gc=False, kw_only=True):
    """One request that is over.

    Thousands of them are remembered: in bytes, which take a third of what the messages do, and nothing of it is looked
    at by the garbage collector, whose pauses were most of the latency's tail (bench, "edge: a fixed rate").
    """

    key: int
    request_id: str
    tenant: str
    client_id: str
    target: str
    priority: Priority
    arrived_at: float
    arrived_wall: datetime
    ended_at: float
    reason: Reason
    message: str
    decisions: bytes
    """A RequestRecord of nothing else."""
    receipt: bytes | None = None
    """A Receipt; None: nobody has told of it."""


_NANOSECONDS = 1e9


def add_decisions(record: pb.RequestRecord, decisions: Sequence[tuple[float, Noted]], arrived_at: float) -> None:
    """What was noted, each with when, on the clock of `arrived_at`."""
    for at, noted in decisions:
        _fill_decision(record.decisions.add(), noted, at - arrived_at)


def set_seconds(duration: Duration, seconds: float) -> None:
    """So long; a fraction of a nanosecond is lost."""
    duration.FromNanoseconds(int(seconds * _NANOSECONDS))


def _fill_decision(record: pb.DecisionRecord, noted: Noted, age_seconds: float) -> None:
    set_seconds(record.age, max(0.0, age_seconds))
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
            record.detail = f"attempt {noted.attempt} goes to {noted.candidate.model} on {noted.candidate.runner}"
            if noted.choice is not None:
                record.policy = noted.choice.policy
                _fill_candidates(record, noted.choice.considered, noted.choice.count)
        case Retry():
            record.kind = pb.DecisionRecord.KIND_RETRIED
            record.detail = f"attempt {noted.attempt} failed before any content: {_word(noted.reason)}"
        case Rejects():
            record.kind = pb.DecisionRecord.KIND_REJECTED
            record.detail = f"{_word(noted.reason)}: {noted.message}"


def _fill_candidates(record: pb.DecisionRecord, considered: tuple[Considered, ...], count: int) -> None:
    record.candidate_count = count
    for candidate in considered[:MAX_CONSIDERED]:
        record.candidates.add(
            model=candidate.model,
            runner=candidate.runner,
            score=candidate.score,
            gate=candidate.gate,
            chosen=candidate.chosen,
        )


def _eta(seconds: float | None) -> str:
    return "" if seconds is None else f", about {seconds:.0f} s"


def _word(reason: Reason) -> str:
    return reason.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLogLimits:
    """Every bound of the log."""

    max_ended: int = 10_000
    """Requests that are remembered after their end; the one that ended first is forgotten first ..."""
    keep_seconds: float = 3_600.0
    """... and every one after this long."""
    max_under_way: int = 50_000
    """Requests under way that are remembered; those beyond are placed like any other, and not explained."""
    max_decisions: int = 64
    """Of one request, the newest ones."""
    max_wakes: int = 1_024
    """Models whose last load is remembered, for those who hear of it a moment later; the oldest is forgotten first."""
    max_receipt_bytes: int = 4_096
    """A larger receipt is kept without its signals and warnings; if that is too much still, its outcome is kept."""


class RequestLog:
    """Called from the router's event loop alone. A key that it does not know is not noted; it never raises."""

    def __init__(self, limits: RequestLogLimits | None = None) -> None:
        self._limits = limits or RequestLogLimits()
        self._under_way: dict[int, RequestEntry] = {}
        self._wakes: OrderedDict[str, LoadStart] = OrderedDict()
        """The last one of each model, the newest last."""
        self._ended: OrderedDict[int, EndedRequest] = OrderedDict()
        """In the order of their ends."""
        self._newest: dict[str, int] = {}
        """Keys by id; of several with one id the one that arrived last."""
        self._newest_of_tenant: dict[tuple[str, str], int] = {}
        """The same by tenant and id: nobody hides another tenant's request by using its id again."""

    @property
    def under_way_count(self) -> int:
        """How many are remembered that go on."""
        return len(self._under_way)

    @property
    def ended_count(self) -> int:
        """How many are remembered that have ended."""
        return len(self._ended)

    def note_arrival(self, key: int, request: PlacementRequest, now: float, wall: datetime) -> None:
        """A request arrived; `wall` is the time that `now` stands for."""
        if len(self._under_way) < self._limits.max_under_way:
            self._under_way[key] = RequestEntry(key, request, now, wall)
            self._newest[request.request_id] = self._newest_of_tenant[request.tenant, request.request_id] = key

    def note_decisions(self, decisions: Iterable[Decision], now: float) -> None:
        """What a scheduler decided in one step.

        The begin of a load is noted for those who waited then, as soon as they hear of it.
        """
        loads: list[Loads] = []
        for decision in decisions:
            if isinstance(decision, StopsWaking):
                continue  # those who waited for it are told with its end
            if isinstance(decision, Wakes):
                self._note_wakes(decision, now)
            elif isinstance(decision, Loads):
                loads.append(decision)
            else:
                self._note(decision, now)
        # Last, so that the load of this very step is known.
        for word in loads:
            self._note_loading(word, now)

    def note_retry(self, key: int, attempt: int, reason: Reason, now: float) -> None:
        """An attempt failed before any content."""
        entry = self._under_way.get(key)
        if entry is not None:
            entry.word = Retry(attempt, reason)
            self._add(entry, entry.word, now)

    def note_refusal(self, key: int, error: WeftError, now: float) -> None:
        """It was refused before it came to the scheduler."""
        refusal = Rejects(key=key, reason=error.reason, message=error.message, metadata=error.metadata)
        self._note(refusal, now)

    def note_end(
        self, key: int, now: float, reason: Reason | None = None, receipt: receipt_pb2.Receipt | None = None
    ) -> None:
        """It is over; of several ends the first one counts, and the first receipt.

        `reason`: UNSPECIFIED when it completed; None: nobody said, its caller left.
        """
        entry = self._under_way.get(key)
        if entry is not None:
            self._end(entry, Reason.CANCELLED if reason is None else reason, "", now)
        ended = self._ended.get(key)
        if ended is not None and receipt is not None and ended.receipt is None:
            ended.receipt = self._bounded(receipt).SerializeToString()
            ended.reason = ended.reason or reason_of(receipt.reason)

    def find(self, request_id: str, now: float, tenant: str = "") -> RequestEntry | EndedRequest | None:
        """The newest request of this id that is the tenant's; empty: whoever's it is."""
        self._forget_old(now)
        key = self._newest_of_tenant.get((tenant, request_id)) if tenant else self._newest.get(request_id)
        return None if key is None else self._under_way.get(key) or self._ended.get(key)

    def under_way(self, limit: int, tenant: str = "") -> tuple[list[RequestEntry], int]:
        """Those that go on, the oldest first, and how many there are; of one tenant, or of all for an empty one."""
        found = [entry for entry in self._under_way.values() if tenant in ("", entry.tenant)]
        return heapq.nsmallest(limit, found, key=lambda entry: (entry.arrived_at, entry.key)), len(found)

    def _note(self, decision: Waits | Loads | Placed | Rejects, now: float) -> None:
        entry = self._under_way.get(decision.key)
        if entry is None:
            return
        if isinstance(decision, Rejects):
            self._add(entry, decision, now)
            self._end(entry, decision.reason, decision.message, now)
            return
        if not _repeats(entry.word, decision):
            self._add(entry, decision, now)
        entry.word = decision

    def _note_wakes(self, wakes: Wakes, now: float) -> None:
        self._wakes[wakes.model] = LoadStart(wakes, now)
        self._wakes.move_to_end(wakes.model)
        if len(self._wakes) > self._limits.max_wakes:
            self._wakes.popitem(last=False)

    def _note_loading(self, word: Loads, now: float) -> None:
        entry = self._under_way.get(word.key)
        if entry is None:
            return
        if not _repeats(entry.word, word):
            # A word about loading names its model.
            for name in word.stage.split():
                begun = self._wakes.get(name)
                if begun is not None and begun.at >= entry.arrived_at and not entry.knows(begun):
                    self._add(entry, begun, begun.at)
        self._note(word, now)

    def _add(self, entry: RequestEntry, noted: Noted, now: float) -> None:
        entry.decisions.append((now, noted))
        if len(entry.decisions) > self._limits.max_decisions:
            del entry.decisions[0]

    def _end(self, entry: RequestEntry, reason: Reason, message: str, now: float) -> None:
        decisions = pb.RequestRecord()
        add_decisions(decisions, entry.decisions, entry.arrived_at)
        del self._under_way[entry.key]
        self._ended[entry.key] = EndedRequest(
            key=entry.key,
            request_id=entry.request_id,
            tenant=entry.tenant,
            client_id=entry.client_id,
            target=entry.target,
            priority=entry.priority,
            arrived_at=entry.arrived_at,
            arrived_wall=entry.arrived_wall,
            ended_at=now,
            reason=reason,
            message=message,
            decisions=decisions.SerializeToString(),
        )
        if len(self._ended) > self._limits.max_ended:
            self._forget_oldest()
        self._forget_old(now)

    def _forget_old(self, now: float) -> None:
        while self._ended:
            oldest = next(iter(self._ended.values()))
            if now - oldest.ended_at <= self._limits.keep_seconds:
                return
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        key, ended = self._ended.popitem(last=False)
        if self._newest.get(ended.request_id) == key:
            del self._newest[ended.request_id]
        if self._newest_of_tenant.get((ended.tenant, ended.request_id)) == key:
            del self._newest_of_tenant[ended.tenant, ended.request_id]

    def _bounded(self, receipt: receipt_pb2.Receipt) -> receipt_pb2.Receipt:
        if receipt.ByteSize() <= self._limits.max_receipt_bytes:
            return receipt
        kept = receipt_pb2.Receipt()
        kept.CopyFrom(receipt)
        kept.ClearField("signals")
        kept.ClearField("warnings")
        if kept.ByteSize() <= self._limits.max_receipt_bytes:
            return kept
        return receipt_pb2.Receipt(outcome=receipt.outcome, reason=receipt.reason, left_premises=receipt.left_premises)


def _repeats(last: object, word: Waits | Loads | Placed) -> bool:
    """Whether a word about waiting says the same as the last one, but for its figures."""
    match word:
        case Waits():
            return isinstance(last, Waits) and last.reason == word.reason and not word.considered
        case Loads():
            return isinstance(last, Loads) and _without_figures(last.stage) == _without_figures(word.stage)
        case _:
            return False


def _without_figures(stage: str) -> str:
    """What is said before any figures: stages count their seconds in brackets."""
    return stage.partition(" (")[0]
