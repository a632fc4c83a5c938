"""Command line and environment of llama.cpp's server, from a model's settings and load options.

The flags are those of llama-server 0.5.0 (November 2026, `--help`); the launcher for the wheel accepts the same.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from runner_svc.backend.port import LoadOrder
from runner_svc.policy.load_options import context_parameter, whole_parameter, with_defaults, word_parameter
from runner_svc.policy.memory_estimate import EngineHabits, ModelShape, settings_for, tokens_at_once
from runner_svc.runtimes.flags import (
    LoadFlags,
    check_cache_and_attention,
    configured_values,
    load_arguments,
    tensor_split,
)
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.models.load_parameters import LoadParameter, LoadValue
from weft.kernel.requests.request_values import Operation

MAX_SLOTS = 1024
MAX_GPU_LAYERS = 999
MAX_THREADS = 1024
MAX_BATCH_TOKENS = 65_536
DEFAULT_BATCH_TOKENS, DEFAULT_UBATCH_TOKENS = 2048, 512
"""llama.cpp's defaults."""
MAX_IMAGE_TOKENS = 65_536
MAX_DRAFT_TOKENS = 6
CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
RERANKING_FLAGS = frozenset({"--reranking", "--rerank"})
SPECULATION = ("none", "draft-mtp", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""Kinds of speculative decoding that need no additional file."""
DRAFT_BY_MODEL = "draft-simple"
"""Speculative decoding with a separate draft model."""
PROJECTOR_FLAGS = ("--mmproj", "-mm", "--mmproj-url", "-mmu")
DRAFT_FLAGS = ("--model-draft", "-md", "--spec-draft-model", "--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft")
LOAD_FLAGS: LoadFlags = (
    (whole_parameter("threads", "Processor threads.", 1, MAX_THREADS), ("--threads", "-t")),
    (
        whole_parameter("gpu_layers", "Number of layers on accelerators; -1: as many as fit.", -1, MAX_GPU_LAYERS),
        ("--n-gpu-layers", "--gpu-layers", "-ngl"),
    ),
    (word_parameter("flash_attention", "Flash attention.", ("on", "off", "auto")), ("--flash-attn", "-fa")),
    (word_parameter("cache_type_k", "Data type of the keys in the KV cache.", CACHE_TYPES), ("--cache-type-k", "-ctk")),
    (
        word_parameter("cache_type_v", "Data type of the values in the KV cache.", CACHE_TYPES),
        ("--cache-type-v", "-ctv"),
    ),
    (
        whole_parameter("batch_tokens", "Logical batch size: tokens submitted at a time.", 1, MAX_BATCH_TOKENS),
        ("--batch-size", "-b"),
    ),
    (
        whole_parameter("ubatch_tokens", "Batch size: tokens computed at a time.", 1, MAX_BATCH_TOKENS),
        ("--ubatch-size", "-ub"),
    ),
    (
        whole_parameter("image_max_tokens", "Maximum tokens per image; for vision models.", 1, MAX_IMAGE_TOKENS),
        ("--image-max-tokens",),
    ),
    (
        word_parameter("spec_type", "Speculative decoding; draft-mtp needs a model that supports it.", SPECULATION),
        ("--spec-type",),
    ),
    (
        whole_parameter("spec_draft_n_max", "Maximum number of draft tokens at a time.", 1, MAX_DRAFT_TOKENS),
        ("--spec-draft-n-max",),
    ),
    (
        LoadParameter(
            name="spec_draft_p_min",
            description="Minimum probability of a draft token for drafting to continue.",
            minimum=0,
            maximum=1,
        ),
        ("--spec-draft-p-min",),
    ),
    (
        whole_parameter("spec_draft_ngl", "Number of draft model layers on accelerators.", 0, MAX_GPU_LAYERS),
        ("--spec-draft-ngl",),
    ),
)
NO_HOST_CACHE: Mapping[str, str] = MappingProxyType({"LLAMA_ARG_CACHE_RAM": "0", "LLAMA_ARG_CACHE_IDLE_SLOTS": "0"})
"""Disables the prompt cache in main memory (8 GiB by default), through which the server moves prompts between slots: a
tenant would find another tenant's prompts there (measured with 0.5.0, November 2026). Set as variables because servers
without that cache reject its flag; they share nothing between slots."""
MEMORY_LOG: Mapping[str, str] = MappingProxyType({"LLAMA_ARG_LOG_VERBOSITY": "4"})
"""Makes the server print the size of its buffers. Below 5 it prints no text of a request (measured with 0.5.0, November
2026). Servers without this level ignore the variable and print the sizes anyway."""
_HOST_CACHE_FLAGS = ("--cache-ram", "-cram")
ADAPTER_FLAGS = ("--lora", "--lora-scaled", "--lora-init-without-apply")
TEMPLATE_FLAGS = frozenset({"--chat-template", "--chat-template-file"})


def operations_of(model: LlamaServerModel) -> frozenset[Operation]:
    """Returns the operations that a model offers."""
    if reranks(model):
        # A reranking server does not generate, and its vectors are not text embeddings.
        return frozenset({Operation.RERANK, Operation.TOKENIZE})
    always = {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}
    return frozenset(always | {Operation.EMBEDDING} if model.embeddings else always)


def reranks(model: LlamaServerModel) -> bool:
    """Whether the flags of a model make its server a reranking one."""
    return not RERANKING_FLAGS.isdisjoint(model.extra_arguments)


def names_flag(arguments: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether the arguments contain one of the flags, alone or as `flag=value`."""
    return any(argument.split("=", 1)[0] in flags for argument in arguments)


def names_template(model: LlamaServerModel) -> bool:
    """Whether the flags of a model select a chat template, which may be built into the server."""
    return not TEMPLATE_FLAGS.isdisjoint(model.extra_arguments)


def server_arguments(
    model: LlamaServerModel,
    order: LoadOrder | None = None,
    port: int = 0,
    shape: ModelShape | None = None,
    saved_prompts: Path | None = None,
) -> list[str]:
    """Returns the server's arguments.

    `shape`: see `ModelContext`. `saved_prompts`: folder for saved slots; None: slots are not saved.
    """
    order = order or LoadOrder()
    slots, context = slots_of(model, order), context_of(model, order)
    arguments = [
        *("--model", str(order.model_path or model.file), "--alias", model.name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", str(slots), "--ctx-size", str(slots * context)),
        *("--threads", str(model.engine_threads), "--metrics", "--slots", "--jinja"),
        # The server erases slots only if this is set.
        *("--slot-save-path", str(saved_prompts or tempfile.gettempdir())),
    ]
    if model.embeddings and not reranks(model):
        arguments += ["--embeddings", "--pooling", "mean"]
    if model.chat_template_file is not None:
        arguments += ["--chat-template-file", str(model.chat_template_file)]
    if model.projector_file is not None:
        arguments += ["--mmproj", str(model.projector_file)]
    if model.draft_file is not None:
        arguments += ["--model-draft", str(model.draft_file)]
        if "spec_type" not in order.parameters and not names_flag(model.extra_arguments, ("--spec-type",)):
            # Without a type the server loads the draft model but does not use it.
            arguments += ["--spec-type", DRAFT_BY_MODEL]
    for adapter in model.adapters:
        # Scale 0, because each request selects an adapter and embeddings cannot.
        arguments += ["--lora-scaled", f"{adapter.file}:0"]
    # Options of a load come last because the last of two equal flags counts.
    if order.parameters.keys() & {"slots", "context_tokens"} and model.extra_arguments:
        arguments += [*model.extra_arguments, "--parallel", str(slots), "--ctx-size", str(slots * context)]
    else:
        arguments += model.extra_arguments
    if tensor_split(order):
        arguments += ["--split-mode", "layer"]
    return [*arguments, *load_arguments(order, LOAD_FLAGS), *_batches(model, order, shape)]


def habits_of(model: LlamaServerModel) -> EngineHabits:
    """Returns the server's memory habits for a model."""
    return EngineHabits(embeds=model.embeddings or reranks(model))


def _batches(model: LlamaServerModel, order: LoadOrder, shape: ModelShape | None) -> list[str]:
    """Returns batch sizes for the longest text to embed or rank, which must fit one batch.

    They are multiples of the number of slots: with mean pooling llama.cpp aborts otherwise.
    """
    habits = habits_of(model)
    if not habits.embeds:
        return []
    slots = slots_of(model, order)
    options = {**load_values(model), **order.parameters}
    batch = int(options.get("batch_tokens", DEFAULT_BATCH_TOKENS))
    settings = settings_for(context_of(model, order), slots, options, habits)
    if settings.embeds:
        even = -(-tokens_at_once(shape, settings) // slots) * slots
    else:
        ubatch = min(batch, settings.ubatch_tokens)
        if ubatch % slots == 0:
            return []
        even = max(slots, ubatch - ubatch % slots)
    return [*(("--batch-size", str(even)) if even > batch else ()), "--ubatch-size", str(even)]


def load_parameters(model: LlamaServerModel, trained_context_tokens: int = 0) -> tuple[LoadParameter, ...]:
    """Returns the load parameters of a model; `trained_context_tokens`: see ModelContext."""
    threads = {} if model.threads is None else {"threads": model.threads}
    return (
        context_parameter(model.slot_context_tokens, trained_context_tokens),
        whole_parameter("slots", "Maximum number of concurrent requests.", 1, MAX_SLOTS, model.slots),
        *with_defaults((parameter for parameter, _ in LOAD_FLAGS), {**threads, **load_values(model)}),
    )


def load_values(model: LlamaServerModel) -> Mapping[str, LoadValue]:
    """Returns the load parameters among a model's extra flags, by name."""
    return configured_values(model.extra_arguments, LOAD_FLAGS)


def check_together(parameters: Mapping[str, LoadValue], field: str) -> None:
    """Raises INVALID_ARGUMENT for valid values that contradict each other."""
    check_cache_and_attention(parameters, "auto", field)
    batch, ubatch = parameters.get("batch_tokens"), parameters.get("ubatch_tokens")
    if batch is not None and ubatch is not None and int(ubatch) > int(batch):
        raise invalid_field(f"{field}.ubatch_tokens", "must be at most batch_tokens")


def refused_parameter(unknown_flags: str, order: LoadOrder) -> str | None:
    """Returns the load parameter behind a flag that the server does not know; None: no parameter."""
    by_flag = {flag: parameter.name for parameter, (flag, *_) in LOAD_FLAGS}
    names = (by_flag.get(word) for word in unknown_flags.split())
    return next((name for name in names if name is not None and name in order.parameters), None)


def slots_of(model: LlamaServerModel, order: LoadOrder) -> int:
    """Returns the number of slots of a load."""
    return int(order.parameters.get("slots", model.slots))


def context_of(model: LlamaServerModel, order: LoadOrder) -> int:
    """Returns the context per slot of a load."""
    return int(order.parameters.get("context_tokens", model.slot_context_tokens))


def adapter_bodies(model: LlamaServerModel) -> dict[str, dict[str, object]]:
    """Returns additional request fields of a generation by adapter; see `Endpoint.adapters`.

    Every request lists all adapters: a changed list makes the server empty the slot's cache, but a request without a
    list keeps the cache (according to the server's source, b11549).
    """
    if not model.adapters:
        return {}
    return {
        name: {
            "lora": [
                {"id": number, "scale": adapter.scale if adapter.name == name else 0.0}
                for number, adapter in enumerate(model.adapters)
            ]
        }
        for name in ("", *(adapter.name for adapter in model.adapters))
    }


def shares_between_slots(extra_arguments: Sequence[str]) -> bool:
    """Whether the configuration enables the prompt cache in main memory."""
    return names_flag(extra_arguments, _HOST_CACHE_FLAGS)
