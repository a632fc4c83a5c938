"""Prometheus metrics of a runner. Labels are bounded: tenants beyond the limit share the label `other`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.runner_api.facts import DeviceFacts, RunnerFacts
from weft.kernel.reasons import Reason

MAX_TENANT_LABELS = 64
OTHER_TENANTS = "other"
SUCCESS = "success"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class RunnerMetrics:
    """The counters of one runner's requests."""

    def __init__(self, registry: CollectorRegistry, named_tenants: Iterable[str] = ()) -> None:
        """`named_tenants` have labels of their own in any case, as far as there is room."""
        self.registry = registry
        self._tenants = set(list(named_tenants)[:MAX_TENANT_LABELS])
        self._requests = Counter(
            "weft_runner_requests",
            "Inference requests by model, tenant and how they ended: 'success' or the reason.",
            ("model", "tenant", "status"),
            registry=registry,
        )
        self._duration = Histogram(
            "weft_runner_inference_duration_seconds",
            "From the grant of a slot to the end of the answer.",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._queue_wait = Histogram(
            "weft_runner_queue_wait_seconds",
            "From arrival to the grant of a slot, model loads not counted.",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )

    def ended(self, model: str, tenant: str, status: str) -> None:
        """Count a finished request. `model` is a name that the runner knows, or `unknown`."""
        self._requests.labels(model, self._tenant_label(tenant), status).inc()

    def limited(self, model: str, tenant: str) -> None:
        """Count a request that exceeded its tenant's rate limit."""
        self.ended(model, tenant, Reason.RATE_LIMIT_EXCEEDED.name.lower())

    def worked(self, model: str, seconds: float) -> None:
        """Record how long a request occupied a slot."""
        self._duration.labels(model).observe(seconds)

    def waited(self, model: str, seconds: float) -> None:
        """Record how long a request waited."""
        self._queue_wait.labels(model).observe(seconds)

    def _tenant_label(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANT_LABELS:
                return OTHER_TENANTS
            self._tenants.add(tenant)
        return tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCollector(Collector):
    """Collects the runner's state at each scrape."""

    facts: Callable[[], RunnerFacts]
    devices: Callable[[], tuple[DeviceFacts, ...] | None]
    """As last observed; None: unknown."""
    load: Callable[[], tuple[int, int]]
    """Number of waiting and of running requests."""

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the metrics depend on the models."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        waiting, _ = self.load()
        yield GaugeMetricFamily("weft_runner_queue_depth", "Requests that wait for a slot.", value=waiting)
        yield from _devices(self.devices() or ())
        yield from _models(self.facts())


def _devices(devices: tuple[DeviceFacts, ...]) -> Iterable[Metric]:
    total = GaugeMetricFamily("weft_runner_gpu_memory_total_bytes", "Memory of an accelerator.", labels=("gpu",))
    used = GaugeMetricFamily(
        "weft_runner_gpu_memory_used_bytes", "Memory of an accelerator in use, by whomever.", labels=("gpu",)
    )
    for device in devices:
        total.add_metric((str(device.index),), device.total_bytes)
        if device.used_bytes is not None:
            used.add_metric((str(device.index),), device.used_bytes)
    return total, used


def _models(facts: RunnerFacts) -> Iterable[Metric]:
    running = GaugeMetricFamily("weft_runner_requests_running", "Requests that hold a slot.", labels=("model",))
    memory = GaugeMetricFamily(
        "weft_runner_model_memory_bytes", "Accelerator memory of a model, weights and cache.", labels=("model",)
    )
    rate = GaugeMetricFamily(
        "weft_runner_cache_hit_rate", "Share of requests that found some of their prompt cached.", labels=("model",)
    )
    tokens = CounterMetricFamily("weft_runner_prompt_tokens", "Prompt tokens, cached ones included.", labels=("model",))
    cached = CounterMetricFamily("weft_runner_cached_prompt_tokens", "Prompt tokens from the cache.", labels=("model",))
    for model in facts.models:
        running.add_metric((model.name,), model.slots_used)
        if model.memory_bytes is not None:
            memory.add_metric((model.name,), model.memory_bytes)
        counts = model.cache
        if counts.hits + counts.misses:
            rate.add_metric((model.name,), counts.hits / (counts.hits + counts.misses))
        tokens.add_metric((model.name,), counts.prompt_tokens)
        cached.add_metric((model.name,), counts.cached_tokens)
    return running, memory, rate, tokens, cached
