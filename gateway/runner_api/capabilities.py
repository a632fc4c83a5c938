"""GET /v1/capabilities: the capability document from a runner's facts, and its cache. Unknown values are null."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.answers.answer_builder import encode_json
from gateway.runner_api.ports import DeviceUse, ModelFacts, ModelStage, RunnerFacts, RunnerPort
from weft.gpu.snapshot import DeviceSnapshot
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.service import start_critical, stop_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The health of a runner. `reason` and `message` are empty unless it is unhealthy."""

    status: str
    """healthy, degraded or unhealthy."""
    reason: str = ""
    message: str = ""

    @property
    def is_unhealthy(self) -> bool:
        """Whether a health check fails."""
        return self.status == "unhealthy"


def verdict_of(facts: RunnerFacts, waiting: int, max_queue_depth: int) -> Verdict:
    """Unhealthy when accelerator memory ran out, every model failed to load, or the queue is full."""
    starved = [model.name for model in facts.models if model.out_of_memory]
    failed = [model.name for model in facts.models if model.stage is ModelStage.FAILED]
    if starved:
        return Verdict(
            status="unhealthy",
            reason="gpu_out_of_memory",
            message=f"accelerator memory ran out for {', '.join(starved)}",
        )
    if failed and len(failed) == len(facts.models):
        return Verdict(status="unhealthy", reason="all_models_failed", message="every model failed to load")
    if 0 < max_queue_depth <= waiting:
        return Verdict(
            status="unhealthy", reason="queue_saturated", message=f"the queue is full: {waiting}/{max_queue_depth}"
        )
    return Verdict(status="degraded" if failed else "healthy")


MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """The queue in front of the runner."""

    depth: int
    max_depth: int
    average_wait_ms: int | None = None
    p95_wait_ms: int | None = None


def capabilities_body(
    facts: RunnerFacts, devices: Sequence[DeviceSnapshot] | None, queue: QueueFacts
) -> dict[str, object]:
    """Returns the body of GET /v1/capabilities."""
    return {
        "runnerType": facts.kind,
        "runnerId": facts.name,
        "models": {
            "loaded": [_loaded(model) for model in facts.models if model.stage is ModelStage.LOADED],
            "loading": [_loading(model) for model in facts.models if model.stage is ModelStage.LOADING],
            # A failed model can be requested again, and the answer gives the reason.
            "available": [
                model.name for model in facts.models if model.stage in (ModelStage.AVAILABLE, ModelStage.FAILED)
            ],
        },
        "resources": _resources(devices) | _cache_figures(facts.models) | {"devices": _devices(devices, facts)},
        "queue": {
            "depth": queue.depth,
            "maxDepth": queue.max_depth,
            "avgWaitMs": queue.average_wait_ms,
            "p95WaitMs": queue.p95_wait_ms,
        },
        "capabilities": {
            "streaming": True,
            "prefixCaching": _prefix_caching(facts.models),
            "multiTenant": _all_or_unknown([model.tenants_apart for model in facts.models]),
            "visionInput": any(model.description.vision_input for model in facts.models),
            "audioInput": any(model.takes_audio for model in facts.models),
            "functionCalling": any(model.calls_tools for model in facts.models),
        },
        "health": verdict_of(facts, queue.depth, queue.max_depth).status,
    }


def megabytes(count: int | None) -> int | None:
    """Returns bytes as whole MiB, rounded; None stays None."""
    return None if count is None else round(count / MEBIBYTE)


def _loaded(model: ModelFacts) -> dict[str, object]:
    return {
        "id": model.name,
        "quantization": model.description.load_options.quantization or model.state.model_file.quantization or None,
        "contextLength": model.state.context_tokens or None,
        "loadedAt": model.loaded_at,
        "gpuMemoryMB": megabytes(model.memory_bytes),
        "weightsMB": megabytes(_reported(model, "weight_bytes")),
        "kvCacheMB": megabytes(_reported(model, "kv_cache_bytes")),
        "kvCacheTokens": _reported(model, "kv_cache_tokens"),
        "kvCacheUtilization": _reported(model, "kv_cache_share"),
    }


_EngineFigure = Literal["weight_bytes", "kv_cache_bytes", "kv_cache_tokens", "kv_cache_share"]


def _reported(model: ModelFacts, name: _EngineFigure) -> Any:
    """Returns a figure that an engine reports of itself; None: it does not."""
    load = model.state.engine_load
    return getattr(load, name) if load.HasField(name) else None


def _cache_figures(models: Sequence[ModelFacts]) -> dict[str, object]:
    """Returns the size and use of all KV caches; null unless each engine reports its own.

    Adapters use the cache of their model.
    """
    loaded = [model for model in models if model.stage is ModelStage.LOADED and not model.state.base_model]
    sizes = [_reported(model, "kv_cache_bytes") for model in loaded]
    shares = [_reported(model, "kv_cache_share") for model in loaded]
    size = None if not sizes or None in sizes else sum(sizes)
    use = shares[0] if len(shares) == 1 else None
    if len(shares) > 1 and size and None not in shares:
        use = round(sum(share * each for share, each in zip(shares, sizes, strict=True)) / size, 3)
    return {"kvCacheSizeMB": megabytes(size), "kvCacheUtilization": use}


def _loading(model: ModelFacts) -> dict[str, object]:
    state = model.state
    return {
        "id": model.name,
        "progress": state.load_progress if state.HasField("load_progress") else None,
        "eta": round(state.load_eta.ToNanoseconds() / 1e9) if state.HasField("load_eta") else None,
    }


def _resources(devices: Sequence[DeviceSnapshot] | None) -> dict[str, object]:
    if devices is None:
        ids = total = used = None
    else:
        ids = [device.index for device in devices]
        total = sum(device.total_bytes for device in devices)
        used = _sum_or_unknown([device.used_bytes for device in devices])
    shares = [device.utilization for device in devices or () if device.utilization is not None]
    is_known = devices is not None and len(shares) == len(devices) > 0
    return {
        "gpuIds": ids,
        "gpuMemoryTotalMB": megabytes(total),
        "gpuMemoryUsedMB": megabytes(used),
        "gpuMemoryFreeMB": None if total is None or used is None else megabytes(max(0, total - used)),
        "gpuUtilization": round(sum(shares) / len(shares), 3) if is_known else None,
    }


def _devices(devices: Sequence[DeviceSnapshot] | None, facts: RunnerFacts) -> list[dict[str, object]] | None:
    """Returns what is known of each device; null stands for what is not."""
    return None if devices is None else [_device(device, facts.device_use.get(device.index)) for device in devices]


def _device(device: DeviceSnapshot, use: DeviceUse | None) -> dict[str, object]:
    use = use or DeviceUse()
    watts, joules = device.power_milliwatts, device.energy_millijoules
    return {
        "id": device.index,
        "uuid": device.id,
        "name": device.name,
        "memoryTotalMB": megabytes(device.total_bytes),
        "memoryUsedMB": megabytes(device.used_bytes),
        "memoryByModelMB": {model: megabytes(amount) for model, amount in sorted(use.bytes_by_model.items())},
        "memoryForeignMB": megabytes(use.foreign_bytes),
        "utilization": device.utilization,
        "utilizationLastMinute": None if use.mean_utilization is None else round(use.mean_utilization, 3),
        "powerWatts": None if watts is None else round(watts / 1e3, 1),
        "energyJoules": None if joules is None else round(joules / 1e3, 3),
    }


def _sum_or_unknown(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def _prefix_caching(models: Sequence[ModelFacts]) -> bool | None:
    """Returns True where a cache isolates tenants or had hits; None (unknown) for a foreign server."""
    if any(model.tenants_apart or model.description.cache.hit_count for model in models):
        return True
    return None if models else False


def _all_or_unknown(answers: Sequence[bool | None]) -> bool | None:
    if any(answer is False for answer in answers):
        return False
    return None if not answers or any(answer is None for answer in answers) else True


TTL_SECONDS = 5.0
"""Normal maximum age of an answer; also its `max-age` for clients."""
STALE_SECONDS = 3 * TTL_SECONDS
"""Age beyond which an answer is not served."""
DEVICES_TIMEOUT_SECONDS = 2.0

Stages = tuple[tuple[str, ModelStage], ...]

log = get_logger("weft.gateway")


class CapabilityCache:
    """Keeps the capability document fresh in the background. Life cycle: start, stop."""

    def __init__(self, runner: RunnerPort, queue: Callable[[], QueueFacts], clock: Clock) -> None:
        self._runner = runner
        self._queue = queue
        self._clock = clock
        self._body = b""
        self._composed_at = 0.0
        self._stages: Stages = ()
        self._task: asyncio.Task[None] | None = None
        self.devices: tuple[DeviceSnapshot, ...] | None = None
        """The devices at the last refresh; None: unknown."""

    async def start(self) -> None:
        """Compose the first answer and keep it fresh."""
        await self.refresh()
        self._task = start_critical(self._keep_fresh(), name="runner-capabilities")

    async def stop(self) -> None:
        """Stop. Idempotent."""
        if self._task is not None:
            await stop_tasks([self._task])
            self._task = None

    def body(self) -> bytes:
        """Returns the newest answer, as JSON. Raises SERVICE_UNAVAILABLE when it is older than STALE_SECONDS.

        A model that was loaded or unloaded since is reported at once: callers poll for that.
        """
        facts = self._runner.facts()
        if _stages(facts) != self._stages:
            self._compose(facts)
        if not self._body or self._clock.monotonic() - self._composed_at > STALE_SECONDS:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the state of the runner is unknown")
        return self._body

    async def refresh(self) -> None:
        """Rebuild the answer."""
        self.devices = await self._devices()
        self._compose(self._runner.facts())
        self._composed_at = self._clock.monotonic()

    def _compose(self, facts: RunnerFacts) -> None:
        self._stages = _stages(facts)
        self._body = encode_json(capabilities_body(facts, self.devices, self._queue()))

    async def _devices(self) -> tuple[DeviceSnapshot, ...] | None:
        try:
            async with asyncio.timeout(DEVICES_TIMEOUT_SECONDS):
                return await self._runner.devices()
        except TimeoutError:
            return None

    async def _keep_fresh(self) -> None:
        while True:
            await self._clock.sleep(TTL_SECONDS)
            try:
                await self.refresh()
            except Exception:
                # The last answer stays until it is stale; without the loop it would stay stale.
                log.exception("the capability descriptor could not be composed")


def _stages(facts: RunnerFacts) -> Stages:
    return tuple((model.name, model.stage) for model in facts.models)
