"""Metrics of finished requests, from their receipts: OpenTelemetry's names for GenAI servers, and checks of receipts.

Names, attributes and buckets are those of the conventions for generative AI metrics (in development, manifest
gen-ai-dev 1.42), in Prometheus' form. Their buckets end where a cold model begins: longer ones are added.
"""

from google.protobuf.duration_pb2 import Duration

from router_svc.receipt_check import ReceiptFault, receipt_faults
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.agents import TargetLabels
from weft.dispatch.fleet import FleetView
from weft.dispatch.placement import PlacementRequest
from weft.dispatch.request_spans import OPERATION_NAMES, PROVIDER
from weft.kernel.metrics import MetricsPage, exemplar_of
from weft.kernel.reasons import Reason
from weft.kernel.tracing import TraceContext, error_type

LONG_SECONDS = (120.0, 300.0, 600.0)
"""Added to the buckets of the conventions: loads of large models, and long answers."""
DURATION_SECONDS = (*(0.01 * 2**power for power in range(14)), *LONG_SECONDS)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(30.0, 60.0, *LONG_SECONDS),
)
OUTPUT_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = tuple(float(4**power) for power in range(14))
_COMMON = ("gen_ai_request_model", "gen_ai_response_model", "gen_ai_operation_name", "gen_ai_provider_name")
_FAILED = receipt_pb2.OUTCOME_FAILED
_COMPLETED = receipt_pb2.OUTCOME_COMPLETED


class RequestMetrics:
    """Counts finished requests."""

    def __init__(self, page: MetricsPage, targets: TargetLabels) -> None:
        self._targets = targets
        self._duration = page.histogram(
            "gen_ai_server_request_duration_seconds",
            "From the arrival of a request to its end: waits, loads and all attempts included.",
            (*_COMMON, "error_type"),
            DURATION_SECONDS,
        )
        self._first_token = page.histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the arrival of a request that completed to its first content.",
            _COMMON,
            FIRST_TOKEN_SECONDS,
        )
        self._per_token = page.histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of a token after the first one, of requests that completed.",
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
            "Answers that ended after their first content without being complete; not those that a caller left.",
            ("model", "reason"),
        )
        self._faults = page.counter(
            "weft_inconsistent_receipts", "Receipts whose figures contradict each other, by what is wrong.", ("fault",)
        )
        for fault in ReceiptFault:
            # An alert on an increase does not see a series that begins at one.
            self._faults.of(fault)

    def note_end(
        self,
        request: PlacementRequest,
        reason: Reason,
        receipt: receipt_pb2.Receipt,
        view: FleetView,
        exemplar: dict[str, str] | None,
    ) -> None:
        """Counts a request by its receipt."""
        model = self._targets.label(request.model, view)
        # A request that no runner got has no response model; its receipt repeats the name in the request.
        answered_by = self._targets.label(receipt.model, view) if receipt.attempts else ""
        common = (model, answered_by, OPERATION_NAMES.get(request.operation, request.operation.name.lower()), PROVIDER)
        error = error_type(reason)
        has_content = receipt.HasField("time_to_first_token")
        total = seconds_of(receipt.total_time)
        if receipt.HasField("total_time"):
            self._duration.of(*common, error).observe(total, exemplar)
        if receipt.outcome == _COMPLETED and has_content:
            self._note_speed(common, receipt, total, exemplar)
        if receipt.HasField("usage"):
            usage = receipt.usage
            self._usage.of(*common, "input").observe(usage.prompt_tokens, exemplar)
            if usage.completion_tokens:
                self._usage.of(*common, "output").observe(usage.completion_tokens, exemplar)
        if receipt.outcome == _FAILED and has_content:
            self._cut_off.of(model, error).inc()
        for fault in receipt_faults(receipt):
            self._faults.of(fault).inc()

    def _note_speed(
        self, common: tuple[str, ...], receipt: receipt_pb2.Receipt, total: float, exemplar: dict[str, str] | None
    ) -> None:
        first = seconds_of(receipt.time_to_first_token)
        self._first_token.of(*common).observe(first, exemplar)
        later_tokens = receipt.usage.completion_tokens - 1
        if later_tokens > 0 and total >= first:
            self._per_token.of(*common).observe((total - first) / later_tokens, exemplar)


def exemplar_of_request(request: PlacementRequest) -> dict[str, str] | None:
    """Returns the exemplar of a sampled request. Most are not sampled: their traceparent is not parsed."""
    sampled = request.traceparent.endswith("1")
    return exemplar_of(TraceContext.parse(request.traceparent)) if sampled else None


def seconds_of(duration: Duration) -> float:
    """Returns a duration in seconds."""
    return duration.seconds + duration.nanos / 1e9
