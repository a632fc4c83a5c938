"""Requests and clients as documents: what `/v1/requests` answers and what commands print with -o json."""

from datetime import UTC, datetime
from typing import Any, Literal, cast

from google.protobuf.duration_pb2 import Duration

from weft.api.common.v1 import priority_pb2, receipt_pb2
from weft.api.router.v1 import request_pb2 as pb
from weft.documents.document_base import DocumentPart
from weft.kernel.reasons import Reason

RequestState = Literal["queued", "loading", "running", "ended", "unknown"]
DecisionKind = Literal["queued", "loading", "load_started", "placed", "retried", "rejected", "unknown"]
Band = Literal["high", "normal", "low", "system", "durable", "unknown"]


class QueuedDocument(DocumentPart):
    """What it was told last while it waits in the queue."""

    position: int
    """Its place, counted from 1."""
    reason: str
    """What is awaited."""
    eta_seconds: float | None = None
    """How long it will still take, where that is known."""


class LoadingDocument(DocumentPart):
    """What it was told last while a model loads for it."""

    stage: str
    """What is being done."""
    progress: float | None = None
    """Share done, 0 to 1, where that is known."""
    eta_seconds: float | None = None
    """How long it will still take, where that is known."""


class CandidateDocument(DocumentPart):
    """One model on one runner as a decision saw it."""

    model: str
    """The model, by its name in the mesh."""
    runner: str | None = None
    """The runner; absent: none serves it yet."""
    score: float
    """Its worth; of two the higher one is preferred. What goes into it depends on the policy."""
    gate: str | None = None
    """What kept it from being chosen; absent: nothing."""
    chosen: bool
    """Whether it was chosen."""


class DecisionDocument(DocumentPart):
    """One decision about a request, and why."""

    kind: DecisionKind
    """What was decided."""
    age_seconds: float
    """How long after its arrival."""
    detail: str
    """Why, in words."""
    policy: str | None = None
    """The policy that chose; absent: there was nothing to choose."""
    candidates: tuple[CandidateDocument, ...] = ()
    """Who could have served it, in the order of preference; at most 16."""
    candidate_count: int = 0
    """How many could have, named above or not."""


class AttemptDocument(DocumentPart):
    """One try on one runner."""

    runner: str
    """The runner, by name."""
    model: str | None = None
    """The model that was tried."""
    reason: str | None = None
    """Why it did not complete; absent for the attempt that did."""


class ReceiptDocument(DocumentPart):
    """What happened to a request. Times are seconds."""

    outcome: Literal["completed", "rejected", "failed", "cancelled", "unknown"]
    """How it ended."""
    attempts: tuple[AttemptDocument, ...] = ()
    """Every attempt in order."""
    model: str | None = None
    """The model that answered."""
    host: str | None = None
    """Where its runner ran."""
    queue_wait_seconds: float
    """From arrival to the last grant, loads not counted."""
    load_wait_seconds: float
    """Spent waiting for a model to load."""
    time_to_first_token_seconds: float | None = None
    """From arrival to the first content; absent: there was none."""
    prompt_tokens: int | None = None
    """Of the prompt; absent, as all counts: not known."""
    cached_prompt_tokens: int | None = None
    """Of these, found in the prefix cache."""
    completion_tokens: int | None = None
    """Of the answer."""
    gpu_seconds: float | None = None
    """That the backend computed for it on an accelerator, as it reported; absent: not known."""
    tokens_per_second: float | None = None
    """Decode speed as the backend reported it, or as its runner measured it; absent: not known."""
    left_premises: bool
    """Whether any byte of it left the premises, or may have."""


class RequestDocument(DocumentPart):
    """What a router knows of one request."""

    kind: Literal["request"]
    """What it is."""
    request_id: str
    """Its id."""
    tenant: str
    """Who it is for."""
    client_id: str | None = None
    """Who the caller said it is."""
    target: str
    """What was asked for: a model, a pool, or "route/" and a route."""
    priority: Band
    """The band it waits in."""
    state: RequestState
    """Where it is."""
    arrived_at: datetime
    """When it arrived."""
    ended_at: datetime | None = None
    """When it ended."""
    queued: QueuedDocument | None = None
    """While it waits in the queue."""
    loading: LoadingDocument | None = None
    """While a model loads for it."""
    reason: str | None = None
    """Why it ended without an answer."""
    message: str | None = None
    """The same in words."""
    receipt: ReceiptDocument | None = None
    """What happened, once it is over and its dispatcher has said."""
    decisions: tuple[DecisionDocument, ...] = ()
    """What was decided about it, in order; the last 64."""


class RequestList(DocumentPart):
    """Requests that go on, the oldest first."""

    kind: Literal["RequestList"]
    """What it is."""
    items: tuple[RequestDocument, ...]
    """The requests, without their decisions."""
    total: int
    """How many go on, listed or not."""


class ClientTargetDocument(DocumentPart):
    """How often a client asked for something."""

    target: str
    """A model, a pool, or "route/" and a route."""
    request_count: int
    """How often."""


class ClientDocument(DocumentPart):
    """What a router knows of one client, by the id that its requests carry."""

    kind: Literal["client"]
    """What it is."""
    client_id: str
    """Its id."""
    has_profile: bool
    """Whether the router's configuration has a profile for it."""
    request_count: int
    """Requests since it was first seen."""
    refused_count: int
    """Of these, refused before any runner worked on them."""
    running_count: int
    """Of these, under way."""
    token_count: int
    """Tokens of prompts and answers, as far as they are known."""
    targets: tuple[ClientTargetDocument, ...] = ()
    """What it asks for most; at most eight."""
    usual_interval_seconds: float | None = None
    """Usual time between two requests."""
    first_seen_at: datetime | None = None
    """When it was first seen."""
    last_seen_at: datetime | None = None
    """When it was last seen."""
    cooldown_ends_at: datetime | None = None
    """Until when it is refused, for having asked too often."""
    route: str | None = None
    """Where its requests for the model `auto` go."""
    default_priority: Band
    """The band of requests that name none."""


class ClientList(DocumentPart):
    """Clients that were seen lately, by id."""

    kind: Literal["ClientList"]
    """What it is."""
    items: tuple[ClientDocument, ...]
    """The clients."""


def request_document(record: pb.RequestRecord) -> RequestDocument:
    """One request."""
    return RequestDocument(
        kind="request",
        request_id=record.request_id,
        tenant=record.tenant,
        client_id=record.client_id or None,
        target=record.target,
        priority=_band(record.priority),
        state=cast("Any", enum_word(pb.RequestRecord.State, record.state, "STATE_")),
        arrived_at=record.arrive_time.ToDatetime(tzinfo=UTC),
        ended_at=moment(record, "end_time"),
        queued=_queued(record),
        loading=_loading(record),
        reason=reason_word(record.reason),
        message=record.message or None,
        receipt=receipt_document(record.receipt) if record.HasField("receipt") else None,
        decisions=tuple(map(_decision, record.decisions)),
    )


def client_document(record: pb.ClientRecord) -> ClientDocument:
    """One client."""
    return ClientDocument(
        kind="client",
        client_id=record.client_id,
        has_profile=record.has_profile,
        request_count=record.request_count,
        refused_count=record.refused_count,
        running_count=record.running_count,
        token_count=record.token_count,
        targets=tuple(
            ClientTargetDocument(target=target.target, request_count=target.request_count) for target in record.targets
        ),
        usual_interval_seconds=seconds_in(record, "usual_interval"),
        first_seen_at=moment(record, "first_seen_time"),
        last_seen_at=moment(record, "last_seen_time"),
        cooldown_ends_at=moment(record, "cooldown_end_time"),
        route=record.route or None,
        default_priority=_band(record.default_priority or priority_pb2.PRIORITY_NORMAL),
    )


def _queued(record: pb.RequestRecord) -> QueuedDocument | None:
    if not record.HasField("queued"):
        return None
    queued = record.queued
    return QueuedDocument(position=queued.position, reason=queued.reason, eta_seconds=seconds_in(queued, "eta"))


def _loading(record: pb.RequestRecord) -> LoadingDocument | None:
    if not record.HasField("loading"):
        return None
    loading = record.loading
    return LoadingDocument(
        stage=loading.stage,
        progress=loading.progress if loading.HasField("progress") else None,
        eta_seconds=seconds_in(loading, "eta"),
    )


def _decision(decision: pb.DecisionRecord) -> DecisionDocument:
    return DecisionDocument(
        kind=cast("Any", enum_word(pb.DecisionRecord.Kind, decision.kind, "KIND_")),
        age_seconds=_seconds(decision.age),
        detail=decision.detail,
        policy=decision.policy or None,
        candidates=tuple(
            CandidateDocument(
                model=candidate.model,
                runner=candidate.runner or None,
                score=candidate.score,
                gate=candidate.gate or None,
                chosen=candidate.chosen,
            )
            for candidate in decision.candidates
        ),
        candidate_count=decision.candidate_count,
    )


def receipt_document(receipt: receipt_pb2.Receipt) -> ReceiptDocument:
    """What happened to a request; what is not known is None."""
    usage, is_counted = receipt.usage, receipt.HasField("usage")
    return ReceiptDocument(
        outcome=cast("Any", enum_word(receipt_pb2.Outcome, receipt.outcome, "OUTCOME_")),
        attempts=tuple(
            AttemptDocument(runner=attempt.runner, model=attempt.model or None, reason=reason_word(attempt.reason))
            for attempt in receipt.attempts
        ),
        model=receipt.model or None,
        host=receipt.host or None,
        queue_wait_seconds=_seconds(receipt.queue_wait),
        load_wait_seconds=_seconds(receipt.load_wait),
        time_to_first_token_seconds=seconds_in(receipt, "time_to_first_token"),
        prompt_tokens=usage.prompt_tokens if is_counted else None,
        cached_prompt_tokens=usage.cached_prompt_tokens if is_counted else None,
        completion_tokens=usage.completion_tokens if is_counted else None,
        gpu_seconds=seconds_in(receipt, "gpu_time"),
        tokens_per_second=receipt.tokens_per_second or None,
        left_premises=receipt.left_premises,
    )


def _band(number: int) -> Any:
    return enum_word(priority_pb2.Priority, number, "PRIORITY_")


def enum_word(enum: Any, number: int, prefix: str) -> str:
    """STATE_RUNNING is running; a number that is not set, or not known to this version, is unknown."""
    names: dict[int, str] = {value: name for name, value in enum.items() if value}
    return names.get(number, "").removeprefix(prefix).lower() or "unknown"


def reason_word(number: int) -> str | None:
    """A reason by its name; None: there is none."""
    if not number:
        return None
    try:
        return Reason(number).name.lower()
    except ValueError:
        return "unknown"


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def seconds_in(message: Any, field: str) -> float | None:
    """A duration in a message; None: it is not set."""
    return _seconds(getattr(message, field)) if message.HasField(field) else None


def moment(message: Any, field: str) -> datetime | None:
    """A time in a message; None: it is not set."""
    return getattr(message, field).ToDatetime(tzinfo=UTC) if message.HasField(field) else None
