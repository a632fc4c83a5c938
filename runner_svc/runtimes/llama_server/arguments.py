"""The command line and the environment of llama.cpp's server: from a model's settings and a load's order.

Flags are those of llama-server 0.5.0 (November 2026, `--help`); the launcher around the wheel takes the same.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from runner_svc.backend.devices import uses_no_device
from runner_svc.backend.llama_flags import (
    check_cache_and_attention,
    tensor_split,
    values_of_flags,
)
from runner_svc.backend.port import LoadOrder
from runner_svc.policy.load_plan import context_parameter, whole_parameter, word_parameter
from runner_svc.policy.memory_estimate import EngineHabits, ModelShape, settings_for, tokens_at_once
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft.kernel.errors import invalid_field
from weft.kernel.load_parameters import LoadParameter, LoadValue
from weft.kernel.request import Operation

MAX_SLOTS = 1024
MAX_GPU_LAYERS = 999
MAX_BATCH_TOKENS = 65_536
DEFAULT_BATCH_TOKENS, DEFAULT_UBATCH_TOKENS = 2048, 512
"""llama.cpp's defaults."""
MAX_IMAGE_TOKENS = 65_536
MAX_DRAFT_TOKENS = 6
CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
RERANKING_FLAGS = frozenset({"--reranking", "--rerank"})
SPECULATION = ("none", "draft-mtp", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""Kinds of speculative decoding that need no further file."""
DRAFT_BY_MODEL = "draft-simple"
"""The kind that lets another model draft."""
PROJECTOR_FLAGS = ("--mmproj", "-mm", "--mmproj-url", "-mmu")
DRAFT_FLAGS = ("--model-draft", "-md", "--spec-draft-model", "--spec-draft-hf", "-hfd", "-hfrd", "--hf-repo-draft")
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "flash_attention": "--flash-attn",
        "cache_type_k": "--cache-type-k",
        "cache_type_v": "--cache-type-v",
        "batch_tokens": "--batch-size",
        "ubatch_tokens": "--ubatch-size",
        "image_max_tokens": "--image-max-tokens",
        "spec_type": "--spec-type",
        "spec_draft_n_max": "--spec-draft-n-max",
        "spec_draft_p_min": "--spec-draft-p-min",
        "spec_draft_ngl": "--spec-draft-ngl",
    }
)
"""Flags of load parameters that are exactly one flag."""
NO_HOST_CACHE: Mapping[str, str] = MappingProxyType({"LLAMA_ARG_CACHE_RAM": "0", "LLAMA_ARG_CACHE_IDLE_SLOTS": "0"})
"""Environment that switches off the prompt cache in the host's memory (8 GiB by default): through it the server moves
prompts between slots, so a tenant would find the prompts of another one there (measured with 0.5.0, November 2026).
Servers from before that cache refuse its flag, and share nothing between slots."""
MEMORY_LOG: Mapping[str, str] = MappingProxyType({"LLAMA_ARG_LOG_VERBOSITY": "4"})
"""Environment with which the server prints the size of its buffers. It prints no text of a request below 5 (measured
with 0.5.0, November 2026). Servers from before that level print the sizes anyway, and ignore the variable."""
_HOST_CACHE_FLAGS = ("--cache-ram", "-cram")
ADAPTER_FLAGS = ("--lora", "--lora-scaled", "--lora-init-without-apply")
TEMPLATE_FLAGS = frozenset({"--chat-template", "--chat-template-file"})
_OTHER_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "-fa": "flash_attention",
        "-ctk": "cache_type_k",
        "-ctv": "cache_type_v",
        "-b": "batch_tokens",
        "-ub": "ubatch_tokens",
        "-ngl": "gpu_layers",
        "--gpu-layers": "gpu_layers",
        "--n-gpu-layers": "gpu_layers",
    }
)
"""Other spellings in configurations."""


def operations_of(model: LlamaServerModel) -> frozenset[Operation]:
    """Returns the operations that a model offers."""
    if reranks(model):
        # A reranking server generates nothing, and its vectors are not embeddings of a text.
        return frozenset({Operation.RERANK, Operation.TOKENIZE})
    always = {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}
    return frozenset(always | {Operation.EMBEDDING} if model.embeddings else always)


def reranks(model: LlamaServerModel) -> bool:
    """Whether the flags of a model make its server a reranking one."""
    return not RERANKING_FLAGS.isdisjoint(model.extra_arguments)


def names_flag(arguments: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether the arguments have one of the flags, alone or with its value after `=`."""
    return any(argument.split("=", 1)[0] in flags for argument in arguments)


def names_template(model: LlamaServerModel) -> bool:
    """Whether the flags of a model name a chat template, perhaps one of those that are built into the server."""
    return not TEMPLATE_FLAGS.isdisjoint(model.extra_arguments)


def server_arguments(
    model: LlamaServerModel,
    order: LoadOrder | None = None,
    port: int = 0,
    shape: ModelShape | None = None,
    saved_prompts: Path | None = None,
) -> list[str]:
    """Returns the command line of the server after its command.

    `shape`: as of `ModelContext`. `saved_prompts`: the folder in which it saves slots; None: nothing is saved.
    """
    order = order or LoadOrder()
    slots, context = slots_of(model, order), context_of(model, order)
    arguments = [
        *("--model", str(order.model_path or model.file), "--alias", model.name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", str(slots), "--ctx-size", str(slots * context)),
        *("--threads", str(model.engine_threads), "--metrics", "--slots", "--jinja"),
        # The server erases slots only where it may save them.
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
            # Without a type the server loads the model and does not use it.
            arguments += ["--spec-type", DRAFT_BY_MODEL]
    for adapter in model.adapters:
        # Without an effect of its own: each request says which one is applied, and embeddings cannot.
        arguments += ["--lora-scaled", f"{adapter.file}:0"]
    # Options of a load are last: the last of two equal flags counts.
    if order.parameters.keys() & {"slots", "context_tokens"} and model.extra_arguments:
        arguments += [*model.extra_arguments, "--parallel", str(slots), "--ctx-size", str(slots * context)]
    else:
        arguments += model.extra_arguments
    return [*arguments, *_parameter_arguments(order), *_device_arguments(order), *_batches(model, order, shape)]


def habits_of(model: LlamaServerModel) -> EngineHabits:
    """Returns how the server uses memory for a model."""
    return EngineHabits(embeds=model.embeddings or reranks(model))


def _batches(model: LlamaServerModel, order: LoadOrder, shape: ModelShape | None) -> list[str]:
    """Returns batch sizes that hold the longest text to embed or rank, which is computed in one batch.

    The number of slots divides them: with mean pooling llama.cpp aborts with others.
    """
    habits = habits_of(model)
    if not habits.embeds:
        return []
    slots = slots_of(model, order)
    options = {**configured_parameters(model.extra_arguments), **order.parameters}
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
    return (
        context_parameter(model.slot_context_tokens, trained_context_tokens),
        whole_parameter("slots", "Requests it works on concurrently.", 1, MAX_SLOTS, model.slots),
        whole_parameter("gpu_layers", "Layers on accelerators; -1: as many as fit.", -1, MAX_GPU_LAYERS),
        word_parameter("flash_attention", "Flash attention.", ("on", "off", "auto")),
        word_parameter("cache_type_k", "Type of the keys in the prefix cache.", CACHE_TYPES),
        word_parameter("cache_type_v", "Type of the values in the prefix cache.", CACHE_TYPES),
        whole_parameter("batch_tokens", "Tokens that are handed over in one batch.", 1, MAX_BATCH_TOKENS),
        whole_parameter("ubatch_tokens", "Tokens that are computed in one batch.", 1, MAX_BATCH_TOKENS),
        whole_parameter("image_max_tokens", "Tokens that one image may take; for vision models.", 1, MAX_IMAGE_TOKENS),
        word_parameter("spec_type", "Speculative decoding; draft-mtp needs a model that was made for it.", SPECULATION),
        whole_parameter("spec_draft_n_max", "Tokens that are guessed at a time.", 1, MAX_DRAFT_TOKENS),
        LoadParameter(
            name="spec_draft_p_min",
            description="How probable a guess must be for guessing to go on.",
            minimum=0,
            maximum=1,
        ),
        whole_parameter("spec_draft_ngl", "Layers of the draft model on accelerators.", 0, MAX_GPU_LAYERS),
    )


def configured_parameters(extra_arguments: Sequence[str]) -> dict[str, LoadValue]:
    """Reads load parameters from the configuration's extra flags, by name; invalid values are left out."""
    by_flag = {flag: name for name, flag in _FLAGS.items()} | dict(_OTHER_FLAGS)
    return values_of_flags(extra_arguments, by_flag, load_parameters(LlamaServerModel(name="", path=Path())))


def load_values(model: LlamaServerModel) -> Mapping[str, LoadValue]:
    """Returns the load parameters among the extra flags of a model, by name."""
    return configured_parameters(model.extra_arguments)


def check_together(parameters: Mapping[str, LoadValue], field: str) -> None:
    """Raise INVALID_ARGUMENT for valid values that contradict each other."""
    check_cache_and_attention(parameters, "auto", field)
    batch, ubatch = parameters.get("batch_tokens"), parameters.get("ubatch_tokens")
    if batch is not None and ubatch is not None and int(ubatch) > int(batch):
        raise invalid_field(f"{field}.ubatch_tokens", "must be at most batch_tokens")


def refused_parameter(unknown_flags: str, order: LoadOrder) -> str | None:
    """Returns the parameter of an order whose flag the server does not know; None: the flags are of no parameter."""
    by_flag = {flag: name for name, flag in _FLAGS.items()} | {"--n-gpu-layers": "gpu_layers"}
    names = (by_flag.get(word) for word in unknown_flags.split())
    return next((name for name in names if name is not None and name in order.parameters), None)


def slots_of(model: LlamaServerModel, order: LoadOrder) -> int:
    """Returns the number of slots that the server is started with."""
    return int(order.parameters.get("slots", model.slots))


def context_of(model: LlamaServerModel, order: LoadOrder) -> int:
    """Returns the context of one slot that the server is started with."""
    return int(order.parameters.get("context_tokens", model.slot_context_tokens))


def _parameter_arguments(order: LoadOrder) -> list[str]:
    arguments: list[str] = []
    for name, flag in _FLAGS.items():
        if name in order.parameters:
            arguments += [flag, _word_of(order.parameters[name])]
    layers = order.parameters.get("gpu_layers")
    if uses_no_device(order):
        arguments += ["--n-gpu-layers", "0"]
    elif layers is not None:
        arguments += ["--n-gpu-layers", str(layers)]
    return arguments


def _device_arguments(order: LoadOrder) -> list[str]:
    split = tensor_split(order)
    return ["--split-mode", "layer", "--tensor-split", ",".join(map(str, split))] if split else []


def _word_of(value: LoadValue) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def adapter_bodies(model: LlamaServerModel) -> dict[str, dict[str, object]]:
    """Returns what the body of a generation says in addition, by the adapter that answers; see `Endpoint.adapters`.

    All adapters are named in all of them: the server empties the cache of a slot for another list, but keeps it where a
    request has none (read in its source, b11549).
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
    """Whether the configuration switches the prompt cache in the host's memory on."""
    return names_flag(extra_arguments, _HOST_CACHE_FLAGS)
