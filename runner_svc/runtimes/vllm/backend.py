"""The backend of the runtime vllm: the library in a host process that the runner starts."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CacheIsolation, CallInfo, LoadOrder
from runner_svc.engine_host.request import PreparedRequest
from runner_svc.environments.vllm.environment import ENVIRONMENT
from runner_svc.policy.load_plan import LoadParameter
from runner_svc.policy.memory_estimate import ModelShape
from runner_svc.runtimes.hosted_engine import HostedBackend
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.vllm.arguments import HOST_PROGRAM, host_arguments, host_environment, text_load_parameters
from runner_svc.runtimes.vllm.parameters import PARAMETERS
from runner_svc.runtimes.vllm.settings import VllmLibraryModel
from runner_svc.runtimes.vllm_engine.arguments import operations_of, sleeps_in_place
from runner_svc.runtimes.vllm_engine.load_stages import LoadStages
from runner_svc.supervise.process_time import GpuTime
from runner_svc.templates.sandbox import ModelTemplates, read_templates
from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import GenerationPayload
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


class VllmBackend(HostedBackend[VllmLibraryModel]):
    """A Backend over one host process, whose engine and workers are processes of their own."""

    program = HOST_PROGRAM
    engine_parameters = PARAMETERS
    engine_environment = ENVIRONMENT
    missing_library = "vLLM cannot be loaded; install its environment: weft runtime install vllm"
    # A sleep copies the weights between devices and main memory.
    sleep_seconds = 120.0
    counts_erased_tokens = False

    def __init__(
        self,
        model: VllmLibraryModel,
        context: ModelContext,
        gpu: GpuTime | None = None,
        shape: ModelShape | None = None,
    ) -> None:
        """`shape` is that of the model's files; None: unknown."""
        super().__init__(model, context, gpu)
        self._shape = shape
        self._stages = LoadStages()

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        return text_load_parameters(self.model, self.context.trained_context_tokens)

    @property
    @override
    def cache_isolation(self) -> CacheIsolation:
        return CacheIsolation.SALT

    @override
    def load_progress(self) -> float | None:
        return self._stages.share if self._loading else None

    @override
    def read_line(self, line: str) -> None:
        if self._loading:
            self._stages.read(line)

    @override
    def arguments(self, order: LoadOrder, socket: Path) -> list[str]:
        return host_arguments(self.model, socket, order, self._shape)

    @override
    def environment(self, order: LoadOrder) -> Mapping[str, str]:
        return host_environment(self.model, order, self.context.environment)

    @override
    def operations(self) -> frozenset[Operation]:
        return operations_of(self.model)

    @override
    def sleeps_in_place(self, order: LoadOrder) -> bool:
        return sleeps_in_place(self.model, order)

    @override
    async def model_templates(self, order: LoadOrder) -> ModelTemplates:
        if order.model_path is not None or self.model.folder is not None:
            return await super().model_templates(order)
        # Of a model of the hub the engine says what it has, where the settings name no template.
        own = self.model.chat_template_file
        return ModelTemplates() if own is None else await read_templates(own, own)

    @override
    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        self._stages = LoadStages()
        limit = self.model.start_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                return await super().start(order)
        except TimeoutError:
            message = f"it did not answer within start_timeout_seconds, {limit:g} s"
            raise WeftError(Reason.LOAD_STALLED, message) from None

    @override
    async def prepared(self, payload: GenerationPayload, call: CallInfo) -> PreparedRequest:
        prepared = await super().prepared(payload, call)
        # vLLM ends at the token itself; as a text it would hold back the last letters of each delta.
        prepared.request.stop = [text for text in prepared.request.stop if text != self._templates.eos_token]
        if isinstance(payload, chat_pb2.ChatPayload) and payload.tools:
            # Some models mark calls with special tokens, by which weft finds them in the text.
            prepared.request.sampling.setdefault("skip_special_tokens", False)
        return prepared
