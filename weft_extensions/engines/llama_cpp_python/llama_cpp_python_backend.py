"""Backend of the runtime llama_cpp_python: a server program around the library, started by the runner."""

from collections.abc import Mapping, Sequence

from typing_extensions import override

from runner_svc.backend.port import CallInfo, EmbeddingResult, LoadOrder
from runner_svc.memory.estimate import FileForecast
from runner_svc.openai_upstream.openai_request import PreparedBody
from runner_svc.policy.load_options import context_parameter, whole_parameter, word_parameter
from runner_svc.runtimes.flags import LoadFlags, check_cache_and_attention, configured_values, load_arguments
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine, file_engine, forecast_model
from runner_svc.runtimes.runtime_settings import DEFAULT_CONTEXT_TOKENS
from runner_svc.runtimes.saved_prompts import PromptSavingServer
from weft.api.common.v1 import chat_pb2, embedding_pb2
from weft.dispatch.frames import GenerationPayload
from weft.kernel.errors.error_tree import invalid_field, missing_package
from weft.kernel.models.load_parameters import LoadParameter, LoadValue
from weft.kernel.requests.request_values import Operation
from weft_extensions.engines.llama_cpp_python.runtime import RUNTIME, LlamaCppPythonModel
from weft_extensions.engines.text_server import TextServer

MAX_GPU_LAYERS = 999
MAX_BATCH_TOKENS = 65_536
CACHE_TYPES = ("f16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Cache types that the library has names for."""
LOAD_FLAGS: LoadFlags = (
    (context_parameter(DEFAULT_CONTEXT_TOKENS, 0), ("--context-tokens",)),
    (
        whole_parameter("gpu_layers", "Number of layers on accelerators; -1: all.", -1, MAX_GPU_LAYERS),
        ("--gpu-layers",),
    ),
    (
        word_parameter("flash_attention", "Flash attention. Default: off.", ("on", "off")),
        ("--flash-attention",),
    ),
    (word_parameter("cache_type_k", "Data type of the keys in the KV cache.", CACHE_TYPES), ("--cache-type-k",)),
    (word_parameter("cache_type_v", "Data type of the values in the KV cache.", CACHE_TYPES), ("--cache-type-v",)),
    (
        whole_parameter("batch_tokens", "Batch size: tokens computed at a time.", 1, MAX_BATCH_TOKENS),
        ("--batch-tokens",),
    ),
)


def operations_of(model: LlamaCppPythonModel) -> frozenset[Operation]:
    """Returns the operations that a model offers if its file has a chat template."""
    return TextServer.operations | ({Operation.EMBEDDING} if model.embeddings else set())


_NEEDED = missing_package("llama-cpp-python cannot be loaded; it needs", "llama-cpp-python")


class LlamaCppPythonBackend(PromptSavingServer[LlamaCppPythonModel], TextServer[LlamaCppPythonModel]):
    """Backend of one server process."""

    runtime = RUNTIME
    missing_library = f"{_NEEDED}; this compiles llama.cpp: it takes minutes and a C++ compiler"
    noun = "llama-cpp-python"

    def __init__(self, model: LlamaCppPythonModel, context: ModelContext) -> None:
        super().__init__(model, context)
        self.operations = operations_of(model)

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        context = context_parameter(self.model.slot_context_tokens, self.context.trained_context_tokens)
        return (context, *(parameter for parameter, _ in LOAD_FLAGS[1:]))

    @override
    def check_load(self, parameters: Mapping[str, LoadValue], field: str = "parameters") -> None:
        super().check_load(parameters, field)
        check_cache_and_attention(parameters, "off", field)

    @override
    def own_arguments(self, order: LoadOrder) -> list[str]:
        return [*super().own_arguments(order), *(["--embeddings"] if self.model.embeddings else [])]

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        saving = () if (folder := self.saved_folder) is None else ("--slot-save-path", str(folder))
        # Options of a load come last because the last of two equal flags counts.
        return [*super().arguments(order, port), *load_arguments(order, LOAD_FLAGS), *saving]

    @override
    async def prepare(self, order: LoadOrder) -> None:
        await super().prepare(order)
        await self.begin_saving(self.arguments(order, 0), order)

    @override
    async def prepared(self, payload: GenerationPayload, call: CallInfo) -> PreparedBody:
        prepared = await super().prepared(payload, call)
        if isinstance(payload, chat_pb2.ChatPayload):
            # Not every template writes the begin token.
            begin = self._templates.bos_token
            prepared.body["add_special"] = not begin or not prepared.body["prompt"][0].startswith(begin)
        return prepared

    @override
    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        if payload.HasField("dimensions"):
            raise invalid_field("dimensions", "this runtime returns only vectors of full length; omit it")
        for index, item in enumerate(payload.inputs):
            if item.WhichOneof("kind") == "tokens":
                raise invalid_field(f"inputs[{index}]", "this runtime embeds text, not token ids")
        return await super().embed(payload, call)


def load_values(model: LlamaCppPythonModel) -> Mapping[str, LoadValue]:
    """Returns the load parameters among a model's extra flags, by name."""
    return configured_values(model.extra_arguments, LOAD_FLAGS)


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
