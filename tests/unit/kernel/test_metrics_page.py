"""The page of metrics of a process: bounded labels, formats, exemplars, and metrics that are passed on."""

import asyncio
from collections.abc import Iterable

import pytest
from kit.calls import calls_of
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from weft.kernel.settings.metric_limits import MetricLimits
from weft.kernel.telemetry.metrics_page import OTHER, MetricsPage, exemplar_of, passed_on
from weft.kernel.telemetry.tracing import TraceContext
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.names import is_name
from weft_app.compose.loop_delay import SAMPLE_SECONDS, LoopDelay

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
VLLM = """# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",runner="forged"} 3 1700000000000
# HELP vllm:ttft_seconds Histogram.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{le="1"} 1
vllm:ttft_seconds_bucket{le="+Inf"} 2
vllm:ttft_seconds_count 2
vllm:ttft_seconds_sum 3
# HELP weft_router_requests_total Forged.
# TYPE weft_router_requests_total counter
weft_router_requests_total 7
"""


def _page(most: int = 2) -> MetricsPage:
    return MetricsPage(MetricLimits(max_label_sets=most))


def _found(families: Iterable[Metric]) -> dict[tuple[str, str], float]:
    """Values by name and the values of labels."""
    return {
        (sample.name, ",".join(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_label_sets_beyond_the_bound_are_counted_as_other() -> None:
    page = _page()
    histogram = page.histogram("waits", "w", ("model", "kind"), (1.0,))
    for number in range(100):
        histogram[f"model-{number}", "queue"].observe(0.5)
    found = _found(page.collect())
    assert {labels for name, labels in found if name == "waits_count"} == {
        "queue,model-0",
        "queue,model-1",
        f"queue,{OTHER}",
    }
    assert found["waits_count", f"queue,{OTHER}"] == 98


def test_overflow_label_is_not_a_valid_mesh_name() -> None:
    assert not is_name(OTHER)


def test_combinations_of_other_labels_are_bounded_too() -> None:
    page = _page(1)
    histogram = page.histogram("waits", "w", ("model", "kind"), (1.0,))
    for number in range(100):
        histogram[f"model-{number}", f"kind-{number}"].observe(0.5)
    assert len(histogram) <= 3


def test_idle_label_set_is_evicted_and_a_used_one_is_not() -> None:
    page = _page()
    counted = page.histogram("waits", "w", ("model",), (1.0,))
    counted["old",].observe(1)
    counted["busy",].observe(1)
    page.note_idle()
    counted["busy",].observe(1)
    page.note_idle()
    counted["new",].observe(1)
    counted["newer",].observe(1)
    found = _found(page.collect())
    assert {labels for name, labels in found if name == "waits_count"} == {"busy", "new", OTHER}
    assert found["waits_count", "busy"] == 2


def test_continuous_model_churn_does_not_increase_label_sets() -> None:
    page = _page(10)
    counted = page.histogram("waits", "w", ("model",), (1.0,))
    for number in range(500):
        counted[f"model-{number}",].observe(1)
        if number % 5 == 0:
            page.note_idle()
    assert len(counted) <= 11
    # The newest ones have labels of their own: the bound is no trap that closes once.
    assert ("waits_count", "model-495") in _found(page.collect())


def test_gauges_beyond_the_bound_are_summed() -> None:
    page = _page(1)
    family = page.gauge("waiting", "w", ("pool",), (((f"pool-{number}",), 1.0) for number in range(30)))
    assert _found([family])["waiting", OTHER] == 10
    assert len(family.samples) == 21


async def test_exemplars_are_only_on_the_openmetrics_page_and_of_sampled_requests() -> None:
    page = _page()
    histogram = page.histogram("waits", "w", ("model",), (1.0, 2.0))
    sampled, unsampled = TraceContext(0xAB, 1, is_sampled=True), TraceContext(0xCD, 1, is_sampled=False)
    histogram["m",].observe(0.5, exemplar_of(sampled))
    histogram["m",].observe(1.5, exemplar_of(unsampled))
    histogram["m",].observe(1.5, exemplar_of(None))
    rendered = await page.render(OPENMETRICS)
    assert rendered.content_type.startswith("application/openmetrics-text")
    families = openmetrics_families(rendered.body.decode())  # type: ignore[no-untyped-call]
    exemplars = [sample.exemplar for family in families for sample in family.samples if sample.exemplar]
    assert [exemplar.labels for exemplar in exemplars] == [{"trace_id": f"{0xAB:032x}"}]
    plain = await page.render("text/plain")
    assert plain.content_type.startswith("text/plain")
    assert b"trace_id" not in plain.body


async def test_histogram_counts_a_value_at_a_bound_in_the_bucket_below_and_larger_ones_up_to_infinity() -> None:
    page = _page()
    histogram = page.histogram("waits", "w", ("model",), (1, 2.5))
    for value in (0.5, 1, 2, 7):
        histogram["m",].observe(value)
    assert (await page.render()).body.decode() == (
        "# HELP waits w\n# TYPE waits histogram\n"
        'waits_bucket{le="1.0",model="m"} 2.0\nwaits_bucket{le="2.5",model="m"} 3.0\n'
        'waits_bucket{le="+Inf",model="m"} 4.0\nwaits_count{model="m"} 4.0\nwaits_sum{model="m"} 10.5\n'
    )


def test_counting_a_known_label_set_calls_nothing_of_the_metrics_library() -> None:
    page = _page()
    histogram, counter = page.histogram("waits", "w", ("model",), (1.0,)), page.counter("ends", "e", ("model",))

    def count() -> None:
        histogram["m",].observe(0.5)
        counter["m",].inc()

    count()
    assert calls_of(count) == ["observe", "inc"]


async def test_metrics_page_has_no_creation_times() -> None:
    page = _page()
    page.counter("ends", "e", ("model",))["m",].inc()
    assert b"_created" not in (await page.render(OPENMETRICS)).body


def test_forwarded_metrics_have_own_labels_instead_of_forged_ones_and_no_old_timestamps() -> None:
    found = passed_on(VLLM, {"runner": "a", "model": "m"}, max_series=100, refused=("weft_",))
    names = [family.name for family in found.families]
    assert names == ["vllm:num_requests_running", "vllm:ttft_seconds"]
    [running] = found.families[0].samples
    assert running.labels == {"model_name": "m", "runner": "a", "model": "m"}
    assert running.timestamp is None
    assert found.left_out == 1


def test_metrics_beyond_the_series_bound_are_dropped_whole() -> None:
    found = passed_on(VLLM, {"runner": "a"}, max_series=3, refused=("weft_",))
    assert [family.name for family in found.families] == ["vllm:num_requests_running"]
    assert found.left_out == 2


@pytest.mark.parametrize(
    "page", ["# TYPE", "a{b=} 1", 'a{b="1} 1', "a notanumber", "\x00{} 1\n", "a{" * 1000, '{"json": true}']
)
def test_invalid_page_is_forwarded_up_to_its_first_error(page: str) -> None:
    found = passed_on(f"good 1\n{page}\n", {"runner": "a"}, max_series=100)
    assert all(family.samples for family in found.families)


async def test_metrics_with_one_name_are_grouped_on_a_page() -> None:
    page = _page()
    page.counter("ends", "e", ("model",))["own",].inc()
    other = passed_on("# TYPE ends_total counter\nends_total 5\n", {"runner": "a"}, max_series=10)
    clash = passed_on("# TYPE ends_total gauge\nends_total 6\n", {"runner": "b"}, max_series=10)
    page.add(lambda: other.families)
    page.add(lambda: clash.families)
    text = (await page.render()).body.decode()
    assert text.count("# TYPE ends_total counter") == 1
    [family] = [each for each in text_string_to_metric_families(text) if each.type == "counter"]
    assert sorted(sample.value for sample in family.samples) == [1.0, 5.0]


class LateClock(SystemClock):
    """A clock on which every sleep takes 40 ms longer than it should."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = 0
        self.has_ended = asyncio.Event()

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.04
        self.sleeps += 1
        if self.sleeps > 100:
            self.has_ended.set()
            raise asyncio.CancelledError


async def test_event_loop_delay_is_the_lateness_of_its_timers() -> None:
    page = MetricsPage(MetricLimits(idle_seconds=100 * SAMPLE_SECONDS))
    idle: list[float] = []
    clock = LateClock()
    page.note_idle = lambda: idle.append(clock.now)  # type: ignore[method-assign]
    delay = LoopDelay(page, clock, "router")
    await delay.start()
    await clock.has_ended.wait()
    await delay.stop()
    found = _found(page.collect())
    assert found["weft_event_loop_delay_seconds_count", "router"] == 100
    assert found["weft_event_loop_delay_seconds_bucket", "0.025,router"] == 0
    assert found["weft_event_loop_delay_seconds_bucket", "0.05,router"] == 100
    assert len(idle) == 1
