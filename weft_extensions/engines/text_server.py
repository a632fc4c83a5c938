"""Base of backends with a library that generates text as their engine.

The runner renders chat templates in its sandbox; the server only receives rendered prompts.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

import msgspec
from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CacheIsolation, CallInfo, ErasedCache, LoadOrder
from runner_svc.openai_upstream.client import Endpoint, OpenAiHttp
from runner_svc.openai_upstream.openai_request import PreparedBody
from runner_svc.openai_upstream.tokens import tokenize
from runner_svc.runtimes.llama_props import read_props
from runner_svc.runtimes.model_engine import ModelContext, text_capabilities
from runner_svc.runtimes.runtime_settings import FileModelSettings
from runner_svc.runtimes.server_calls import require_done
from runner_svc.templates.rendered_request import prepare, template_part
from runner_svc.templates.sandbox import ModelTemplates, TemplateSandbox, check_templates, read_templates
from weft.api.common.v1 import tokenize_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.requests.request_values import Operation
from weft_extensions.engines.library_server import LibraryServer

ERASE_SECONDS = 30.0
"""Maximum wait for running requests before the cache is erased."""

Settings = TypeVar("Settings", bound=FileModelSettings)


class _Erased(msgspec.Struct):
    n_erased: int


class TextServer(LibraryServer[Settings], Generic[Settings]):
    """Backend of one server process."""

    operations = frozenset({Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE})
    cache_isolation = CacheIsolation.WHOLE

    def __init__(self, model: Settings, context: ModelContext) -> None:
        super().__init__(model, context)
        self._sandbox = TemplateSandbox()
        self._templates = ModelTemplates()

    async def prepared(self, payload: GenerationPayload, call: CallInfo) -> PreparedBody:
        """Returns the request for the engine, with warnings for the caller. Raises as `generate`."""
        del call
        return await prepare(payload, self._templates, self.parameters, self._sandbox.render)

    @override
    def own_arguments(self, order: LoadOrder) -> list[str]:
        return ["--context-tokens", str(order.parameters.get("context_tokens", self.model.slot_context_tokens))]

    @override
    async def prepare(self, order: LoadOrder) -> None:
        self._templates = await read_templates(order.model_path or self.model.file, self.model.chat_template_file)
        await check_templates(self._templates, self._sandbox)
        await super().prepare(order)

    @override
    def endpoint(self, base_url: str, api_key: str) -> Endpoint:
        return Endpoint(base_url=base_url, api_key=api_key, parameters=self.parameters, is_llama_server=True)

    @override
    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        """See StartedServer.facts. A model without a chat template does not offer chat."""
        props = await read_props(http)
        self.note_build(props.build)
        return BackendFacts(
            operations=self.operations - (frozenset() if self._templates.usual is not None else {Operation.CHAT}),
            context_tokens=props.context_tokens,
            slots=props.slots or self.model.slots,
            capabilities=text_capabilities(self._templates.all),
        )

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        http, call = self._running(), self.noting(call)
        prepared = await self.prepared(payload, call)
        if prepared.warnings:
            yield prepared.warnings
        body = {**prepared.body, "ends_loops": call.ends_loops}
        async with aclosing(http.generate(payload, call, body)) as frames:
            async for frame in frames:
                yield frame

    @override
    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        http = self._running()
        if payload.HasField("chat"):
            body = (await self.prepared(template_part(payload.chat), call)).body
            payload = tokenize_pb2.TokenizePayload(
                text=body["prompt"][0], add_special=body["add_special"], with_pieces=payload.with_pieces
            )
        return await tokenize(http, payload, call)

    @override
    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """See Backend.erase_cache. The engine's only cache is slot 0; waits for running requests."""
        if self._http is None or self._sleeps or (slots is not None and not slots):
            return ErasedCache(entry_count=0, token_count=0)
        body = await require_done(self._http, "/slots/0?action=erase", ERASE_SECONDS)
        count = msgspec.json.decode(body, type=_Erased).n_erased
        return ErasedCache(entry_count=int(count > 0), token_count=count)

    @override
    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            await self._sandbox.stop()
