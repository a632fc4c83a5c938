"""The common part of backends whose engine is a library that generates text, behind an HTTP server of ours.

The runner renders chat templates in its sandbox; the server receives rendered prompts only. Its programs are built on
`engine_host.http_server`.
"""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import ClassVar, Generic, TypeVar

import msgspec
from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CacheIsolation, CallInfo, ErasedCache, LoadOrder
from runner_svc.engine_host.http_server import KEY_VARIABLE, NO_LIBRARY, NO_MODEL
from runner_svc.engine_host.request import PreparedRequest, prepare, template_part
from runner_svc.environments.environment import EngineEnvironment
from runner_svc.openai_upstream.client import Endpoint, OpenAiHttp
from runner_svc.openai_upstream.tokens import tokenize
from runner_svc.runtimes.host_backend import engine_command
from runner_svc.runtimes.llama_props import read_props
from runner_svc.runtimes.model_engine import ModelContext, text_abilities
from runner_svc.runtimes.settings import FileModelSettings
from runner_svc.runtimes.started_server import StartedServer, StartLog
from runner_svc.supervise.process_time import GpuTime
from runner_svc.templates.sandbox import ModelTemplates, TemplateSandbox, check_templates, read_templates
from weft.api.common.v1 import tokenize_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

ERASE_SECONDS = 30.0
"""Maximum wait for running requests before the cache is erased."""
SLEEP_SECONDS = 30.0
"""Maximum time in which the engine frees its memory; then it is ended."""
WAKE_SECONDS = 600.0
_LOADED = re.compile(r"^loaded (\d\.\d\d) of the model")

Settings = TypeVar("Settings", bound=FileModelSettings)


class _Erased(msgspec.Struct):
    n_erased: int


class _StartLog(StartLog):
    """Also reads how much of the model is loaded, and why the load was refused."""

    def __init__(self, missing_library: str) -> None:
        super().__init__()
        self._missing_library = missing_library
        self.share: float | None = None
        self._refusal: WeftError | None = None

    @override
    def read_other(self, line: str) -> None:
        if (found := _LOADED.match(line)) is not None:
            self.share = float(found[1])
        elif line.startswith(NO_LIBRARY):
            message = f"{self._missing_library}.{line.removeprefix(NO_LIBRARY)}"
            self._refusal = WeftError(Reason.CONNECT_FAILED, message)
        elif line.startswith(NO_MODEL):
            self._refusal = WeftError(Reason.INVALID_ARGUMENT, line.removeprefix(NO_MODEL).strip())

    @override
    def refusal(self) -> WeftError | None:
        return self._refusal


class LibraryServer(StartedServer[Settings], Generic[Settings]):
    """A Backend over one server process."""

    program: ClassVar[str]
    """The module of the server program."""
    missing_library: ClassVar[str]
    """The error for a library that cannot be imported, with its remedy."""
    engine_environment: ClassVar[EngineEnvironment | None] = None
    """The environment of the program where the runner has no `command`; None: weft's own."""
    always: ClassVar[frozenset[Operation]] = frozenset({Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE})
    """The operations of every model."""
    key_variable = KEY_VARIABLE

    def __init__(self, model: Settings, context: ModelContext, gpu: GpuTime | None = None) -> None:
        super().__init__(model, context, gpu)
        self._sandbox = TemplateSandbox()
        self._templates = ModelTemplates()
        self._log: _StartLog | None = None
        """The output of the load that is under way."""

    @property
    @override
    def operations(self) -> frozenset[Operation]:
        return self.always

    def sleeps_in_place(self, order: LoadOrder) -> bool:
        """Whether the engine can free its memory and keep its process after such a load, and is configured so."""
        del order
        return False

    async def prepared(self, payload: GenerationPayload, call: CallInfo) -> PreparedRequest:
        """Returns the request for the engine, and the warnings for the caller. Raises as `generate`."""
        del call
        return await prepare(payload, self._templates, self.parameters, self._sandbox.render)

    @property
    @override
    def cache_isolation(self) -> CacheIsolation:
        return CacheIsolation.WHOLE

    @override
    def load_progress(self) -> float | None:
        return None if self._log is None else self._log.share

    @override
    async def prepare(self, order: LoadOrder) -> None:
        self._templates = await read_templates(order.model_path or self.model.file, self.model.chat_template_file)
        await check_templates(self._templates, self._sandbox)
        self.command = engine_command(self.context, self.program, self.engine_environment)

    @override
    def start_log(self, order: LoadOrder) -> StartLog:
        self._log = _StartLog(self.missing_library)
        return self._log

    @override
    def endpoint(self, base_url: str, api_key: str) -> Endpoint:
        return Endpoint(base_url=base_url, api_key=api_key, parameters=self.parameters, is_llama_server=True)

    @override
    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        """See StartedServer.facts. Without a chat template the model does not chat."""
        self._log = None
        props = await read_props(http)
        return BackendFacts(
            operations=self.operations - (frozenset() if self._templates.usual is not None else {Operation.CHAT}),
            context_tokens=props.context_tokens,
            slots=props.slots or self.model.slots,
            abilities=text_abilities(self._templates.all),
        )

    @override
    async def free_memory(self, http: OpenAiHttp, order: LoadOrder) -> bool:
        if not self.sleeps_in_place(order):
            return False
        await _require_done(http, "/sleep", SLEEP_SECONDS)
        return True

    @override
    async def take_memory(self, http: OpenAiHttp) -> None:
        await _require_done(http, "/wake_up", WAKE_SECONDS)

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        http, call = self._running(), self._process.noting(call)
        prepared = await self.prepared(payload, call)
        if prepared.warnings:
            yield prepared.warnings
        body = {**prepared.request.body(), "ends_loops": call.ends_loops}
        async with aclosing(http.generate(payload, call, body)) as frames:
            async for frame in frames:
                yield frame

    @override
    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        http = self._running()
        if payload.HasField("chat"):
            request = (await self.prepared(template_part(payload.chat), call)).request
            payload = tokenize_pb2.TokenizePayload(
                text=str(request.prompt[0]), add_special=request.add_special, with_pieces=payload.with_pieces
            )
        return await tokenize(http, payload, call)

    @override
    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """See Backend.erase_cache. The engine's one cache is slot 0; running requests are waited for."""
        if self._http is None or self._sleeps or (slots is not None and not slots):
            return ErasedCache(entry_count=0, token_count=0)
        body = await _require_done(self._http, "/slots/0?action=erase", ERASE_SECONDS)
        count = msgspec.json.decode(body, type=_Erased).n_erased
        return ErasedCache(entry_count=int(count > 0), token_count=count)

    @override
    async def stop(self) -> None:
        self._log = None
        try:
            await super().stop()
        finally:
            await self._sandbox.stop()

    @override
    def _running(self) -> OpenAiHttp:
        if self._sleeps:
            raise WeftError(Reason.BACKEND_NOT_READY, "the engine sleeps")
        return super()._running()


async def _require_done(http: OpenAiHttp, path: str, timeout_seconds: float) -> bytes:
    """Returns the answer to POST `path`. Raises WeftError where it is a refusal."""
    status, body = await http.call_route("POST", path, timeout_seconds)
    if status != 200:
        raise WeftError(Reason.BACKEND_ERROR, f"the engine answered {path.partition('?')[0]} with status {status}")
    return body
