"""The command line and the environment of llama.cpp's server: from a configuration and the order of one load.

Flags are those of llama-server 0.5.0 (November 2026, `--help`); the launcher around the wheel takes the same.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from runner_svc.backend.llama_flags import (
    check_cache_and_attention,
    context_parameter,
    tensor_split,
    uses_no_device,
    values_of_flags,
    whole_parameter,
    word_parameter,
)
from runner_svc.backend.port import LoadOrder
from runner_svc.policy.load_plan import LoadParameter, LoadValue
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.runtimes.llama_server.parameters import PARAMETERS
from runner_svc.runtimes.started_server import StartedServerConfig
from weft.kernel.errors import invalid_field
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
    }
)
"""Flags of load parameters that are exactly one flag."""
NO_HOST_CACHE: Mapping[str, str] = MappingProxyType({"LLAMA_ARG_CACHE_RAM": "0", "LLAMA_ARG_CACHE_IDLE_SLOTS": "0"})
"""Environment that switches off the prompt cache in the host's memory (8 GiB by default): through it the server moves
prompts between slots, so a tenant would find the prompts of another one there (measured with 0.5.0, November 2026).
Servers from before that cache refuse its flag, and share nothing between slots."""
_HOST_CACHE_FLAGS = ("--cache-ram", "-cram")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServerConfig(StartedServerConfig):
    """One model served by one llama.cpp server."""

    model_path: Path
    slots: int = 4
    context_tokens: int = 2048
    """Context of one slot; the server's total is this times `slots`."""
    trained_context_tokens: int = 0
    """Trained context of the model, the maximum for a load; 0: unknown."""
    threads: int = 1
    """Threads; with one per core of a shared machine llama.cpp is 10 times slower (measured): leave a core free."""
    chat_template_path: Path | None = None
    """Chat template that replaces the model file's own."""
    extra_arguments: tuple[str, ...] = ()
    parameters: ParameterProfile = field(default_factory=lambda: ParameterProfile(engine=PARAMETERS))
    """Parameters beyond weft's own that it is sent, and whether the model thinks by default."""

    @property
    def operations(self) -> frozenset[Operation]:
        """The operations that the model offers."""
        if self.reranks:
            # A reranking server generates nothing, and its vectors are not embeddings of a text.
            return frozenset({Operation.RERANK, Operation.TOKENIZE})
        always = {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}
        return frozenset(always | {Operation.EMBEDDING} if self.embeddings else always)

    def profile(self, templates: Sequence[str]) -> ParameterProfile:
        """Returns the parameters that it is sent; `templates`: those of its model's file, may be empty."""
        # The server has built-in templates for models without one, and accepts others by name.
        is_known = templates and TEMPLATE_FLAGS.isdisjoint(self.extra_arguments)
        return replace(self.parameters, templates=tuple(templates) if is_known else None)

    @property
    def reranks(self) -> bool:
        """Whether its flags make it a reranking server."""
        return not RERANKING_FLAGS.isdisjoint(self.extra_arguments)

    def arguments(self, order: LoadOrder | None = None, port: int = 0) -> list[str]:
        """Returns the command line after `command`."""
        order = order or LoadOrder()
        slots, context = slots_of(self, order), context_of(self, order)
        arguments = [
            *("--model", str(order.model_path or self.model_path), "--alias", self.alias),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--parallel", str(slots), "--ctx-size", str(slots * context)),
            *("--threads", str(self.threads), "--metrics", "--slots", "--jinja"),
            # The server erases slots only where it may save them; nothing is ever saved in the folder.
            *("--slot-save-path", tempfile.gettempdir()),
        ]
        if self.embeddings and not self.reranks:
            arguments += ["--embeddings", "--pooling", "mean"]
        if self.chat_template_path is not None:
            arguments += ["--chat-template-file", str(self.chat_template_path)]
        # Options of a load are last: the last of two equal flags counts.
        if order.parameters.keys() & {"slots", "context_tokens"} and self.extra_arguments:
            arguments += [*self.extra_arguments, "--parallel", str(slots), "--ctx-size", str(slots * context)]
        else:
            arguments += self.extra_arguments
        return [*arguments, *_parameter_arguments(order), *_device_arguments(order), *self._even_batches(order, slots)]

    def _even_batches(self, order: LoadOrder, slots: int) -> list[str]:
        """Returns batch sizes that the number of slots divides: with mean pooling llama.cpp aborts with others."""
        options = {**configured_parameters(self.extra_arguments), **order.parameters}
        batch = int(options.get("batch_tokens", DEFAULT_BATCH_TOKENS))
        ubatch = min(batch, int(options.get("ubatch_tokens", DEFAULT_UBATCH_TOKENS)))
        if not self.embeddings or ubatch % slots == 0:
            return []
        even = max(slots, ubatch - ubatch % slots)
        return [*(("--batch-size", str(even)) if even > batch else ()), "--ubatch-size", str(even)]


def load_parameters(config: LlamaServerConfig) -> tuple[LoadParameter, ...]:
    """Returns the load parameters of this model."""
    return (
        context_parameter(config.context_tokens, config.trained_context_tokens),
        whole_parameter("slots", "Requests it works on at once.", 1, MAX_SLOTS, config.slots),
        whole_parameter("gpu_layers", "Layers on accelerators; -1: as many as fit.", -1, MAX_GPU_LAYERS),
        word_parameter("flash_attention", "Flash attention.", ("on", "off", "auto")),
        word_parameter("cache_type_k", "Type of the keys in the prefix cache.", CACHE_TYPES),
        word_parameter("cache_type_v", "Type of the values in the prefix cache.", CACHE_TYPES),
        whole_parameter("batch_tokens", "Tokens that are handed over at once.", 1, MAX_BATCH_TOKENS),
        whole_parameter("ubatch_tokens", "Tokens that are computed at once.", 1, MAX_BATCH_TOKENS),
        whole_parameter("image_max_tokens", "Tokens that one image may take; for vision models.", 1, MAX_IMAGE_TOKENS),
        word_parameter("spec_type", "Speculative decoding; draft-mtp needs a model that was made for it.", SPECULATION),
        whole_parameter("spec_draft_n_max", "Tokens that are guessed at a time.", 1, MAX_DRAFT_TOKENS),
        LoadParameter(
            name="spec_draft_p_min",
            description="How probable a guess must be for guessing to go on.",
            minimum=0,
            maximum=1,
        ),
    )


def configured_parameters(extra_arguments: Sequence[str]) -> dict[str, LoadValue]:
    """Reads load parameters from the configuration's extra flags, by name; invalid values are left out."""
    by_flag = {flag: name for name, flag in _FLAGS.items()} | dict(_OTHER_FLAGS)
    return values_of_flags(
        extra_arguments, by_flag, load_parameters(LlamaServerConfig(command=(), model_path=Path(), alias=""))
    )


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


def slots_of(config: LlamaServerConfig, order: LoadOrder) -> int:
    """Returns the number of slots that the server is started with."""
    return int(order.parameters.get("slots", config.slots))


def context_of(config: LlamaServerConfig, order: LoadOrder) -> int:
    """Returns the context of one slot that the server is started with."""
    return int(order.parameters.get("context_tokens", config.context_tokens))


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


def shares_between_slots(extra_arguments: Sequence[str]) -> bool:
    """Whether the configuration switches the prompt cache in the host's memory on."""
    return any(argument.split("=", 1)[0] in _HOST_CACHE_FLAGS for argument in extra_arguments)
