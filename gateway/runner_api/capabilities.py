"""GET /v1/capabilities and /health: a runner's state in the format of its API. Unknown values are null."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from gateway.gateway_health import component_fields, unhealthy_response
from gateway.request_facts import facts_of
from gateway.runner_api.deps import RunnerApi
from gateway.runner_api.facts import ModelFacts, ModelStage, RunnerFacts, RunnerStage
from gateway.runner_api.runner_api_metrics import QueueFacts
from weft.api.registry.v1.model_pb2 import MODEL_SKILL_AUDIO
from weft.gpu.snapshot import DeviceSnapshot, DeviceUse
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json

MEBIBYTE = 1024 * 1024
START_RETRY_SECONDS = 2.0


async def get_capabilities(deps: RunnerApi, request: Request) -> Response:
    """Returns the capabilities and the state of the runner. Answers 503 while it starts or stops."""
    facts_of(request.scope).surface = "capabilities"
    facts = deps.runner.facts()
    if facts.stage is RunnerStage.STARTING:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the runner is starting", retry_after_seconds=START_RETRY_SECONDS)
    if facts.stage is RunnerStage.STOPPING:
        raise WeftError(Reason.SHUTTING_DOWN, "the runner is shutting down", retry_after_seconds=START_RETRY_SECONDS)
    if deps.devices.is_stale:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the state of the runner is unknown")
    body = capabilities_body(facts, deps.devices.found, deps.observer.queue_facts())
    return Response(encode_json(body), media_type="application/json", headers={"cache-control": "max-age=5"})


async def get_health(deps: RunnerApi, request: Request) -> Response:
    """Answers 200 if the runner can serve requests; 503 if memory ran out, all models failed or the queue is full."""
    request_facts = facts_of(request.scope)
    request_facts.surface = "health"
    facts, queue = deps.runner.facts(), deps.observer.queue_facts()
    verdict = verdict_of(facts, queue)
    body: dict[str, object] = {
        "status": verdict.status,
        "uptime": int(deps.inference.clock.monotonic() - deps.started),
        "modelsLoaded": sum(model.stage is ModelStage.LOADED for model in facts.models),
        "queueDepth": queue.depth,
        **component_fields(deps.inference, request),
    }
    if verdict.error is None:
        return Response(encode_json(body), media_type="application/json")
    request_facts.error = verdict.error
    return unhealthy_response(body | {"reason": verdict.reason}, verdict.error, request_facts.request_id)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The health of a runner."""

    status: str
    """healthy, degraded or unhealthy."""
    reason: str = ""
    """Machine-readable reason why it is unhealthy."""
    error: WeftError | None = None


def verdict_of(facts: RunnerFacts, queue: QueueFacts) -> Verdict:
    """Returns `unhealthy` if accelerator memory ran out, all models failed to load, or the queue is full."""
    starved = [model.name for model in facts.models if model.out_of_memory]
    failed = [model.name for model in facts.models if model.stage is ModelStage.FAILED]
    if starved:
        message = f"accelerator memory ran out for {', '.join(starved)}"
        return Verdict("unhealthy", "gpu_out_of_memory", WeftError(Reason.OUT_OF_MEMORY, message))
    if failed and len(failed) == len(facts.models):
        error = WeftError(Reason.BACKEND_NOT_READY, "every model failed to load")
        return Verdict("unhealthy", "all_models_failed", error)
    if 0 < queue.max_depth <= queue.depth:
        message = f"the queue is full: {queue.depth}/{queue.max_depth}"
        return Verdict("unhealthy", "queue_saturated", WeftError(Reason.QUEUE_FULL, message))
    return Verdict("degraded" if failed else "healthy")


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
            # A failed model can be requested again; the answer then has the reason.
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
            "audioInput": any(MODEL_SKILL_AUDIO in model.state.abilities.skills for model in facts.models),
            "functionCalling": any(model.calls_tools for model in facts.models),
        },
        "health": verdict_of(facts, queue).status,
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
    """Returns a figure that the engine reports; None: it does not."""
    load = model.state.engine_load
    return getattr(load, name) if load.HasField(name) else None


def _cache_figures(models: Sequence[ModelFacts]) -> dict[str, object]:
    """Returns size and use of all KV caches; null unless every engine reports its own. Adapters use their model's."""
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
    return None if devices is None else [_device(device, facts.device_use.get(device.index)) for device in devices]


def _device(device: DeviceSnapshot, use: DeviceUse | None) -> dict[str, object]:
    watts, joules = device.power_milliwatts, device.energy_millijoules
    mean = None if use is None else use.mean_utilization
    return {
        "id": device.index,
        "uuid": device.id,
        "name": device.name,
        "memoryTotalMB": megabytes(device.total_bytes),
        "memoryUsedMB": megabytes(device.used_bytes),
        "memoryByModelMB": {model: megabytes(amount) for model, amount in sorted(use.bytes_by_model.items())}
        if use
        else {},
        "memoryForeignMB": megabytes(use.foreign_bytes) if use else None,
        "utilization": device.utilization,
        "utilizationLastMinute": None if mean is None else round(mean, 3),
        "powerWatts": None if watts is None else round(watts / 1e3, 1),
        "energyJoules": None if joules is None else round(joules / 1e3, 3),
    }


def _sum_or_unknown(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def _prefix_caching(models: Sequence[ModelFacts]) -> bool | None:
    """Returns True if a cache isolates tenants or had hits; None: unknown."""
    if any(model.tenants_apart or model.description.cache.hit_count for model in models):
        return True
    return None if models else False


def _all_or_unknown(answers: Sequence[bool | None]) -> bool | None:
    if any(answer is False for answer in answers):
        return False
    return None if not answers or any(answer is None for answer in answers) else True
