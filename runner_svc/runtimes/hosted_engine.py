"""The common part of backends whose engine is a library that generates text, in a host program.

The runner renders chat templates in its sandbox; the engine receives rendered prompts only.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CacheIsolation, CallInfo, ErasedCache, LoadOrder
from runner_svc.engine_host.channel import ChannelClosedError
from runner_svc.engine_host.messages import (
    Done,
    Forget,
    PromptProgress,
    Ready,
    Token,
    Tokenize,
    Tokens,
)
from runner_svc.engine_host.request import AnswerReader, PreparedRequest, prepare, template_part
from runner_svc.runtimes.host_backend import HostBackend
from runner_svc.runtimes.model_engine import ModelContext, text_abilities
from runner_svc.runtimes.settings import HostedModelSettings
from runner_svc.supervise.process_time import GpuTime
from runner_svc.templates.sandbox import ModelTemplates, TemplateSandbox, check_templates, read_templates
from weft.api.common.v1 import tokenize_pb2
from weft.dispatch.frames import Frame, GenerationPayload, has_content
from weft.kernel.abilities import Abilities
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

ERASE_SECONDS = 30.0
"""Maximum wait for running requests before the cache is erased."""

Settings = TypeVar("Settings", bound=HostedModelSettings)


class HostedBackend(HostBackend[Settings], Generic[Settings]):
    """A Backend over one host process that generates text."""

    def __init__(self, model: Settings, context: ModelContext, gpu: GpuTime | None = None) -> None:
        super().__init__(model, context, gpu)
        self._sandbox = TemplateSandbox()
        self._templates = ModelTemplates()

    def abilities(self, templates: Sequence[str]) -> Abilities:
        """Returns what the loaded model takes, by its chat templates; the engine is given text alone."""
        return text_abilities(templates)

    @override
    async def before_start(self, order: LoadOrder) -> None:
        """Read the chat templates. Raises TEMPLATE_FAILED for an unsafe one."""
        self._templates = await read_templates(order.model_path or self.model.file, self.model.chat_template_file)
        await check_templates(self._templates, self._sandbox)

    @override
    async def facts_of(self, ready: Ready) -> BackendFacts:
        """See HostBackend.facts_of. Without a chat template the model does not chat."""
        return BackendFacts(
            operations=self.operations() - (frozenset() if self._templates.usual is not None else {Operation.CHAT}),
            context_tokens=ready.context_tokens,
            slots=ready.slots,
            abilities=self.abilities(self._templates.all),
        )

    @override
    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            await self._sandbox.stop()

    @property
    @override
    def cache_isolation(self) -> CacheIsolation:
        return CacheIsolation.WHOLE

    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """See Backend.erase_cache. The engine's one cache is slot 0; running requests are waited for."""
        channel = self._channel
        if channel is None or (slots is not None and not slots):
            return ErasedCache(entry_count=0, token_count=0)
        count = 0
        try:
            async with (
                asyncio.timeout(ERASE_SECONDS),
                self._all_slots(),
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

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        channel, call = self._running(), self._process.noting(call)
        prepared = await self.prepared(payload, call)
        if prepared.warnings:
            yield prepared.warnings
        reader, request = AnswerReader(), prepared.request
        request.fresh, request.cache_salt, request.ends_loops = call.cache.fresh, call.cache.salt, call.ends_loops
        async with self._free:
            request.id = channel.next_id()
            async with aclosing(self._answers(channel, request)) as arrivals:
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

    async def prepared(self, payload: GenerationPayload, call: CallInfo) -> PreparedRequest:
        """Returns the request for the engine, and the warnings for the caller. Raises as `generate`."""
        del call
        return await prepare(payload, self._templates, self.parameters, self._sandbox.render)

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        """See Backend.tokenize. The engine does it concurrently with a running request."""
        del call
        channel = self._running()
        if payload.WhichOneof("kind") == "text":
            request = Tokenize(id=channel.next_id(), text=payload.text, add_special=payload.add_special)
        else:
            chat = await prepare(template_part(payload.chat), self._templates, self.parameters, self._sandbox.render)
            text = str(chat.request.prompts[0])
            request = Tokenize(id=channel.next_id(), text=text, add_special=True, has_template=True)
        request.with_pieces = payload.with_pieces
        result = tokenize_pb2.TokenizeResult()
        async with aclosing(self._answers(channel, request)) as arrivals:
            async for answers in arrivals:
                for answer in answers:
                    if isinstance(answer, Tokens):
                        result.ids.extend(answer.ids)
                        result.pieces.extend(answer.pieces)
        result.count = len(result.ids)
        return result
