"""The queue limit of a runner's HTTP API, and its metrics. Tenants beyond the limit share the label `other`."""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from prometheus_client.core import Metric

from gateway.errors import DetailedError
from weft.dispatch.call import Call, Proceed
from weft.gpu.snapshot import DeviceSnapshot
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft.kernel.telemetry.tracing import error_type
from weft.kernel.time.clock import Clock

MAX_TENANT_LABELS = 64
OTHER_TENANTS = "other"
SUCCESS = "success"
FULL_RETRY_SECONDS = 5.0
WINDOW_SECONDS = 300.0
MAX_WAITS = 1024
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

T = TypeVar("T")


class QueueView(Protocol):
    """The queue in front of the runner; see `router_svc.router_service.RouterService`."""

    @property
    def load(self) -> tuple[int, int]:
        """Number of waiting and of running requests."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """The queue in front of the runner, and the waits of its last requests; None: no requests."""

    depth: int
    max_depth: int
    average_wait_ms: int | None = None
    p95_wait_ms: int | None = None


class RequestObserver:
    """Admits requests while the queue has room; records their outcomes and their latest waits."""

    def __init__(
        self,
        page: MetricsPage,
        *,
        queue: QueueView,
        max_queue_depth: int,
        model_label: Callable[[str], str],
        clock: Clock,
        named_tenants: Iterable[str] = (),
    ) -> None:
        """`named_tenants` always get their own labels, up to the limit."""
        self._queue = queue
        self._max_queue_depth = max_queue_depth
        self._model_label = model_label
        self._clock = clock
        self._waits: deque[tuple[float, float]] = deque(maxlen=MAX_WAITS)
        self._tenants = set(list(named_tenants)[:MAX_TENANT_LABELS])
        self._requests = page.counter(
            "weft_runner_requests",
            "Inference requests by model, tenant and how they ended: 'success' or the reason.",
            ("model", "tenant", "status"),
        )
        self._duration = page.histogram(
            "weft_runner_inference_duration_seconds",
            "Time from the grant of a slot to the end of the answer.",
            ("model",),
            _SECONDS,
        )
        self._queue_wait = page.histogram(
            "weft_runner_queue_wait_seconds",
            "Time from arrival to the grant of a slot, without model loads.",
            ("model",),
            _SECONDS,
        )

    def queue_facts(self) -> QueueFacts:
        """Returns the queue's depth, limit and waits: their average and 95th percentile (nearest rank)."""
        oldest = self._clock.monotonic() - WINDOW_SECONDS
        waits = sorted(seconds for noted, seconds in self._waits if noted >= oldest)
        return QueueFacts(
            depth=self._queue.load[0],
            max_depth=self._max_queue_depth,
            average_wait_ms=round(sum(waits) / len(waits) * 1000) if waits else None,
            p95_wait_ms=round(waits[-(-len(waits) * 95 // 100) - 1] * 1000) if waits else None,
        )

    def around(self, call: Call[T], /, proceed: Proceed[T]) -> AsyncGenerator[T]:
        """The layer that admits and records calls. Calls that take no slot pass unchanged."""
        return self._observed(call, proceed) if call.spec.takes_slot else proceed(call)

    def note_wait(self, seconds: float) -> None:
        """Records how long a request waited."""
        self._waits.append((self._clock.monotonic(), seconds))

    def limited(self, model: str, tenant: str) -> None:
        """Counts a request that exceeded its tenant's rate limit."""
        self._ended(model, tenant, Reason.RATE_LIMIT_EXCEEDED)

    async def _observed(self, call: Call[T], proceed: Proceed[T]) -> AsyncGenerator[T]:
        began = self._clock.monotonic()
        failure: WeftError | None = None
        try:
            self._admit()
            async with aclosing(proceed(call)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except WeftError as error:
            failure = self._with_queue(error) if error.reason is Reason.QUEUE_FULL else error
            raise failure from error
        finally:
            self._record(call, failure, began)

    def _admit(self) -> None:
        """Raises QUEUE_FULL. A limit of 0 is enforced by the scheduler, which knows the slots."""
        if 0 < self._max_queue_depth <= self._queue.load[0]:
            raise WeftError(Reason.QUEUE_FULL, "the queue is full", retry_after_seconds=FULL_RETRY_SECONDS)

    def _with_queue(self, error: WeftError) -> WeftError:
        """Adds the queue's figures to the error of a full queue."""
        queue, seconds = self.queue_facts(), error.retry_after_seconds or FULL_RETRY_SECONDS
        return DetailedError(
            Reason.QUEUE_FULL,
            f"Queue depth {queue.depth}/{queue.max_depth}, retry in {seconds:.0f} seconds",
            details={"queueDepth": queue.depth, "maxDepth": queue.max_depth, "avgWaitMs": queue.average_wait_ms},
            retry_after_seconds=seconds,
        )

    def _record(self, call: Call[T], error: WeftError | None, began: float) -> None:
        model, receipt = self._model_label(call.context.model), call.receipt
        if receipt is None:
            self._ended(model, call.context.tenant, Reason.CANCELLED if error is None else error.reason)
            return
        reason, waited = Reason(receipt.reason), receipt.queue_wait.ToNanoseconds() / 1e9
        self._ended(model, call.context.tenant, reason)
        had_slot = bool(receipt.attempts)
        if had_slot or reason is Reason.QUEUE_TIMEOUT:
            self.note_wait(waited)
            self._queue_wait[model,].observe(waited)
        if had_slot:
            loading = receipt.load_wait.ToNanoseconds() / 1e9
            self._duration[model,].observe(max(0.0, self._clock.monotonic() - began - waited - loading))

    def _ended(self, model: str, tenant: str, reason: Reason) -> None:
        """Counts a finished request. `model` is a name that the runner knows, or `unknown`."""
        if tenant not in self._tenants and len(self._tenants) < MAX_TENANT_LABELS:
            self._tenants.add(tenant)
        label = tenant if tenant in self._tenants else OTHER_TENANTS
        self._requests[model, label, error_type(reason) or SUCCESS].inc()


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1e3


_DEVICE_FIGURES: tuple[tuple[str, str, str, Callable[[DeviceSnapshot], float | None]], ...] = (
    ("gauge", "weft_runner_gpu_memory_total_bytes", "Memory of an accelerator.", lambda device: device.total_bytes),
    (
        "gauge",
        "weft_runner_gpu_memory_used_bytes",
        "Memory of an accelerator in use by any process.",
        lambda device: device.used_bytes,
    ),
    (
        "gauge",
        "weft_runner_gpu_utilization",
        "Recent utilization of an accelerator, 0 to 1.",
        lambda device: device.utilization,
    ),
    (
        "gauge",
        "weft_runner_gpu_power_watts",
        "Power draw of an accelerator.",
        lambda device: _thousandth(device.power_milliwatts),
    ),
    (
        "count",
        "weft_runner_gpu_energy_joules",
        "Energy used by an accelerator since its driver was loaded.",
        lambda device: _thousandth(device.energy_millijoules),
    ),
)


def add_state_metrics(
    page: MetricsPage, queue: QueueView, devices: Callable[[], tuple[DeviceSnapshot, ...] | None]
) -> None:
    """Adds metrics of the queue and of the devices at their last reading. The runner itself exports those of models."""

    def collect() -> Iterator[Metric]:
        yield page.figure("weft_runner_queue_depth", "Requests waiting for a slot.", queue.load[0])
        found = devices() or ()
        for family, name, meaning, figure in _DEVICE_FIGURES:
            figures = ((str(device.index), figure(device)) for device in found)
            values = (((index,), value) for index, value in figures if value is not None)
            yield getattr(page, family)(name, meaning, ("gpu",), values)

    page.add(collect)
