"""Prometheus metrics of the gateway. No label comes from a caller: models are names of the fleet, or `unknown`."""

from gateway.request_facts import UNKNOWN_MODEL, RequestFacts
from weft.api.common.v1 import usage_pb2
from weft.dispatch.end_reporter import EndFate
from weft.kernel.telemetry.metrics_page import MetricsPage, exemplar_of

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_COMPLETED = "completed"


class GatewayMetrics:
    """The gateway's metrics on its own page or the host's."""

    def __init__(self, page: MetricsPage | None = None) -> None:
        self.page = page = MetricsPage() if page is None else page
        self._requests = page.counter(
            "weft_gateway_requests",
            "Requests by API, model, HTTP status and result ('completed' or the reason).",
            ("model", "surface", "code", "reason"),
        )
        self._duration = page.histogram(
            "weft_gateway_request_duration_seconds",
            "Time from the request's headers to the last byte of its answer.",
            ("model", "surface"),
            _SECONDS,
        )
        self._first_token = page.histogram(
            "weft_gateway_time_to_first_token_seconds",
            "Time from the request's headers to the first content of a stream.",
            ("model", "surface"),
            _SECONDS,
        )
        self._tokens = page.counter(
            "weft_gateway_tokens",
            "Tokens by kind: prompt, cached (part of prompt), completion, reasoning (part of completion).",
            ("model", "kind"),
        )
        self._ends = page.counter(
            "weft_gateway_end_reports",
            "Ends of requests reported to another router after theirs was lost, by result.",
            ("fate",),
        )
        self.active_streams = 0
        page.add(lambda: (page.figure("weft_gateway_active_streams", "Streams being answered.", self.active_streams),))

    def request_ended(self, facts: RequestFacts, seconds: float) -> None:
        """Counts a request and its duration."""
        reason = _COMPLETED if facts.error is None else facts.error.reason.name.lower()
        self._requests[facts.model, facts.surface, str(facts.status), reason].inc()
        self._duration[facts.model, facts.surface].observe(seconds, exemplar_of(facts.trace))

    def end_reported(self, fate: EndFate) -> None:
        """Counts the report of the end of a request that lost its router, by its outcome."""
        self._ends[fate.value,].inc()

    def refused(self, status: int) -> None:
        """Counts a request refused before routing, because its head was not HTTP, too large or too slow."""
        self._requests[UNKNOWN_MODEL, "none", str(status), "refused"].inc()

    def first_token(self, facts: RequestFacts, seconds: float) -> None:
        """Records when a stream's first content was sent."""
        self._first_token[facts.model, facts.surface].observe(seconds, exemplar_of(facts.trace))

    def tokens_used(self, facts: RequestFacts, usage: usage_pb2.Usage) -> None:
        """Counts the tokens of an answer."""
        for kind, count in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_prompt_tokens),
            ("completion", usage.completion_tokens),
            ("reasoning", usage.reasoning_tokens),
        ):
            if count:
                self._tokens[facts.model, kind].inc(count)
