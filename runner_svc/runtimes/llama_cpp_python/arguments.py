"""The command line of the server program of llama-cpp-python: from a model's settings and a load's order."""

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
from runner_svc.runtimes.llama_cpp_python.settings import LlamaCppPythonModel
from weft.kernel.load_parameters import LoadParameter, LoadValue
from weft.kernel.request import Operation

SERVER_PROGRAM = "runner_svc.runtimes.llama_cpp_python.server"
MAX_GPU_LAYERS = 999
MAX_BATCH_TOKENS = 65_536
CACHE_TYPES = ("f16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Types that the library has names for."""
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "context_tokens": "--context-tokens",
        "batch_tokens": "--batch-tokens",
        "flash_attention": "--flash-attention",
        "cache_type_k": "--cache-type-k",
        "cache_type_v": "--cache-type-v",
    }
)


def operations_of(model: LlamaCppPythonModel) -> frozenset[Operation]:
    """Returns the operations that a model offers, if its file has a chat template."""
    always = {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}
    return frozenset(always | {Operation.EMBEDDING} if model.embeddings else always)


def server_arguments(model: LlamaCppPythonModel, order: LoadOrder | None = None, port: int = 0) -> list[str]:
    """Returns the command line after the program."""
    order = order or LoadOrder()
    arguments = [
        *("--port", str(port), "--model", str(order.model_path or model.file)),
        *("--context-tokens", str(model.slot_context_tokens), "--threads", str(model.engine_threads)),
    ]
    if model.embeddings:
        arguments.append("--embeddings")
    # Options of a load are last: the last of two equal flags counts.
    return [*arguments, *model.extra_arguments, *_order_arguments(order)]


def load_parameters(model: LlamaCppPythonModel, trained_context_tokens: int = 0) -> tuple[LoadParameter, ...]:
    """Returns the load parameters of a model; `trained_context_tokens`: see ModelContext."""
    return (
        context_parameter(model.slot_context_tokens, trained_context_tokens),
        whole_parameter("gpu_layers", "Layers on accelerators; -1: all of them.", -1, MAX_GPU_LAYERS),
        word_parameter("flash_attention", "Flash attention; off where nothing is said.", ("on", "off")),
        word_parameter("cache_type_k", "Type of the keys in the prefix cache.", CACHE_TYPES),
        word_parameter("cache_type_v", "Type of the values in the prefix cache.", CACHE_TYPES),
        whole_parameter("batch_tokens", "Tokens that are computed at once.", 1, MAX_BATCH_TOKENS),
    )


def configured_parameters(extra_arguments: Sequence[str]) -> dict[str, LoadValue]:
    """Reads load parameters from the configuration's extra flags, by name; invalid values are left out."""
    by_flag = {flag: name for name, flag in _FLAGS.items()} | {"--gpu-layers": "gpu_layers"}
    return values_of_flags(extra_arguments, by_flag, load_parameters(LlamaCppPythonModel(name="", path=Path())))


def check_together(parameters: Mapping[str, LoadValue], field: str) -> None:
    """Raise INVALID_ARGUMENT for valid values that contradict each other."""
    check_cache_and_attention(parameters, "off", field)


def _order_arguments(order: LoadOrder) -> list[str]:
    arguments: list[str] = []
    for name, flag in _FLAGS.items():
        if name in order.parameters:
            arguments += [flag, str(order.parameters[name])]
    if uses_no_device(order):
        arguments += ["--gpu-layers", "0"]
    elif "gpu_layers" in order.parameters:
        arguments += ["--gpu-layers", str(order.parameters["gpu_layers"])]
    split = tensor_split(order)
    return [*arguments, "--tensor-split", ",".join(map(str, split))] if split else arguments
