"""Backend of the runtime llama_cpp_python: a server program around the library, started by the runner."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from typing_extensions import override

from runner_svc.backend.devices import uses_no_device
from runner_svc.backend.llama_flags import (
    check_cache_and_attention,
    tensor_split,
    values_of_flags,
)
from runner_svc.backend.port import CallInfo, EmbeddingResult, LoadOrder
from runner_svc.engine_host.request import PreparedRequest
from runner_svc.memory.estimate import FileForecast
from runner_svc.policy.load_plan import context_parameter, whole_parameter, word_parameter
from runner_svc.runtimes.llama_cpp_python.runtime import PARAMETERS, RUNTIME, LlamaCppPythonModel
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine, file_engine, forecast_model
from runner_svc.runtimes.text_server import TextServer
from weft.api.common.v1 import chat_pb2, embedding_pb2
from weft.dispatch.frames import GenerationPayload
from weft.kernel.errors import invalid_field, missing_package
from weft.kernel.load_parameters import LoadParameter, LoadValue
from weft.kernel.request import Operation

SERVER_PROGRAM = "runner_svc.runtimes.llama_cpp_python.server"
MAX_GPU_LAYERS = 999
MAX_BATCH_TOKENS = 65_536
CACHE_TYPES = ("f16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Cache types that the library has names for."""
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
    """Returns the operations that a model offers if its file has a chat template."""
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
    # Options of a load come last because the last of two equal flags counts.
    return [*arguments, *model.extra_arguments, *_order_arguments(order)]


def load_parameters(model: LlamaCppPythonModel, trained_context_tokens: int = 0) -> tuple[LoadParameter, ...]:
    """Returns the load parameters of a model; `trained_context_tokens`: see ModelContext."""
    return (
        context_parameter(model.slot_context_tokens, trained_context_tokens),
        whole_parameter("gpu_layers", "Number of layers on accelerators; -1: all.", -1, MAX_GPU_LAYERS),
        word_parameter("flash_attention", "Flash attention. Default: off.", ("on", "off")),
        word_parameter("cache_type_k", "Data type of the keys in the KV cache.", CACHE_TYPES),
        word_parameter("cache_type_v", "Data type of the values in the KV cache.", CACHE_TYPES),
        whole_parameter("batch_tokens", "Batch size: tokens computed at a time.", 1, MAX_BATCH_TOKENS),
    )


def configured_parameters(extra_arguments: Sequence[str]) -> dict[str, LoadValue]:
    """Parses load parameters from the configured extra flags, by name; invalid values are skipped."""
    by_flag = {flag: name for name, flag in _FLAGS.items()} | {"--gpu-layers": "gpu_layers"}
    return values_of_flags(extra_arguments, by_flag, load_parameters(LlamaCppPythonModel(name="", path=Path())))


def check_together(parameters: Mapping[str, LoadValue], field: str) -> None:
    """Raises INVALID_ARGUMENT for valid values that contradict each other."""
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


_NEEDED = missing_package("llama-cpp-python cannot be loaded; it needs", "llama-cpp-python")


class LlamaCppPythonBackend(TextServer[LlamaCppPythonModel]):
    """Backend of one server process."""

    program = SERVER_PROGRAM
    engine_parameters = PARAMETERS
    missing_library = f"{_NEEDED}; this compiles llama.cpp: it takes minutes and a C++ compiler"
    noun = "llama-cpp-python"

    def __init__(self, model: LlamaCppPythonModel, context: ModelContext) -> None:
        super().__init__(model, context)
        self.operations = operations_of(model)

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        return load_parameters(self.model, self.context.trained_context_tokens)

    @override
    def check_load(self, parameters: Mapping[str, LoadValue], field: str = "parameters") -> None:
        super().check_load(parameters, field)
        check_together(parameters, field)

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        return server_arguments(self.model, order, port)

    @override
    async def prepared(self, payload: GenerationPayload, call: CallInfo) -> PreparedRequest:
        prepared = await super().prepared(payload, call)
        if isinstance(payload, chat_pb2.ChatPayload):
            # Not every template writes the begin token.
            begin = self._templates.bos_token
            prepared.request.add_special = not begin or not str(prepared.request.prompt[0]).startswith(begin)
        return prepared

    @override
    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        if payload.HasField("dimensions"):
            raise invalid_field("dimensions", "this runtime gives vectors of full length only; leave it out")
        for index, item in enumerate(payload.inputs):
            if item.WhichOneof("kind") == "tokens":
                raise invalid_field(f"inputs[{index}]", "this runtime embeds text, not token ids")
        return await super().embed(payload, call)


def load_values(model: LlamaCppPythonModel) -> Mapping[str, LoadValue]:
    """Returns the load parameters among a model's extra flags, by name."""
    return configured_parameters(model.extra_arguments)


def build(model: LlamaCppPythonModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    if model.slots != 1:
        raise context.refuse("slots", "must be 1: llama-cpp-python works on one request at a time")
    return file_engine(
        model,
        context,
        LlamaCppPythonBackend,
        FileForecast(forecast_model(model, RUNTIME.habits, load_values(model)), context.estimator),
        operations=operations_of(model),
    )
