"""Prometheus metrics of a runner: its models and their memory, caches and loads, and the engines' own metrics."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from prometheus_client.core import Metric

from runner_svc.backend.port import EnginePage
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.telemetry.metrics_page import MetricsPage, PassedOn, passed_on

OWN_NAMES = ("weft_", "gen_ai_")
"""Name prefixes that are dropped from engine metrics, because they would look like weft's."""
_MODEL = ("model",)
_PHASES = {number: name.removeprefix("PHASE_").lower() for name, number in InstanceState.Phase.items()}
_ENGINE_GAUGES = (
    ("running_count", "weft_runner_engine_requests_running", "Requests running in the engine."),
    ("waiting_count", "weft_runner_engine_requests_waiting", "Requests waiting for KV cache space in the engine."),
    ("other_count", "weft_runner_engine_requests_of_others", "Requests in the engine from other clients."),
    ("kv_cache_share", "weft_runner_kv_cache_share", "Share of the KV cache that is in use, 0 to 1."),
    ("kv_cache_tokens", "weft_runner_kv_cache_tokens", "Capacity of the KV cache."),
    ("kv_cache_bytes", "weft_runner_kv_cache_bytes", "Memory of the KV cache."),
    ("weight_bytes", "weft_runner_weight_bytes", "Memory of the weights."),
)
_ENGINE_COUNTERS = (
    (
        "preemption_count",
        "weft_runner_preemptions",
        "Preempted requests: those that lost their KV cache space to others.",
    ),
    ("prefix_query_tokens", "weft_runner_prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
    ("prefix_hit_tokens", "weft_runner_prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
)


def _memory_bytes(state: InstanceState) -> int | None:
    memory = state.memory
    return memory.measured_bytes if memory.HasField("measured_bytes") else memory.leased_bytes or None


_MODEL_FIGURES: tuple[tuple[str, str, Callable[[InstanceState], float | None]], ...] = (
    ("weft_runner_requests_running", "Running requests.", lambda state: state.slots_used),
    ("weft_runner_slots", "Maximum number of concurrent requests.", lambda state: state.slots_total),
    (
        "weft_runner_model_memory_bytes",
        "Accelerator memory of a model, including weights and cache.",
        _memory_bytes,
    ),
    (
        "weft_runner_resident_memory_bytes",
        "Resident main memory of an engine.",
        lambda state: state.memory.resident_bytes if state.memory.HasField("resident_bytes") else None,
    ),
    (
        "weft_runner_tokens_per_second",
        "Output tokens per second over the last 10 s.",
        lambda state: None if state.base_model else state.tokens_per_second,
    ),
)


def _runner_metrics(describe: Callable[[], pb.DescribeResponse], page: MetricsPage) -> Iterator[Metric]:
    description = describe()
    states = description.runner.capability.instances
    yield from _model_metrics(states, page)
    yield from _cache_metrics(description.instances, page)
    yield from _load_metrics([each for each in states if not each.base_model], page)


def _model_metrics(states: Collection[InstanceState], page: MetricsPage) -> Iterator[Metric]:
    for name, meaning, figure in _MODEL_FIGURES:
        yield page.gauge(name, meaning, _MODEL, _by_model((each.model, figure(each)) for each in states))
    phases = Counter((_PHASES.get(each.phase, "unknown"),) for each in states)
    yield page.gauge("weft_runner_models", "Models and adapters by phase.", ("phase",), phases.items())
    faults = _by_model((each.model, each.fault_count) for each in states if not each.base_model)
    yield page.count("weft_runner_faults", "Crashes and stalls of the engine.", _MODEL, faults)


def _cache_metrics(instances: Iterable[pb.InstanceDescription], page: MetricsPage) -> Iterator[Metric]:
    caches = [(each.model, each.cache) for each in instances]
    lookups = [(model, each.hit_count, each.hit_count + each.miss_count) for model, each in caches]
    yield page.gauge(
        "weft_runner_cache_hit_rate",
        "Share of requests with a part of their prompt in the cache.",
        _MODEL,
        _by_model((model, hits / count) for model, hits, count in lookups if count),
    )
    prompts = _by_model((model, each.prompt_token_count) for model, each in caches)
    yield page.count("weft_runner_prompt_tokens", "Prompt tokens, including cached ones.", _MODEL, prompts)
    cached = _by_model((model, each.cached_token_count) for model, each in caches)
    yield page.count("weft_runner_cached_prompt_tokens", "Prompt tokens from the cache.", _MODEL, cached)
    prewarmed = _by_model((model, each.prewarmed_token_count) for model, each in caches)
    yield page.count(
        "weft_runner_prewarmed_prompt_tokens", "Prompt tokens of agents processed while idle.", _MODEL, prewarmed
    )
    restored = _by_model((model, each.restored_prompt_count) for model, each in caches)
    yield page.count("weft_runner_restored_prompts", "Prompts restored from memory or disk.", _MODEL, restored)
    stored = _by_model((model, each.stored_bytes) for model, each in caches)
    yield page.gauge("weft_runner_stored_prompt_bytes", "Size of a model's prompts on disk.", _MODEL, stored)


def _load_metrics(states: Iterable[InstanceState], page: MetricsPage) -> Iterator[Metric]:
    """Yields the figures that engines report. Their counters restart at 0 with the engine."""
    loads = [(each.model, {field.name: value for field, value in each.engine_load.ListFields()}) for each in states]
    for family, described in ((page.gauge, _ENGINE_GAUGES), (page.count, _ENGINE_COUNTERS)):
        for field_name, name, meaning in described:
            yield family(name, meaning, _MODEL, _by_model((model, load.get(field_name)) for model, load in loads))


def _by_model(values: Iterable[tuple[str, float | None]]) -> Iterator[tuple[tuple[str], float]]:
    return (((model,), value) for model, value in values if value is not None)


class EnginePages:
    """The engines' own metrics with the labels `runner` and `model`, and how much of each page was passed on.

    No engine is queried here: the pages are those from which its load was read, at most some seconds old.
    """

    def __init__(self, page: MetricsPage, runner: str, pages: Callable[[], Mapping[str, EnginePage]]) -> None:
        """`pages`: by model."""
        self._page = page
        self._runner = runner
        self._pages = pages
        self._read: dict[str, tuple[str, PassedOn]] = {}
        """By model: the last page that was read, and its content."""

    def collect(self) -> Iterator[Metric]:
        """Yields the engines' metrics, and those about their pages."""
        pages, current = self._pages(), self._current()
        yield self._page.count(
            "weft_runner_failed_engine_scrapes",
            "Failed scrapes of an engine's metrics.",
            _MODEL,
            _by_model((model, each.failed_count) for model, each in pages.items()),
        )
        yield self._page.gauge(
            "weft_runner_engine_metrics_left_out",
            "Engine metrics that were not exported, because of the series limit or a name conflict with weft.",
            _MODEL,
            _by_model((model, each.left_out) for model, each in current.items()),
        )
        for found in current.values():
            yield from found.families

    def _current(self) -> dict[str, PassedOn]:
        most = self._page.limits.max_engine_series
        read = self._read = {
            model: known
            if (known := self._read.get(model)) is not None and known[0] is page.text
            else (page.text, self._parsed(model, page.text, most))
            for model, page in self._pages().items()
            if page.text and most
        }
        return {model: found for model, (_, found) in read.items()}

    def _parsed(self, model: str, text: str, most: int) -> PassedOn:
        return passed_on(text, {"runner": self._runner, "model": model}, max_series=most, refused=OWN_NAMES)


def add_runner_metrics(
    page: MetricsPage,
    runner: str,
    describe: Callable[[], pb.DescribeResponse],
    pages: Callable[[], Mapping[str, EnginePage]],
) -> None:
    """Adds the metrics of a runner to the page of its process."""
    page.add(partial(_runner_metrics, describe, page))
    page.add(EnginePages(page, runner, pages).collect)
