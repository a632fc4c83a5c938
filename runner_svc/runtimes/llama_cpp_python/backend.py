"""The backend of the runtime llama_cpp_python: the library in a server program that the runner starts."""

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

import msgspec
from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CacheIsolation, CallInfo, EmbeddingResult, ErasedCache, LoadOrder
from runner_svc.engine_host.http_server import KEY_VARIABLE, NO_LIBRARY
from runner_svc.engine_host.messages import Generate
from runner_svc.engine_host.request import prepare, template_part
from runner_svc.openai_upstream.client import Endpoint, OpenAiHttp
from runner_svc.openai_upstream.request import Json
from runner_svc.openai_upstream.tokens import tokenize
from runner_svc.policy.load_plan import LoadParameter, LoadValue
from runner_svc.runtimes.host_backend import host_command
from runner_svc.runtimes.llama_cpp_python.arguments import (
    SERVER_PROGRAM,
    check_together,
    load_parameters,
    operations_of,
    server_arguments,
)
from runner_svc.runtimes.llama_cpp_python.parameters import PARAMETERS
from runner_svc.runtimes.llama_cpp_python.settings import LlamaCppPythonModel
from runner_svc.runtimes.llama_props import read_props
from runner_svc.runtimes.model_engine import ModelContext, text_abilities
from runner_svc.runtimes.started_server import StartedServer, StartLog
from runner_svc.supervise.process_time import GpuTime
from runner_svc.templates.sandbox import ModelTemplates, TemplateSandbox, check_templates, read_templates
from weft.api.common.v1 import embedding_pb2, tokenize_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.missing_package import missing_package
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

ERASE_SECONDS = 30.0
"""Maximum wait for the running request before the cache is erased."""
_LOADED = re.compile(r"^loaded (\d\.\d\d) of the model")


class _Erased(msgspec.Struct):
    n_erased: int


class _StartLog(StartLog):
    """Also reads how much of the model is loaded, and that the library is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.share: float | None = None
        self._missing = ""

    @override
    def read_other(self, line: str) -> None:
        if (found := _LOADED.match(line)) is not None:
            self.share = float(found[1])
        elif line.startswith(NO_LIBRARY):
            self._missing = line.removeprefix(NO_LIBRARY)

    @override
    def refusal(self) -> WeftError | None:
        if not self._missing:
            return None
        needed = missing_package("llama-cpp-python cannot be loaded; it needs", "llama-cpp-python")
        message = f"{needed}; this compiles llama.cpp: it takes minutes and a C++ compiler.{self._missing}"
        return WeftError(Reason.CONNECT_FAILED, message)


class LlamaCppPythonBackend(StartedServer[LlamaCppPythonModel]):
    """A Backend over one server process. Its prompts are rendered here, in the sandbox of templates."""

    engine_parameters = PARAMETERS
    command = host_command(SERVER_PROGRAM)
    key_variable = KEY_VARIABLE
    noun = "llama-cpp-python"

    def __init__(self, model: LlamaCppPythonModel, context: ModelContext, gpu: GpuTime | None = None) -> None:
        super().__init__(model, context, gpu)
        self._sandbox = TemplateSandbox()
        self._templates = ModelTemplates()
        self._log: _StartLog | None = None
        """The output of the load that is under way."""

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

    @property
    @override
    def cache_isolation(self) -> CacheIsolation:
        return CacheIsolation.WHOLE

    @override
    def load_progress(self) -> float | None:
        return None if self._log is None else self._log.share

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        return server_arguments(self.model, order, port)

    @override
    async def prepare(self, order: LoadOrder) -> None:
        self._templates = await read_templates(order.model_path or self.model.file, self.model.chat_template_file)
        await check_templates(self._templates, self._sandbox)

    @override
    def start_log(self, order: LoadOrder) -> StartLog:
        self._log = _StartLog()
        return self._log

    @override
    def endpoint(self, base_url: str, api_key: str) -> Endpoint:
        return Endpoint(base_url=base_url, api_key=api_key, parameters=self.parameters, is_llama_server=True)

    @override
    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        self._log = None
        props = await read_props(http)
        chats = frozenset() if self._templates.usual is not None else {Operation.CHAT}
        return BackendFacts(
            operations=self.operations - chats,
            context_tokens=props.context_tokens,
            slots=1,
            abilities=text_abilities(self._templates.all),
        )

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        http, call = self._running(), self._process.noting(call)
        prepared = await prepare(payload, self._templates, self.parameters, self._sandbox.render)
        if prepared.warnings:
            yield prepared.warnings
        body = self._body(prepared.request)
        async with aclosing(http.generate(payload, call, body)) as frames:
            async for frame in frames:
                yield frame

    def _body(self, request: Generate) -> Json:
        """Returns the body of a completion."""
        schema = '{"type": "object"}' if request.json_object else request.json_schema
        given: Json = {
            "prompt": request.prompts,
            "n": request.choice_count,
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "stop": request.stop,
            "logit_bias": request.logit_bias,
            "grammar": request.grammar,
            "json_schema": schema,
            "add_special": not (request.has_template and self._begins(str(request.prompts[0]))),
        }
        return {**given, **request.sampling}

    def _begins(self, prompt: str) -> bool:
        """Whether a rendered prompt begins with the token of the beginning itself."""
        return bool(self._templates.bos_token) and prompt.startswith(self._templates.bos_token)

    @override
    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        if payload.HasField("dimensions"):
            raise invalid_field("dimensions", "this runtime gives vectors of full length only; leave it out")
        for index, item in enumerate(payload.inputs):
            if item.WhichOneof("kind") == "tokens":
                raise invalid_field(f"inputs[{index}]", "this runtime embeds text, not token ids")
        return await super().embed(payload, call)

    @override
    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        if payload.HasField("chat"):
            part = template_part(payload.chat)
            prepared = await prepare(part, self._templates, self.parameters, self._sandbox.render)
            prompt = str(prepared.request.prompts[0])
            payload = tokenize_pb2.TokenizePayload(
                text=prompt, add_special=not self._begins(prompt), with_pieces=payload.with_pieces
            )
        return await tokenize(self._running(), payload, call)

    @override
    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """See Backend.erase_cache. The engine's one cache is slot 0; a running request is waited for."""
        if self._http is None or (slots is not None and not slots):
            return ErasedCache(entry_count=0, token_count=0)
        status, body = await self._http.call_route("POST", "/slots/0?action=erase", ERASE_SECONDS)
        if status != 200:
            raise WeftError(Reason.BACKEND_ERROR, f"the engine did not erase its cache (status {status})")
        count = msgspec.json.decode(body, type=_Erased).n_erased
        return ErasedCache(entry_count=int(count > 0), token_count=count)

    @override
    async def stop(self) -> None:
        self._log = None
        try:
            await super().stop()
        finally:
            await self._sandbox.stop()
