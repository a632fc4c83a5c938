"""Prometheus metrics of durable tasks: how many there are by state, and how old the oldest open ones are."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric

from router_svc.durable.tasks.task_records import StateCount
from weft.kernel.metrics import MetricsPage


def add_task_metrics(
    page: MetricsPage,
    counts: Callable[[], Mapping[str, StateCount]],
    released: Callable[[], Mapping[str, int]],
    utc_now: Callable[[], float],
) -> None:
    """Adds the metrics of one router's tasks: `counts` are those of the last sweep, `released` are by bound."""

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
            "Age of the oldest open task, from its submission.",
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
