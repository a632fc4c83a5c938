"""Metrics of a runner's HTTP API, and the observer that counts its requests and waits within one queue limit.

Labels are bounded: tenants beyond the limit share the label `other`.
"""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from gateway.errors import DetailedError
from gateway.runner_api.ports import QueueView
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.call import Call, Proceed
from weft.dispatch.request_trace import RequestContext
from weft.gpu.snapshot import DeviceSnapshot
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.metrics import MetricsPage
from weft.kernel.reasons import Reason

MAX_TENANT_LABELS = 64
OTHER_TENANTS = "other"
SUCCESS = "success"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class RunnerMetrics:
    """The counters of one runner's requests."""

    def __init__(self, page: MetricsPage, named_tenants: Iterable[str] = ()) -> None:
        """`named_tenants` always have labels of their own, up to the limit."""
        self._tenants = set(list(named_tenants)[:MAX_TENANT_LABELS])
        self._requests = page.counter(
            "weft_runner_requests",
            "Inference requests by model, tenant and how they ended: 'success' or the reason.",
            ("model", "tenant", "status"),
        )
        self._duration = page.histogram(
            "weft_runner_inference_duration_seconds",
            "From the grant of a slot to the end of the answer.",
            ("model",),
            _SECONDS,
        )
        self._queue_wait = page.histogram(
            "weft_runner_queue_wait_seconds",
            "From arrival to the grant of a slot, model loads not counted.",
            ("model",),
            _SECONDS,
        )

    def ended(self, model: str, tenant: str, status: str) -> None:
        """Count a finished request. `model` is a name that the runner knows, or `unknown`."""
        self._requests.of(model, self._tenant_label(tenant), status).inc()

    def limited(self, model: str, tenant: str) -> None:
        """Count a request that exceeded its tenant's rate limit."""
        self.ended(model, tenant, Reason.RATE_LIMIT_EXCEEDED.name.lower())

    def worked(self, model: str, seconds: float) -> None:
        """Record how long a request occupied a slot."""
        self._duration.of(model).observe(seconds)

    def waited(self, model: str, seconds: float) -> None:
        """Record how long a request waited."""
        self._queue_wait.of(model).observe(seconds)

    def _tenant_label(self, tenant: str) -> str:
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANT_LABELS:
                return OTHER_TENANTS
            self._tenants.add(tenant)
        return tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCollector(Collector):
    """Collects the queue and the devices at each scrape; the figures of models are the runner's own metrics."""

    devices: Callable[[], tuple[DeviceSnapshot, ...] | None]
    """The devices at the last refresh; None: unknown."""
    load: Callable[[], tuple[int, int]]
    """Number of waiting and of running requests."""

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the metrics depend on the models."""
        return ()

    @override
    def collect(self) -> Iterable[Metric]:
        waiting, _ = self.load()
        yield GaugeMetricFamily("weft_runner_queue_depth", "Requests that wait for a slot.", value=waiting)
        yield from _devices(self.devices() or ())


def _devices(devices: tuple[DeviceSnapshot, ...]) -> Iterable[Metric]:
    total = GaugeMetricFamily("weft_runner_gpu_memory_total_bytes", "Memory of an accelerator.", labels=("gpu",))
    used = GaugeMetricFamily(
        "weft_runner_gpu_memory_used_bytes", "Memory of an accelerator in use by any process.", labels=("gpu",)
    )
    use = GaugeMetricFamily(
        "weft_runner_gpu_utilization", "Share of time in which an accelerator computed lately, 0 to 1.", labels=("gpu",)
    )
    power = GaugeMetricFamily("weft_runner_gpu_power_watts", "Power that an accelerator draws.", labels=("gpu",))
    energy = CounterMetricFamily(
        "weft_runner_gpu_energy_joules",
        "Energy that an accelerator has used since its driver was loaded.",
        labels=("gpu",),
    )
    for device in devices:
        labels = (str(device.index),)
        total.add_metric(labels, device.total_bytes)
        if device.used_bytes is not None:
            used.add_metric(labels, device.used_bytes)
        if device.utilization is not None:
            use.add_metric(labels, device.utilization)
        if device.power_milliwatts is not None:
            power.add_metric(labels, device.power_milliwatts / 1e3)
        if device.energy_millijoules is not None:
            energy.add_metric(labels, device.energy_millijoules / 1e3)
    return total, used, use, power, energy


WINDOW_SECONDS = 300.0
MAX_WAITS = 1024


class WaitWindow:
    """Wait times of the last requests: at most MAX_WAITS, at most WINDOW_SECONDS old."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: deque[tuple[float, float]] = deque(maxlen=MAX_WAITS)

    def note(self, seconds: float) -> None:
        """Record how long a request waited."""
        self._waits.append((self._clock.monotonic(), seconds))

    def average_ms(self) -> int | None:
        """Average in whole milliseconds; None: no requests."""
        waits = self._recent()
        return round(sum(waits) / len(waits) * 1000) if waits else None

    def p95_ms(self) -> int | None:
        """95th percentile in whole milliseconds (nearest rank); None: no requests."""
        waits = sorted(self._recent())
        return round(waits[-(-len(waits) * 95 // 100) - 1] * 1000) if waits else None

    def _recent(self) -> list[float]:
        oldest = self._clock.monotonic() - WINDOW_SECONDS
        while self._waits and self._waits[0][0] < oldest:
            self._waits.popleft()
        return [seconds for _, seconds in self._waits]


FULL_RETRY_SECONDS = 5.0

T = TypeVar("T")


class RequestObserver:
    """Admits requests while the queue has room; records their outcome."""

    def __init__(
        self,
        *,
        queue: QueueView,
        max_queue_depth: int,
        metrics: RunnerMetrics,
        model_label: Callable[[str], str],
        clock: Clock,
    ) -> None:
        self._queue = queue
        self._max_queue_depth = max_queue_depth
        self._metrics = metrics
        self._model_label = model_label
        self._clock = clock
        self.waits = WaitWindow(clock)

    def now(self) -> float:
        """Seconds on the monotonic clock."""
        return self._clock.monotonic()

    def admit(self) -> None:
        """Raises QUEUE_FULL where the queue is full. The scheduler enforces a limit of 0: only it knows the slots."""
        if 0 < self._max_queue_depth <= self._queue.load[0]:
            raise WeftError(Reason.QUEUE_FULL, "the queue is full", retry_after_seconds=FULL_RETRY_SECONDS)

    def public_error(self, error: WeftError) -> WeftError:
        """Returns the error as it is shown to the caller."""
        if error.reason is not Reason.QUEUE_FULL:
            return error
        depth, seconds = self._queue.load[0], error.retry_after_seconds or FULL_RETRY_SECONDS
        return DetailedError(
            Reason.QUEUE_FULL,
            f"Queue depth {depth}/{self._max_queue_depth}, retry in {seconds:.0f} seconds",
            details={
                "queueDepth": depth,
                "maxDepth": self._max_queue_depth,
                "avgWaitMs": self.waits.average_ms(),
            },
            retry_after_seconds=seconds,
        )

    def around(self, call: Call[T], /, proceed: Proceed[T]) -> AsyncGenerator[T]:
        """The layer that admits and records calls. One that takes no slot is neither queued nor counted in waits."""
        return self._observed(call, proceed) if call.spec.takes_slot else proceed(call)

    async def _observed(self, call: Call[T], proceed: Proceed[T]) -> AsyncGenerator[T]:
        began = self.now()
        failure: WeftError | None = None
        try:
            self.admit()
            async with aclosing(proceed(call)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except WeftError as error:
            failure = self.public_error(error)
            raise failure from error
        finally:
            self.ended(call.context, call.receipt, failure, began)

    def ended(
        self, context: RequestContext, receipt: receipt_pb2.Receipt | None, error: WeftError | None, began: float
    ) -> None:
        """Record a finished request with its outcome."""
        model = self._model_label(context.model)
        reason = _reason(receipt, error)
        self._metrics.ended(model, context.tenant, SUCCESS if reason is Reason.UNSPECIFIED else reason.name.lower())
        if receipt is None:
            return
        waited = receipt.queue_wait.ToNanoseconds() / 1e9
        had_slot = bool(receipt.attempts)
        if had_slot or reason is Reason.QUEUE_TIMEOUT:
            self.waits.note(waited)
            self._metrics.waited(model, waited)
        if had_slot:
            loading = receipt.load_wait.ToNanoseconds() / 1e9
            self._metrics.worked(model, max(0.0, self.now() - began - waited - loading))


def _reason(receipt: receipt_pb2.Receipt | None, error: WeftError | None) -> Reason:
    if receipt is not None:
        return Reason(receipt.reason)
    return Reason.CANCELLED if error is None else error.reason
