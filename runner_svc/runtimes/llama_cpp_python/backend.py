"""The backend of the runtime llama_cpp_python: the library in a server program that the runner starts."""

from collections.abc import Mapping, Sequence

from typing_extensions import override

from runner_svc.backend.port import CallInfo, EmbeddingResult, LoadOrder
from runner_svc.engine_host.request import PreparedRequest
from runner_svc.runtimes.llama_cpp_python.arguments import (
    SERVER_PROGRAM,
    check_together,
    load_parameters,
    operations_of,
    server_arguments,
)
from runner_svc.runtimes.llama_cpp_python.parameters import PARAMETERS
from runner_svc.runtimes.llama_cpp_python.settings import LlamaCppPythonModel
from runner_svc.runtimes.text_server import TextServer
from weft.api.common.v1 import chat_pb2, embedding_pb2
from weft.dispatch.frames import GenerationPayload
from weft.kernel.errors import invalid_field
from weft.kernel.load_parameters import LoadParameter, LoadValue
from weft.kernel.missing_package import missing_package
from weft.kernel.request import Operation

_NEEDED = missing_package("llama-cpp-python cannot be loaded; it needs", "llama-cpp-python")


class LlamaCppPythonBackend(TextServer[LlamaCppPythonModel]):
    """A Backend over one server process."""

    program = SERVER_PROGRAM
    engine_parameters = PARAMETERS
    missing_library = f"{_NEEDED}; this compiles llama.cpp: it takes minutes and a C++ compiler"
    noun = "llama-cpp-python"

    @property
    @override
    def operations(self) -> frozenset[Operation]:
        return operations_of(self.model)

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
            # Not every template writes the token of the beginning.
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
