"""The capability descriptor, from facts: pure. What is unknown is null."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.runner_api.facts import DeviceFacts, ModelFacts, ModelStage, RunnerFacts
from gateway.runner_api.verdict import verdict_of

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """The queue in front of the runner."""

    depth: int
    max_depth: int
    average_wait_ms: int | None = None
    p95_wait_ms: int | None = None


def capabilities_body(
    facts: RunnerFacts, devices: Sequence[DeviceFacts] | None, queue: QueueFacts
) -> dict[str, object]:
    """The body of GET /v1/capabilities."""
    return {
        "runnerType": facts.kind,
        "runnerId": facts.name,
        "models": {
            "loaded": [_loaded(model) for model in facts.models if model.stage is ModelStage.LOADED],
            "loading": [_loading(model) for model in facts.models if model.stage is ModelStage.LOADING],
            # One that failed can be asked for again, and then it says why.
            "available": [
                model.name for model in facts.models if model.stage in (ModelStage.AVAILABLE, ModelStage.FAILED)
            ],
        },
        "resources": _resources(devices),
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
            "visionInput": any(model.takes_images for model in facts.models),
            "audioInput": False,
            "functionCalling": any(model.takes_chats for model in facts.models),
        },
        "health": verdict_of(facts, queue.depth, queue.max_depth).status,
    }


def megabytes(count: int | None) -> int | None:
    """Bytes as whole MiB, rounded; None stays None."""
    return None if count is None else round(count / MEBIBYTE)


def whole_seconds(seconds: float | None) -> int | None:
    """Rounded; None stays None."""
    return None if seconds is None else round(seconds)


def _loaded(model: ModelFacts) -> dict[str, object]:
    return {
        "id": model.name,
        "quantization": model.quantization,
        "contextLength": model.context_tokens,
        "loadedAt": model.loaded_at,
        "gpuMemoryMB": megabytes(model.memory_bytes),
    }


def _loading(model: ModelFacts) -> dict[str, object]:
    return {"id": model.name, "progress": model.load_progress, "eta": whole_seconds(model.load_eta_seconds)}


def _resources(devices: Sequence[DeviceFacts] | None) -> dict[str, object]:
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
        # No engine that weft runs says how much memory its KV cache takes, nor how full it is.
        "kvCacheSizeMB": None,
        "kvCacheUtilization": None,
    }


def _sum_or_unknown(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def _prefix_caching(models: Sequence[ModelFacts]) -> bool | None:
    """True where a cache can be told apart by tenant or was seen to help; a foreign server's own is unknown."""
    if any(model.tenants_apart or model.cache.hits for model in models):
        return True
    return None if models else False


def _all_or_unknown(answers: Sequence[bool | None]) -> bool | None:
    if any(answer is False for answer in answers):
        return False
    return None if not answers or any(answer is None for answer in answers) else True
