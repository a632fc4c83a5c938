"""Command line and environment of `vllm serve`, from a model's settings and load options.

The flags are those of vLLM 0.32 (`vllm serve --help=all`, November 2026).
"""

import json
from collections.abc import Mapping, Sequence

from runner_svc.backend.devices import hidden_devices
from runner_svc.backend.port import LoadOrder
from runner_svc.policy.load_options import context_parameter, whole_parameter
from runner_svc.policy.memory_estimate import MEBIBYTE, ModelShape
from runner_svc.runtimes.flags import flags_of
from runner_svc.runtimes.kv_events import sets_flag
from runner_svc.runtimes.vllm.runtime import VllmModel, local_or_id
from weft.kernel.models.load_parameters import LoadParameter, LoadValue, load_parameter, load_value
from weft.kernel.requests.request_values import Operation

MAX_SLOTS = 1024
MAX_CACHE_BYTES = 2**44
MAX_PIXELS = 2**31 - 1
MAX_DRAFT_TOKENS = 64
CACHE_BLOCK_TOKENS = 128
"""Number of tokens in a cache block on processors, where the default is largest; a prompt uses whole blocks."""
SMALL_UTILIZATION = "0.01"
"""Share of memory that vLLM requires to be free if the cache size is given: with its default it would refuse to start
next to another engine, whatever it needs."""
CACHE_TYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
METHODS = ("none", "mtp", "draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "ngram", "suffix")
LORA_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that the server can be started for; each includes the smaller ranks."""
NO_SPECULATION = "none"
OWN_FLAGS: Mapping[str, str] = {
    "--host": "weft sets it",
    "--port": "weft sets it; see port_range of the runner",
    "--uds": "weft sets it",
    "--api-key": "weft sets it",
    "--served-model-name": "it is `name`",
    "--max-model-len": "use context_tokens",
    "--max-num-seqs": "use slots",
    "--kv-cache-memory-bytes": "use kv_cache_memory_bytes",
    "--speculative-config": "use speculative_config",
}
"""Flags that `extra_arguments` must not contain, and why."""
NO_STATISTICS = "--disable-log-stats"
"""With this flag vLLM measures nothing, and refuses to start if per-request metrics are enabled."""
_BYTES_PER_NUMBER = {"float32": 4.0, "float": 4.0}
_USUAL_BYTES = 2.0
_SMALL_CACHE_TYPES = ("fp8", "int8")


def operations_of(model: VllmModel) -> frozenset[Operation]:
    """Returns the operations that a model offers."""
    match model.kind:
        case "generation":
            return frozenset({Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE})
        case "embedding":
            return frozenset({Operation.EMBEDDING, Operation.TOKENIZE})
        case "reranking":
            return frozenset({Operation.RERANK, Operation.TOKENIZE})


def reports_blocks(model: VllmModel) -> bool:
    """Whether vLLM is to report the blocks of its prefix cache."""
    is_possible = model.kind == "generation" and model.prefix_caching is not False
    return bool(model.kv_events) and is_possible and not sets_flag(model.extra_arguments)


def load_parameters(model: VllmModel, trained_context_tokens: int = 0) -> tuple[LoadParameter, ...]:
    """Returns the load parameters of a model; `trained_context_tokens`: see ModelContext."""
    pixels, drafting = model.mm_processor_kwargs.get("max_pixels"), model.speculative_config
    return (
        context_parameter(model.slot_context_tokens, trained_context_tokens),
        whole_parameter("slots", "Maximum number of concurrent requests.", 1, MAX_SLOTS, model.slots),
        whole_parameter(
            "kv_cache_memory_bytes",
            "KV cache on each device, in bytes.",
            1,
            MAX_CACHE_BYTES,
            model.kv_cache_memory_bytes,
        ),
        _words("kv_cache_dtype", "Data type of the KV cache.", CACHE_TYPES, model.kv_cache_dtype),
        whole_parameter("max_pixels", "Pixels to which larger images are scaled down.", 1, MAX_PIXELS, pixels),
        _words("speculative_method", "Method of speculative decoding; none: off.", METHODS, drafting.get("method")),
        whole_parameter(
            "speculative_tokens",
            "Tokens drafted at a time.",
            1,
            MAX_DRAFT_TOKENS,
            drafting.get("num_speculative_tokens"),
        ),
    )


def _words(name: str, description: str, known: Sequence[str], configured: LoadValue | None) -> LoadParameter:
    """Returns a parameter that may be a known word or the configured one."""
    words = tuple(known) if configured is None else tuple(dict.fromkeys((*known, str(configured))))
    return load_parameter(name, description, words=words, default=configured)


def configured_parameters(model: VllmModel) -> dict[str, LoadValue]:
    """Returns the load parameters in a model's settings, by name."""
    found = {each.name: load_value(each.default) for each in load_parameters(model)}
    known = {name: value for name, value in found.items() if value is not None}
    return {**known, "context_tokens": model.slot_context_tokens}


def server_arguments(model: VllmModel, order: LoadOrder, shape: ModelShape | None = None) -> list[str]:
    """Returns the command line after the program, without the listening address.

    `shape`: the shape of the model's files; None: unknown.
    """
    arguments = [
        *("serve", model_location(model, order), "--served-model-name", model.name, "--disable-uvicorn-access-log"),
        *_engine_arguments(model, order, shape),
        *_generation_arguments(model),
    ]
    if model.chat_template_file is not None:
        arguments += ["--chat-template", str(model.chat_template_file)]
    return [*arguments, *model.extra_arguments]


def _generation_arguments(model: VllmModel) -> list[str]:
    if model.kind != "generation":
        return []
    # Otherwise usage does not include cached tokens.
    arguments = ["--enable-prompt-tokens-details"]
    if NO_STATISTICS not in model.extra_arguments:
        arguments.append("--enable-per-request-metrics")
    if model.tool_call_parser is not None:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", model.tool_call_parser]
    modules = {adapter.name: adapter.path for adapter in model.adapters}
    if modules:
        arguments += ["--lora-modules", *(f"{name}={local_or_id(path)}" for name, path in modules.items())]
    return arguments


def adapter_bodies(model: VllmModel) -> dict[str, dict[str, object]]:
    """Returns additional request fields of a generation by adapter; see `Endpoint.adapters`."""
    if not model.adapters:
        return {}
    return {"": {"model": model.name}, **{adapter.name: {"model": adapter.name} for adapter in model.adapters}}


def _engine_arguments(model: VllmModel, order: LoadOrder, shape: ModelShape | None) -> list[str]:
    values = {**configured_parameters(model), **order.parameters}
    arguments = [
        *("--max-model-len", str(values["context_tokens"]), "--max-num-seqs", str(values["slots"])),
        *flags_of(model, order.parameters),
        *_memory_arguments(model, order, values, shape),
        *_device_arguments(model, order),
        *_image_arguments(model, values),
        *_speculation_arguments(model, order),
    ]
    if model.kind != "generation":
        arguments += ["--runner", "pooling"]
    elif model.adapters:
        rank = max(adapter.rank for adapter in model.adapters)
        least = next(each for each in LORA_RANKS if each >= rank)
        arguments += ["--enable-lora", "--max-lora-rank", str(least), *_adapter_arguments(model)]
    return arguments


def _adapter_arguments(model: VllmModel) -> list[str]:
    """Keeps all adapters on the device, so that requests never load one."""
    count = len(model.served_adapters)
    return ["--max-loras", str(count), "--max-cpu-loras", str(count)] if count > 1 else []


def model_location(model: VllmModel, order: LoadOrder) -> str:
    """Returns the folder or hub id of the model for a load."""
    return str(order.model_path or model.folder or model.location)


def _memory_arguments(
    model: VllmModel, order: LoadOrder, values: Mapping[str, LoadValue], shape: ModelShape | None
) -> list[str]:
    arguments: list[str] = []
    if (cache_bytes := cache_bytes_per_device(model, values, shape, device_count(model, order))) is not None:
        arguments += ["--kv-cache-memory-bytes", str(cache_bytes)]
    utilization = model.gpu_memory_utilization
    if utilization is not None or cache_bytes is not None:
        arguments += ["--gpu-memory-utilization", SMALL_UTILIZATION if utilization is None else f"{utilization:g}"]
    if model.prefix_caching is not None:
        arguments.append("--enable-prefix-caching" if model.prefix_caching else "--no-enable-prefix-caching")
    if model.max_kept_prompt_bytes:
        size = model.max_kept_prompt_bytes / 2**30
        arguments += ["--kv-offloading-size", f"{size:g}", "--kv-offloading-backend", "native"]
    if sleeps_in_place(model, order):
        arguments.append("--enable-sleep-mode")
    return arguments


def cache_bytes_per_device(
    model: VllmModel, values: Mapping[str, LoadValue], shape: ModelShape | None, devices: int
) -> int | None:
    """Returns the size of the KV cache on each device; None: vLLM decides."""
    given = values.get("kv_cache_memory_bytes")
    if given is not None:
        return int(given)
    if model.gpu_memory_utilization is not None or shape is None or not shape.keys_per_token:
        return None
    blocks = -(-int(values["context_tokens"]) // CACHE_BLOCK_TOKENS) + 1
    tokens = int(values["slots"]) * blocks * CACHE_BLOCK_TOKENS
    size = tokens * bytes_per_token(model, values, shape) / devices
    return -(-round(size) // MEBIBYTE) * MEBIBYTE


def bytes_per_token(model: VllmModel, values: Mapping[str, LoadValue], shape: ModelShape) -> float:
    """Returns the size of the keys and values of one token, over all devices."""
    number = _BYTES_PER_NUMBER.get(model.dtype, _USUAL_BYTES)
    if str(values.get("kv_cache_dtype", "auto")).startswith(_SMALL_CACHE_TYPES):
        number = 1.0
    return number * (shape.keys_per_token + shape.values_per_token)


def device_count(model: VllmModel, order: LoadOrder) -> int:
    """Returns the number of devices that a load uses, at least 1."""
    if model.tensor_parallel is None and model.pipeline_parallel is None:
        return max(1, len(order.shares or ()))
    return (model.tensor_parallel or 1) * (model.pipeline_parallel or 1)


def _device_arguments(model: VllmModel, order: LoadOrder) -> list[str]:
    tensor = model.tensor_parallel
    if tensor is None and model.pipeline_parallel is None:
        tensor = device_count(model, order)
    return ["--tensor-parallel-size", str(tensor)] if tensor is not None and tensor > 1 else []


def _image_arguments(model: VllmModel, values: Mapping[str, LoadValue]) -> list[str]:
    arguments: list[str] = []
    if model.limit_mm_per_prompt:
        arguments += ["--limit-mm-per-prompt", json.dumps(dict(model.limit_mm_per_prompt))]
    processor = dict(model.mm_processor_kwargs)
    if "max_pixels" in values:
        processor["max_pixels"] = int(values["max_pixels"])
    return [*arguments, "--mm-processor-kwargs", json.dumps(processor)] if processor else arguments


def _speculation_arguments(model: VllmModel, order: LoadOrder) -> list[str]:
    drafting = dict(model.speculative_config)
    for parameter, name in (("speculative_method", "method"), ("speculative_tokens", "num_speculative_tokens")):
        if parameter in order.parameters:
            drafting[name] = order.parameters[parameter]
    if drafting.get("method") == NO_SPECULATION or not drafting.keys() & {"method", "model"}:
        return []
    return ["--speculative-config", json.dumps(drafting)]


def sleeps_in_place(model: VllmModel, order: LoadOrder) -> bool:
    """Whether its process keeps running while it sleeps, which vLLM supports only on accelerators."""
    return model.sleep_level is not None and bool(order.shares)


def server_environment(model: VllmModel, order: LoadOrder, given: Mapping[str, str]) -> dict[str, str]:
    """Returns variables to add to the given ones. Given ones take precedence, except over those that weft requires."""
    usual = {
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(model.engine_threads),
        # Otherwise each worker binds its threads to cores without regard to other processes.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # FlashInfer's sampler is compiled at the first request, which fails if the toolkit is too old for the device.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    is_local = model.folder is not None and all(each.digested_file is not None for each in model.served_adapters)
    if is_local and "model" not in model.speculative_config:
        usual["HF_HUB_OFFLINE"] = "1"
    needed = {
        **hidden_devices(order),
        # Enables the routes to sleep, empty the cache and abort a request. No other user can reach the server.
        "VLLM_SERVER_DEV_MODE": "1",
    }
    return {**{name: value for name, value in usual.items() if name not in given}, **needed}
