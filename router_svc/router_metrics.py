"""Prometheus metrics of a router: queue, grants, refusals, wakes, ends of requests, and host memory.

No label comes from a caller: models are names known to the mesh, or `unknown`. Metrics of finished requests come from
their receipts. Names, attributes and buckets of `gen_ai_*` follow the conventions for generative AI metrics (in
development, manifest gen-ai-dev 1.42) in Prometheus' form. Those buckets end below the duration of a cold load, so
longer ones are added.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import partial
from operator import attrgetter

from prometheus_client.core import Metric
from typing_extensions import override

from router_svc.observer import RequestEnded, RouterState, SchedulingObserver
from router_svc.policy.decisions import Placed, Rejects, RequestDecision, WaitKind
from router_svc.receipt_counts import ReceiptCounts
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.dispatch.request_spans import OPERATION_NAMES, PROVIDER
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest, PoolQueue
from weft.kernel.requests.request_values import Operation, Priority
from weft.kernel.telemetry.metrics_page import MetricsPage, exemplar_of
from weft.kernel.telemetry.tracing import NO_TRACING, TraceContext, error_type

TOLERANCE_SECONDS = 0.002
"""Tolerance, as each duration of a receipt is rounded separately."""


class ReceiptFault(StrEnum):
    """An inconsistency in a receipt."""

    WAITS_EXCEED_TOTAL = "waits_exceed_total"
    FIRST_TOKEN_AFTER_END = "first_token_after_end"  # noqa: S105 - a name
    FIRST_TOKEN_BEFORE_GRANT = "first_token_before_grant"  # noqa: S105 - a name
    """The first content came before the waits were over."""
    CACHED_EXCEEDS_PROMPT = "cached_exceeds_prompt"
    REASONING_EXCEEDS_COMPLETION = "reasoning_exceeds_completion"
    """More reasoning tokens than answer tokens, which include them."""
    COMPLETED_WITHOUT_ATTEMPT = "completed_without_attempt"
    COMPLETED_WITH_REASON = "completed_with_reason"
    """It completed, but it or its last attempt has a failure reason."""
    FAILED_WITHOUT_REASON = "failed_without_reason"
    REJECTED_AFTER_ATTEMPT = "rejected_after_attempt"
    """It was refused before any attempt, but has attempts."""


def receipt_faults(counts: ReceiptCounts) -> list[ReceiptFault]:
    """Returns the inconsistencies in the receipt of a finished request."""
    receipt, first, waits = counts.receipt, counts.first_content, counts.queue_wait + counts.load_wait
    usage, attempts = receipt.usage, receipt.attempts
    latest = math.inf if counts.total is None else counts.total + TOLERANCE_SECONDS
    is_complete = receipt.outcome == receipt_pb2.OUTCOME_COMPLETED
    is_rejected = receipt.outcome == receipt_pb2.OUTCOME_REJECTED
    was_left = is_rejected or receipt.outcome in (_FAILED, receipt_pb2.OUTCOME_CANCELLED)
    has_reason = bool(receipt.reason or (attempts and attempts[-1].reason))
    faults = (
        (ReceiptFault.WAITS_EXCEED_TOTAL, waits > latest),
        (ReceiptFault.FIRST_TOKEN_AFTER_END, first is not None and first > latest),
        (ReceiptFault.FIRST_TOKEN_BEFORE_GRANT, first is not None and first < waits - TOLERANCE_SECONDS),
        (ReceiptFault.CACHED_EXCEEDS_PROMPT, usage.cached_prompt_tokens > usage.prompt_tokens),
        (ReceiptFault.REASONING_EXCEEDS_COMPLETION, usage.reasoning_tokens > usage.completion_tokens),
        (ReceiptFault.COMPLETED_WITHOUT_ATTEMPT, is_complete and not attempts),
        (ReceiptFault.COMPLETED_WITH_REASON, is_complete and has_reason),
        (ReceiptFault.FAILED_WITHOUT_REASON, was_left and not receipt.reason),
        (ReceiptFault.REJECTED_AFTER_ATTEMPT, is_rejected and attempts),
    )
    return [fault for fault, is_found in faults if is_found]


LONG_SECONDS = (120.0, 300.0, 600.0)
"""Buckets added to those of the conventions, for loads of large models and long answers."""
DURATION_SECONDS = (*(0.01 * 2**power for power in range(14)), *LONG_SECONDS)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0, *LONG_SECONDS),
)
OUTPUT_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = tuple(float(4**power) for power in range(14))
_COMMON = ("gen_ai_request_model", "gen_ai_response_model", "gen_ai_operation_name", "gen_ai_provider_name")
_FAILED = receipt_pb2.OUTCOME_FAILED
WAIT_SECONDS = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Buckets of waits, from a free slot to the load of a large model."""

ERROR_SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0)
"""Shares of the wait."""

PROGRAM = "program"
"""The holder label of leases that are not a model's, as programs choose their own names."""

_PRIORITIES = {priority: priority.name.lower() for priority in Priority}
_OPERATIONS = {each: OPERATION_NAMES.get(each, each.name.lower()) for each in Operation}
_OUTCOMES = {
    **{number: name.removeprefix("OUTCOME_").lower() for name, number in receipt_pb2.Outcome.items()},
    receipt_pb2.OUTCOME_UNSPECIFIED: "unknown",
}


class RouterMetrics(SchedulingObserver):
    """The metrics of a router, on its own page or the host's."""

    def __init__(self, page: MetricsPage | None = None) -> None:
        self.page = page = MetricsPage() if page is None else page
        self._requests = RequestMetrics(page)
        self._tracing = NO_TRACING
        self._waits = page.counter(
            "weft_router_waits",
            "Waits of requests by reason; a request may have several.",
            ("model", "reason"),
        )
        self._ends = page.counter(
            "weft_router_requests",
            "Ended requests by model, outcome and reason ('completed' if there is none).",
            ("model", "outcome", "reason"),
        )
        self._grants = page.counter(
            "weft_router_grants",
            "Slots granted to requests, by requested model and priority; a request may get several.",
            ("model", "priority"),
        )
        self._refusals = page.counter(
            "weft_router_refusals", "Requests refused by the scheduler, by model and reason.", ("model", "reason")
        )
        self._failed_attempts = page.counter(
            "weft_router_failed_attempts", "Attempts that failed before content, by reason.", ("reason",)
        )
        self._retries = page.counter(
            "weft_router_retries", "Attempts beyond the first of each ended request, by model.", ("model",)
        )
        self._wakes = page.counter("weft_router_wakes", "Wakes and loads caused by requests, by model.", ("model",))
        self._failed_wakes = page.counter(
            "weft_router_failed_wakes", "Wakes and loads that failed, by model and reason.", ("model", "reason")
        )
        self._left = page.counter(
            "weft_router_left_premises",
            "Requests that were sent, or may have been sent, to a remote provider, by model.",
            ("model",),
        )
        self._queue_wait = page.histogram(
            "weft_router_queue_wait_seconds",
            "Time from arrival to the last grant, without model loads.",
            ("model",),
            WAIT_SECONDS,
        )
        self._load_wait = page.histogram(
            "weft_router_load_wait_seconds",
            "Time that requests waited for a model load; only requests that did.",
            ("model",),
            WAIT_SECONDS,
        )

        self._estimate_error = page.histogram(
            "weft_router_wait_estimate_error_ratio",
            "Error of the first wait estimate of a request, as a share of the actual wait.",
            ("model",),
            ERROR_SHARES,
        )

    @override
    def show(self, state: RouterState) -> None:
        """Adds the router's state to each scrape."""
        self._tracing = state.tracing
        self.page.add(partial(_state_metrics, state, self.page))
        self.page.add_spans(state.tracing)

    @override
    def note_decision(self, decision: RequestDecision, request: PlacementRequest, view: FleetView) -> None:
        """Counts a grant or a refusal. Waits are not counted, as each request gets many."""
        if isinstance(decision, Placed):
            self._grants[view.label(request.model), _PRIORITIES[request.priority]].inc()
        elif isinstance(decision, Rejects) and not request.task_id:
            # A refused task waits and is offered again.
            self._note_refusal(request, decision.reason, view)

    @override
    def note_wait(self, request: PlacementRequest, kind: WaitKind, view: FleetView) -> None:
        self._waits[view.label(request.model), kind.value].inc()

    @override
    def note_estimate(self, request: PlacementRequest, error: float, view: FleetView) -> None:
        self._estimate_error[view.label(request.model),].observe(error)

    @override
    def note_wake(self, model: str) -> None:
        """Counts a wake or a load that waiting requests caused."""
        self._wakes[model,].inc()

    def _note_refusal(self, request: PlacementRequest, reason: Reason, view: FleetView) -> None:
        self._refusals[view.label(request.model), reason.name.lower()].inc()

    @override
    def note_failed_attempt(self, reason: Reason) -> None:
        """Counts an attempt that failed before any content."""
        self._failed_attempts[reason.name.lower(),].inc()

    @override
    def note_failed_wake(self, model: str, reason: Reason) -> None:
        self._failed_wakes[model, reason.name.lower()].inc()

    @override
    def note_end(self, ended: RequestEnded) -> None:
        """Counts the end of a request and the waits in its receipt."""
        request, reason, counts, model = ended.request.spec, ended.reason, ended.counts, ended.asked_label
        if not ended.is_counted:
            return
        if ended.refusal is not None:
            self._note_refusal(request, reason, ended.view)
        if ended.outcome is None:
            return
        known = reason if counts is not None else ended.last_error or reason
        self._ends[model, _OUTCOMES[ended.outcome], error_type(known) or "completed"].inc()
        if counts is None:
            return
        exemplar = None if self._tracing.sampling is None else exemplar_of_request(request)
        self._requests.note_end(ended, counts, exemplar)
        if counts.retries:
            self._retries[model,].inc(counts.retries)
        if counts.receipt.left_premises:
            self._left[model,].inc()
        if counts.receipt.attempts:
            self._queue_wait[model,].observe(counts.queue_wait, exemplar)
        if counts.load_wait:
            self._load_wait[model,].observe(counts.load_wait, exemplar)


class RequestMetrics:
    """Counts finished requests."""

    def __init__(self, page: MetricsPage) -> None:
        self._duration = page.histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from the arrival of a request to its end, including waits, loads and all attempts.",
            (*_COMMON, "error_type"),
            DURATION_SECONDS,
        )
        self._first_token = page.histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from the arrival of a completed request to its first content, without tasks in idle capacity.",
            _COMMON,
            FIRST_TOKEN_SECONDS,
        )
        self._per_token = page.histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time per output token after the first, of completed requests.",
            _COMMON,
            OUTPUT_TOKEN_SECONDS,
        )
        self._usage = page.histogram(
            "gen_ai_client_token_usage_tokens",
            "Tokens of a request, by type: input (cached ones included) and output.",
            (*_COMMON, "gen_ai_token_type"),
            TOKENS,
        )
        self._cut_off = page.counter(
            "weft_cut_off_answers",
            "Answers that ended incomplete after their first content, except if the caller disconnected.",
            ("model", "reason"),
        )
        self._faults = page.counter(
            "weft_inconsistent_receipts", "Receipts with contradictory figures, by fault.", ("fault",)
        )
        for fault in ReceiptFault:
            # An alert on an increase would miss a series that starts at one.
            self._faults[fault,].inc(0)

    def note_end(self, ended: RequestEnded, counts: ReceiptCounts, exemplar: dict[str, str] | None) -> None:
        """Counts a request by its receipt."""
        receipt, model = counts.receipt, ended.asked_label
        common = (model, ended.answered_label, _OPERATIONS[ended.request.spec.operation], PROVIDER)
        error = error_type(ended.reason)
        if counts.total is not None:
            self._duration[*common, error].observe(counts.total, exemplar)
        if counts.first_token is not None:
            self._first_token[common].observe(counts.first_token, exemplar)
        if counts.per_token is not None:
            self._per_token[common].observe(counts.per_token, exemplar)
        if counts.has_usage:
            usage = receipt.usage
            self._usage[*common, "input"].observe(usage.prompt_tokens, exemplar)
            if usage.completion_tokens:
                self._usage[*common, "output"].observe(usage.completion_tokens, exemplar)
        if receipt.outcome == _FAILED and counts.first_content is not None:
            self._cut_off[model, error].inc()
        for fault in receipt_faults(counts):
            self._faults[fault,].inc()


def exemplar_of_request(request: PlacementRequest) -> dict[str, str] | None:
    """Returns the exemplar of a sampled request. Most are not sampled, and their traceparent is not parsed."""
    sampled = request.traceparent.endswith("1")
    return exemplar_of(TraceContext.parse(request.traceparent)) if sampled else None


def _state_metrics(state: RouterState, page: MetricsPage) -> Iterator[Metric]:
    yield from _queue_metrics(list(state.queues()), page)
    yield from _memory_metrics(state, page)
    yield page.figure(
        "weft_router_view_revision",
        "Revision of the mesh that the router knows.",
        state.view_revision(),
    )
    yield page.figure(
        "weft_router_watch_lag_seconds",
        "Time since the watch of the registry was lost; 0 while it is open.",
        state.watch_lag_seconds(),
    )
    shares = ((tenant, state.fair_share(tenant)) for tenant in page.limits.tenants)
    yield page.gauge(
        "weft_router_fair_share_tokens",
        "Fair share account of a tenant: tokens served divided by its weight. Only for tenants in metrics.tenants.",
        ("tenant",),
        (((tenant,), account) for tenant, account in shares if account is not None),
    )
    yield page.count(
        "weft_router_quotes",
        "Answers by whether they kept a time: first_token or completion as quoted, which nine of ten should keep, or "
        "max_wait, the limit of the caller.",
        ("time", "kept"),
        (
            ((time, kept), number)
            for time, each in state.quotes().items()
            for kept, number in (("yes", each.kept), ("no", each.answers - each.kept))
        ),
    )
    yield page.figure("weft_router_active_tenants", "Tenants with waiting or running requests.", state.active_tenants())


def _queue_metrics(queues: Sequence[PoolQueue], page: MetricsPage) -> Iterator[Metric]:
    for name, meaning, figure in (
        ("weft_router_waiting", "Waiting requests by pool or route.", attrgetter("waiting")),
        ("weft_router_max_waiting", "Maximum number of waiting requests by pool.", attrgetter("max_waiting")),
        ("weft_router_running", "Running requests by pool.", attrgetter("running")),
    ):
        yield page.gauge(name, meaning, ("pool",), (((queue.pool,), figure(queue)) for queue in queues))


def _memory_metrics(state: RouterState, page: MetricsPage) -> Iterator[Metric]:
    hosts = state.hosts().values()
    for name, meaning, figure in (
        ("weft_memory_total_bytes", "Accelerator memory that may be leased.", attrgetter("total_bytes")),
        ("weft_memory_free_bytes", "Accelerator memory that a lease could get now.", attrgetter("free_bytes")),
    ):
        yield page.gauge(name, meaning, ("host",), (((host.host,), figure(host)) for host in hosts))
    held = Counter[tuple[str, str]]()
    for host in hosts:
        for holder in host.holders:
            held[host.host, holder.name if holder.is_model else PROGRAM] += holder.held_bytes
    yield page.gauge(
        "weft_memory_held_bytes", "Accelerator memory held by a model or a program.", ("host", "holder"), held.items()
    )
    yield page.figure("weft_router_memory_age_seconds", "Age of the memory figures.", state.memory_age_seconds())
