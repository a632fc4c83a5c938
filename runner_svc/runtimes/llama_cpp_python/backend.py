"""The backend of the runtime llama_cpp_python: the library in a host process that the runner starts.

docs/decisions/0011-in-process-engines.md explains the process and its messages. The runner renders chat templates in
its sandbox; the engine receives rendered prompts only.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from typing_extensions import override

from runner_svc.backend.devices import hidden_devices
from runner_svc.backend.engine_process import LOADING, WORKING, EngineProcess, ProcessBackend
from runner_svc.backend.port import (
    BackendFacts,
    CacheIsolation,
    CallInfo,
    EmbeddingResult,
    ErasedCache,
    LoadOrder,
)
from runner_svc.policy.load_plan import LoadParameter, LoadValue
from runner_svc.runtimes.llama_cpp_python.arguments import (
    HOST_COMMAND,
    HOST_PROGRAM,
    check_together,
    host_arguments,
    load_parameters,
    operations_of,
)
from runner_svc.runtimes.llama_cpp_python.channel import ChannelClosedError, EngineChannel
from runner_svc.runtimes.llama_cpp_python.messages import (
    TOKEN_VARIABLE,
    Done,
    Embed,
    Forget,
    PromptProgress,
    Ready,
    Token,
    Tokenize,
    Tokens,
    Vector,
)
from runner_svc.runtimes.llama_cpp_python.parameters import PARAMETERS
from runner_svc.runtimes.llama_cpp_python.request import AnswerReader, prepare
from runner_svc.runtimes.llama_cpp_python.settings import LlamaCppPythonModel
from runner_svc.runtimes.model_engine import ModelContext, parameter_profile
from runner_svc.supervise.process_time import GpuTime
from runner_svc.templates.sandbox import ModelTemplates, TemplateSandbox, check_templates, read_templates
from weft.api.common.v1 import chat_pb2, embedding_pb2, tokenize_pb2, usage_pb2
from weft.dispatch.frames import Frame, GenerationPayload, has_content
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

ERASE_SECONDS = 30.0
"""Maximum wait for a running request before the cache is erased."""

__all__ = ["HOST_COMMAND", "HOST_PROGRAM", "LlamaCppPythonBackend", "operations_of"]


class LlamaCppPythonBackend(ProcessBackend):
    """A Backend over one host process."""

    def __init__(self, model: LlamaCppPythonModel, context: ModelContext, gpu: GpuTime | None = None) -> None:
        super().__init__(EngineProcess(context.graces, gpu, context.leftovers))
        self.model = model
        self.context = context
        self.parameters = parameter_profile(model, PARAMETERS)
        self._sandbox = TemplateSandbox()
        self._templates = ModelTemplates()
        self._channel: EngineChannel | None = None
        self._loading = False
        self._busy = asyncio.Lock()
        """Held by the running request: admission admits one at a time, but a cancelled one may still be ending."""

    @override
    def load_progress(self) -> float | None:
        return self._channel.load_share if self._loading and self._channel is not None else None

    async def responds(self, timeout_seconds: float) -> bool:
        """See Backend.responds. Another thread than the engine's answers."""
        channel = self._channel
        return channel is not None and await channel.ping(timeout_seconds)

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        return load_parameters(self.model, self.context.trained_context_tokens)

    @override
    def check_load(self, parameters: Mapping[str, LoadValue], field: str = "parameters") -> None:
        super().check_load(parameters, field)
        check_together(parameters, field)

    @property
    @override
    def cache_isolation(self) -> CacheIsolation:
        return CacheIsolation.WHOLE

    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """See Backend.erase_cache. The engine holds one prompt, which is slot 0; a running request is waited for."""
        channel = self._channel
        if channel is None or (slots is not None and not slots):
            return ErasedCache(entry_count=0, token_count=0)
        count = 0
        try:
            async with (
                asyncio.timeout(ERASE_SECONDS),
                self._busy,
                aclosing(channel.answers_to(Forget(channel.next_id()))) as arrivals,
            ):
                async for answers in arrivals:
                    count += sum(answer.prompt_tokens for answer in answers if isinstance(answer, Done))
        except TimeoutError:
            message = f"the engine was still at work after {ERASE_SECONDS:g} s"
            raise WeftError(Reason.BACKEND_ERROR, message) from None
        except ChannelClosedError:
            raise await self._explain_break() from None
        return ErasedCache(entry_count=int(count > 0), token_count=count)

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        """See Backend.start. Raises also TEMPLATE_FAILED for an unsafe chat template."""
        order, model = order or LoadOrder(), self.model
        self.check_load(order.parameters)
        self._loading = True
        try:
            self._templates = await read_templates(order.model_path or model.file, model.chat_template_file)
            await check_templates(self._templates, self._sandbox)
            self._channel = channel = EngineChannel()
            await channel.open()
            # The token is passed in the environment: arguments are visible to every user of the machine.
            environment = {**self.context.environment, **hidden_devices(order), TOKEN_VARIABLE: channel.token}
            command = [*(self.context.command or HOST_COMMAND), *host_arguments(model, channel.path, order)]
            await self._process.start(command, environment)
            ready = await self._until_ready(channel)
        except BaseException:
            await self.stop()
            raise
        finally:
            self._loading = False
        return BackendFacts(operations=self._operations(), context_tokens=ready.context_tokens, slots=1)

    @override
    async def stop(self) -> None:
        channel, self._channel = self._channel, None
        try:
            await self._process.stop()
        finally:
            if channel is not None:
                await channel.close()
            await self._sandbox.stop()

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        channel, call = self._running(), self._process.noting(call)
        prepared = await prepare(payload, self._templates, self.parameters, self._sandbox.render)
        if prepared.warnings:
            yield prepared.warnings
        reader, request = AnswerReader(), prepared.request
        request.fresh = call.cache.fresh
        async with self._busy:
            request.id = channel.next_id()
            try:
                async with aclosing(channel.answers_to(request)) as arrivals:
                    async for answers in arrivals:
                        if any(isinstance(answer, Token) for answer in answers):
                            call.on_token()
                        elif any(isinstance(answer, PromptProgress) for answer in answers):
                            call.on_prefill()
                        for number, frame in enumerate(reader.read(answers)):
                            if number and has_content(frame):
                                # The first content stays alone in its frame, also where more arrived with it.
                                call.on_token()
                            yield frame
            except ChannelClosedError:
                raise await self._explain_break() from None

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        """See Backend.embed. Token ids and shorter vectors are refused with INVALID_ARGUMENT."""
        channel = self._running()
        if not self.model.embeddings:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this model is not configured for embeddings")
        if payload.HasField("dimensions"):
            raise invalid_field("dimensions", "this runtime gives vectors of full length only; leave it out")
        for index, item in enumerate(payload.inputs):
            if item.WhichOneof("kind") == "tokens":
                raise invalid_field(f"inputs[{index}]", "this runtime embeds text, not token ids")
        vectors: list[embedding_pb2.Embedding] = []
        usage = usage_pb2.Usage()
        async with self._busy:
            request = Embed(id=channel.next_id(), texts=[item.text for item in payload.inputs])
            try:
                async with aclosing(channel.answers_to(request)) as arrivals:
                    async for answers in arrivals:
                        call.on_prefill()
                        self._process.note_answer()
                        for answer in answers:
                            if isinstance(answer, Vector):
                                vectors.append(embedding_pb2.Embedding(index=answer.index, values=answer.values))
                            elif isinstance(answer, Done):
                                usage.prompt_tokens = answer.prompt_tokens
            except ChannelClosedError:
                raise await self._explain_break() from None
        return EmbeddingResult(embeddings=vectors, usage=usage)

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        """See Backend.tokenize. The engine does it concurrently with a running request."""
        del call
        channel = self._running()
        if payload.WhichOneof("kind") == "text":
            request = Tokenize(id=channel.next_id(), text=payload.text, add_special=payload.add_special)
        else:
            chat = await prepare(_rendered(payload.chat), self._templates, self.parameters, self._sandbox.render)
            text = str(chat.request.prompts[0])
            request = Tokenize(id=channel.next_id(), text=text, add_special=True, has_template=True)
        request.with_pieces = payload.with_pieces
        result = tokenize_pb2.TokenizeResult()
        try:
            async with aclosing(channel.answers_to(request)) as arrivals:
                async for answers in arrivals:
                    for answer in answers:
                        if isinstance(answer, Tokens):
                            result.ids.extend(answer.ids)
                            result.pieces.extend(answer.pieces)
        except ChannelClosedError:
            raise await self._explain_break() from None
        result.count = len(result.ids)
        return result

    def _operations(self) -> frozenset[Operation]:
        can_chat = self._templates.usual is not None
        return operations_of(self.model) - (frozenset() if can_chat else {Operation.CHAT})

    def _running(self) -> EngineChannel:
        if self._channel is None:
            raise WeftError(Reason.BACKEND_NOT_READY, "the backend is not running")
        return self._channel

    async def _until_ready(self, channel: EngineChannel) -> Ready:
        try:
            return await self._process.while_loading(
                channel.ready(), self.context.load_stall_seconds, lambda: channel.load_share
            )
        except ChannelClosedError:
            raise await self._explain_break(LOADING) from None

    async def _explain_break(self, when: str = WORKING) -> WeftError:
        """Returns the error for a closed channel."""
        return await self._process.explain_break(when) or WeftError(
            Reason.BACKEND_PROTOCOL_ERROR, "the engine closed its connection and still runs"
        )


def _rendered(chat: chat_pb2.ChatPayload) -> chat_pb2.ChatPayload:
    """Returns the part of a conversation that its template renders."""
    part = chat_pb2.ChatPayload(messages=chat.messages, reasoning_effort=chat.reasoning_effort)
    if chat.HasField("thinking"):
        part.thinking = chat.thinking
    if chat.tool_choice.mode != chat_pb2.ToolChoice.MODE_NONE:
        part.tools.extend(chat.tools)
    return part
