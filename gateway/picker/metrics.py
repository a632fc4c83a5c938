"""Prometheus metrics of the endpoint picker. No label comes from a caller."""

from collections.abc import Callable

from gateway.picker.ends import COMPARED
from weft.kernel.metrics import MetricsPage
from weft.kernel.prometheus_parts import Gauge


class PickerMetrics:
    """The picker's metrics on a page of its own or the host's."""

    def __init__(self, page: MetricsPage | None = None) -> None:
        self.page = page = MetricsPage() if page is None else page
        self._picks = page.counter(
            "weft_picker_requests",
            "Requests that the proxy asked about, by API and by what became of them: 'lane', 'gateway', or the reason "
            "of a refusal.",
            ("surface", "result"),
        )
        self._ends = page.counter(
            "weft_picker_ends",
            "Ends of requests of the lane by who reported them: 'runner', 'proxy', or 'none' within the limit.",
            ("witness",),
        )
        self._unknown = page.counter(
            "weft_picker_unknown_ends",
            "Reports of ends of requests that the picker does not know, as after its restart, by who reported.",
            ("witness",),
        )
        self._disagreements = page.counter(
            "weft_truth_disagreements",
            "Contradictions between a runner's report and the proxy's log of the same request, by what they are about: "
            "'end', 'prompt_tokens' or 'completion_tokens'.",
            ("about",),
        )
        for about in COMPARED:
            # An alert on an increase does not see a series that begins at one.
            self._disagreements.of(about)

    def show_open(self, count: Callable[[], float]) -> None:
        """Shows the number of requests under way with each scrape."""
        gauge = Gauge(
            "weft_picker_open_requests",
            "Requests of the lane that wait for an endpoint or are answered.",
            registry=self.page.registry,
        )
        gauge.set_function(count)

    def picked(self, surface: str, result: str) -> None:
        """Count an answer to the proxy."""
        self._picks.of(surface, result).inc()

    def ended(self, witness: str) -> None:
        """Count the end of a request."""
        self._ends.of(witness).inc()

    def unknown(self, witness: str) -> None:
        """Count a report about a request that is not known."""
        self._unknown.of(witness).inc()

    def disagreed(self, contradictions: list[str]) -> None:
        """Count contradictions, each text beginning with what it is about."""
        for text in contradictions:
            self._disagreements.of(text.partition(":")[0]).inc()
