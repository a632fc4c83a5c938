"""Prometheus metrics of durable tasks, and of the usage that a router wrote to its database."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import Metric

from router_svc.durable.tasks.task_records import StateCount
from router_svc.policy.usage_rows import UsageKey
from router_svc.usage import UsageSums
from weft.dispatch.fleet import FleetSource
from weft.kernel.telemetry.metrics_page import MetricsPage


def add_task_metrics(
    page: MetricsPage,
    counts: Callable[[], Mapping[str, StateCount]],
    released: Callable[[], Mapping[str, int]],
    utc_now: Callable[[], float],
) -> None:
    """Adds a router's task metrics: `counts` from the last sweep, `released` by bound."""

    def collect() -> Iterator[Metric]:
        states, now = counts().items(), utc_now()
        yield page.gauge(
            "weft_tasks",
            "Durable tasks by state, as counted by the last sweep.",
            ("state",),
            (((state,), count.count) for state, count in states),
        )
        yield page.gauge(
            "weft_oldest_task_age_seconds",
            "Age of the oldest unfinished task, from its submission.",
            ("state",),
            (((state,), max(0.0, now - count.oldest_at)) for state, count in states if count.oldest_at is not None),
        )
        yield page.count(
            "weft_router_tasks_released",
            "Finished tasks deleted before router.tasks.keep_seconds, by bound: count, tenant_bytes or bytes.",
            ("bound",),
            (((bound,), number) for bound, number in released().items()),
        )

    page.add(collect)


_OUTCOMES = ("completed", "failed", "cancelled", "rejected", "unknown", "retried")
_TOKENS = {"input": "prompt_tokens", "cached": "cached_prompt_tokens", "output": "completion_tokens"}
_UNKNOWN = {"tokens": "unknown_tokens_count", "accelerator_time": "unknown_gpu_count"}


class _Sum(NamedTuple):
    metric: str
    help: str
    column: str
    per_unit: float = 1.0
    """Amount of the column per unit of the metric."""


_SUMS = (
    _Sum(
        "weft_usage_accelerator_seconds",
        "Accelerator time, as far as known.",
        "gpu_nanoseconds",
        1e9,
    ),
    _Sum(
        "weft_usage_energy_joules",
        "Energy used by accelerators, as far as measured.",
        "energy_millijoules",
        1e3,
    ),
    _Sum("weft_usage_price_dollars", "Price of remote requests, as far as known.", "price_nanodollars", 1e9),
    _Sum("weft_usage_image_steps", "Steps of denoising, over all images.", "image_steps"),
    _Sum("weft_usage_image_pixels", "Pixels of the generated images.", "image_pixels"),
    _Sum("weft_usage_audio_seconds", "Length of transcribed or generated recordings.", "audio_milliseconds", 1e3),
    _Sum(
        "weft_usage_remote_requests",
        "Requests that were sent, or may have been sent, to a remote provider.",
        "remote_count",
    ),
)


class UsageMetrics:
    """An ObserveUsage that counts usage on a page."""

    def __init__(self, page: MetricsPage, fleet: FleetSource, *, by_tenant: bool) -> None:
        """`fleet`: valid label values; `by_tenant`: whether tenants are also labels."""
        self._fleet = fleet
        self._by_tenant = by_tenant
        who = ("tenant", "model") if by_tenant else ("model",)
        self._requests = page.counter("weft_usage_requests", "Ended requests and retried attempts.", (*who, "outcome"))
        self._tokens = page.counter("weft_usage_tokens", "Tokens; cached ones are part of the input.", (*who, "type"))
        self._sums = tuple((page.counter(each.metric, each.help, who), each.column, each.per_unit) for each in _SUMS)
        self._unknown = page.counter(
            "weft_usage_unknown",
            "Requests and attempts with unknown tokens or accelerator time.",
            (*who, "what"),
        )

    def __call__(self, added: Mapping[UsageKey, UsageSums]) -> None:
        """Counts usage that was added to the database."""
        view = self._fleet.view
        for key, sums in added.items():
            model = view.label(key.model)
            self._count((key.tenant, model) if self._by_tenant else (model,), sums)

    def _count(self, who: tuple[str, ...], sums: UsageSums) -> None:
        for outcome in _OUTCOMES:
            if number := sums.get(f"{outcome}_count"):
                self._requests[*who, outcome].inc(number)
        for kind, column in _TOKENS.items():
            if number := sums.get(column):
                self._tokens[*who, kind].inc(number)
        for what, column in _UNKNOWN.items():
            if number := sums.get(column):
                self._unknown[*who, what].inc(number)
        for metric, column, per_unit in self._sums:
            if number := sums.get(column):
                metric[who].inc(number / per_unit)
