"""Prometheus metrics of durable tasks: how many there are by state, and how old the oldest open ones are."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from router_svc.durable.tasks.store_port import StateCount
from weft.kernel.metrics import MetricsPage


class TaskMetrics(Collector):
    """The metrics of the tasks of one router's database."""

    def __init__(
        self,
        page: MetricsPage,
        counts: Callable[[], Mapping[str, StateCount]],
        released: Callable[[], Mapping[str, int]],
        utc_now: Callable[[], float],
    ) -> None:
        """Adds itself to a page. `counts` are those of the last sweep, `released` are by bound."""
        self._counts = counts
        self._released = released
        self._utc_now = utc_now
        page.register(self)

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the metrics depend on the tasks."""
        return ()

    @override
    def collect(self) -> Iterator[Metric]:
        tasks = GaugeMetricFamily(
            "weft_tasks", "Durable tasks by state, as counted by the last sweep.", labels=("state",)
        )
        oldest = GaugeMetricFamily(
            "weft_oldest_task_age_seconds", "Age of the oldest open task, from its submission.", labels=("state",)
        )
        released = CounterMetricFamily(
            "weft_router_tasks_released",
            "Finished tasks deleted before router.tasks.keep_seconds, by bound: count, tenant_bytes or bytes.",
            labels=("bound",),
        )
        now = self._utc_now()
        for state, count in self._counts().items():
            tasks.add_metric((state,), count.count)
            if count.oldest_at is not None:
                oldest.add_metric((state,), max(0.0, now - count.oldest_at))
        for bound, number in self._released().items():
            released.add_metric((bound,), number)
        yield from (tasks, oldest, released)
