"""Prometheus metrics of a runner: its models, its engines' figures, and the metrics of the engines themselves."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from runner_svc.backend.port import EnginePage
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.metric_limits import MetricLimits
from weft.kernel.metrics import MetricsPage, add_bounded
from weft.kernel.passed_on_metrics import PassedOn, passed_on

OWN_NAMES = ("weft_", "gen_ai_")
"""Beginnings of names that no engine's metrics have: they would look like ours."""
_PHASES = {number: name.removeprefix("PHASE_").lower() for name, number in InstanceState.Phase.items()}
_ENGINE_GAUGES = (
    ("running_count", "weft_runner_engine_requests_running", "Requests that the engine computes."),
    ("waiting_count", "weft_runner_engine_requests_waiting", "Requests that wait for room in the engine's KV cache."),
    ("other_count", "weft_runner_engine_requests_of_others", "Requests in the engine that its runner has not sent."),
    ("kv_cache_share", "weft_runner_kv_cache_share", "Share of the KV cache that is in use, 0 to 1."),
    ("kv_cache_tokens", "weft_runner_kv_cache_tokens", "Capacity of the KV cache."),
    ("kv_cache_bytes", "weft_runner_kv_cache_bytes", "Memory of the KV cache."),
    ("weight_bytes", "weft_runner_weight_bytes", "Memory of the weights."),
)
_ENGINE_COUNTERS = (
    ("preemption_count", "weft_runner_preemptions", "Requests that lost their place in the KV cache to others."),
    ("prefix_query_tokens", "weft_runner_prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
    ("prefix_hit_tokens", "weft_runner_prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
)


class RunnerState(Collector):
    """The state of a runner's models, read with each scrape."""

    def __init__(self, describe: Callable[[], pb.DescribeResponse], limits: MetricLimits) -> None:
        self._describe = describe
        self._most = limits.max_single_series

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the metrics depend on the models."""
        return ()

    @override
    def collect(self) -> Iterator[Metric]:
        description = self._describe()
        states = description.runner.capability.instances
        yield from self._models(states)
        yield from self._caches(description.instances)
        yield from self._engines(states)

    def _models(self, states: Iterable[InstanceState]) -> Iterator[Metric]:
        running = GaugeMetricFamily("weft_runner_requests_running", "Requests that hold a slot.", labels=("model",))
        slots = GaugeMetricFamily("weft_runner_slots", "Requests that it may serve at once.", labels=("model",))
        phases = GaugeMetricFamily("weft_runner_models", "Models and adapters by phase.", labels=("phase",))
        faults = CounterMetricFamily("weft_runner_faults", "Crashes and stalls of the engine.", labels=("model",))
        memory = GaugeMetricFamily(
            "weft_runner_model_memory_bytes", "Accelerator memory of a model, weights and cache.", labels=("model",)
        )
        resident = GaugeMetricFamily(
            "weft_runner_resident_memory_bytes", "Main memory in which an engine is resident.", labels=("model",)
        )
        speed = GaugeMetricFamily(
            "weft_runner_tokens_per_second", "Tokens of all answers per second, over the last 10 s.", labels=("model",)
        )
        states = list(states)
        self._add(running, ((each.model, each.slots_used) for each in states))
        self._add(slots, ((each.model, each.slots_total) for each in states))
        self._add(faults, ((each.model, each.fault_count) for each in states if not each.base_model))
        for phase, found in groupby(sorted(each.phase for each in states)):
            phases.add_metric((_PHASES.get(phase, "unknown"),), len(list(found)))
        self._add(memory, ((each.model, held) for each in states if (held := _memory_bytes(each)) is not None))
        engines = [(each.model, each.memory) for each in states]
        self._add(resident, ((name, each.resident_bytes) for name, each in engines if each.HasField("resident_bytes")))
        self._add(speed, ((each.model, each.tokens_per_second) for each in states if not each.base_model))
        yield from (running, slots, phases, faults, memory, resident, speed)

    def _caches(self, instances: Iterable[pb.InstanceDescription]) -> Iterator[Metric]:
        rate = GaugeMetricFamily(
            "weft_runner_cache_hit_rate", "Share of requests that found some of their prompt cached.", labels=("model",)
        )
        tokens = CounterMetricFamily(
            "weft_runner_prompt_tokens", "Prompt tokens, cached ones included.", labels=("model",)
        )
        cached = CounterMetricFamily(
            "weft_runner_cached_prompt_tokens", "Prompt tokens from the cache.", labels=("model",)
        )
        figures = [(each.model, each.cache) for each in instances]
        lookups = [(name, each, each.hit_count + each.miss_count) for name, each in figures]
        self._add(rate, ((name, each.hit_count / count) for name, each, count in lookups if count))
        self._add(tokens, ((name, each.prompt_token_count) for name, each in figures))
        self._add(cached, ((name, each.cached_token_count) for name, each in figures))
        yield from (rate, tokens, cached)

    def _engines(self, states: Iterable[InstanceState]) -> Iterator[Metric]:
        """Returns the figures that engines report of themselves. Their counters restart at 0 with the engine."""
        figures = [
            (each.model, {field.name: value for field, value in each.engine_load.ListFields()})
            for each in states
            if not each.base_model  # those of an adapter are its model's
        ]
        for kind, described in ((GaugeMetricFamily, _ENGINE_GAUGES), (CounterMetricFamily, _ENGINE_COUNTERS)):
            for field_name, name, meaning in described:
                family = kind(name, meaning, labels=("model",))
                self._add(family, ((model, load[field_name]) for model, load in figures if field_name in load))
                yield family

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[str, float]]) -> None:
        add_bounded(family, (((model,), value) for model, value in values), self._most)


class EngineMetrics(Collector):
    """The metrics of the engines themselves, with the labels `runner` and `model`, and what became of their pages.

    No engine is asked for a page here: they are those from which its load was read, at most some seconds old.
    """

    def __init__(self, runner: str, pages: Callable[[], Mapping[str, EnginePage]], limits: MetricLimits) -> None:
        """`pages`: by model."""
        self._runner = runner
        self._pages = pages
        self._max_series = limits.max_engine_series
        self._most = limits.max_single_series
        self._read: dict[str, tuple[str, PassedOn]] = {}
        """By model the page that was read last, and what it held."""

    def passed_on(self) -> Iterator[Metric]:
        """Returns the metrics of the engines, to be passed on."""
        for page in self._current().values():
            yield from page.families

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the metrics depend on the models."""
        return ()

    @override
    def collect(self) -> Iterator[Metric]:
        failed = CounterMetricFamily(
            "weft_runner_failed_engine_scrapes",
            "Pages of an engine's metrics that could not be read.",
            labels=("model",),
        )
        left_out = GaugeMetricFamily(
            "weft_runner_engine_metrics_left_out",
            "Metrics of an engine that are not passed on: beyond the bound of series, or with a name of weft's.",
            labels=("model",),
        )
        pages, current = self._pages(), self._current()
        add_bounded(failed, (((model,), page.failed_count) for model, page in pages.items()), self._most)
        add_bounded(left_out, (((model,), each.left_out) for model, each in current.items()), self._most)
        yield from (failed, left_out)

    def _current(self) -> dict[str, PassedOn]:
        pages = self._pages()
        read = self._read = {
            model: known
            if (known := self._read.get(model)) is not None and known[0] is page.text
            else (page.text, self._parsed(model, page.text))
            for model, page in pages.items()
            if page.text and self._max_series
        }
        return {model: found for model, (_, found) in read.items()}

    def _parsed(self, model: str, text: str) -> PassedOn:
        labels = {"runner": self._runner, "model": model}
        return passed_on(text, labels, max_series=self._max_series, refused=OWN_NAMES)


def add_runner_metrics(
    page: MetricsPage,
    runner: str,
    describe: Callable[[], pb.DescribeResponse],
    pages: Callable[[], Mapping[str, EnginePage]],
) -> None:
    """Adds the metrics of a runner to the page of its process."""
    page.register(RunnerState(describe, page.limits))
    engines = EngineMetrics(runner, pages, page.limits)
    page.register(engines)
    page.pass_on(engines.passed_on)


def _memory_bytes(state: InstanceState) -> int | None:
    memory = state.memory
    return memory.measured_bytes if memory.HasField("measured_bytes") else memory.leased_bytes or None
