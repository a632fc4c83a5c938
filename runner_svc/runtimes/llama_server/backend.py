"""The llama.cpp HTTP server as a supervised child process.

The command is any program that takes llama-server's flags and speaks its HTTP contract: a native `llama-server`, our
launcher around the `xllamacpp` wheel, or `weft_testing.fake_backend`. The program binds port 0 and says on its own
output where it listens, so a stranger on a recycled port is never mistaken for it; a random key per start keeps
everybody else off the port.
"""

import asyncio
import os
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from runner_svc.backend.engine_process import EngineProcess
from runner_svc.backend.llama_flags import hidden_devices
from runner_svc.backend.port import (
    BackendFacts,
    CacheIsolation,
    CallInfo,
    EmbeddingResult,
    ErasedCache,
    ExitReport,
    LoadOrder,
    ProcessSigns,
    RerankResult,
    SlotSnapshot,
)
from runner_svc.backend.port_range import LOOPBACK
from runner_svc.openai_upstream.client import HEALTH, Endpoint, OpenAiHttp
from runner_svc.openai_upstream.errors import JSON_FAULTS
from runner_svc.openai_upstream.rerank import rerank
from runner_svc.openai_upstream.tokens import tokenize
from runner_svc.policy.load_parameters import LoadParameter, LoadValue, check_parameters
from runner_svc.runtimes.llama_server.arguments import (
    LlamaServerConfig,
    check_together,
    context_of,
    load_parameters,
    refused_parameter,
    slots_of,
)
from runner_svc.runtimes.llama_server.slots import NO_HOST_CACHE, LlamaSlots, shares_between_slots
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process_time import GpuTime
from runner_svc.templates.model_templates import check_before_load
from weft.api.common.v1 import embedding_pb2, rerank_pb2, tokenize_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.gpu.snapshot import ProcessId
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

PROPS = "/props"
TIMEOUT_SECONDS = 5.0
_MAX_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProps:
    """Figures that are 0 are not known."""

    context_tokens: int = 0
    """Of one slot."""
    slots: int = 0


class _Settings(msgspec.Struct):
    n_ctx: int = 0


class _Answer(msgspec.Struct):
    total_slots: int = 0
    default_generation_settings: _Settings = msgspec.field(default_factory=_Settings)


async def read_props(http: OpenAiHttp) -> ServerProps:
    """The answer to GET /props; of a server that gives none of use, nothing is known."""
    try:
        status, body = await http.ask("GET", PROPS, TIMEOUT_SECONDS)
    except WeftError:
        return ServerProps()
    return parse_props(body) if status == 200 else ServerProps()


def parse_props(body: bytes) -> ServerProps:
    """What is known from an answer's body."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except JSON_FAULTS:
        return ServerProps()
    return ServerProps(context_tokens=_sane(answer.default_generation_settings.n_ctx), slots=_sane(answer.total_slots))


def _sane(number: int) -> int:
    return number if 0 < number <= _MAX_NUMBER else 0


__all__ = ["LlamaServerBackend", "LlamaServerConfig"]

HEALTH_TIMEOUT_SECONDS = 2.0
FIRST_HEALTH_PAUSE_SECONDS = 0.02
MAX_HEALTH_PAUSE_SECONDS = 1.0
MAX_PORT_ATTEMPTS = 16
"""Ports that somebody else may take between our look and the engine's, before a start is given up."""

# Two writers share the pipe, so another line may begin right behind the port: six digits are not a port.
_LISTENING = re.compile(r"listening on http://[^\s:]+:(\d{2,5})(?!\d)|listening, .*port: (\d{2,5})(?!\d)")
# llama.cpp's words for it, and the operating system's.
_PORT_TAKEN = re.compile(r"couldn't bind .*socket|address already in use", re.IGNORECASE)
_UNKNOWN_FLAGS = re.compile(r"error: (?:invalid argument|unrecognized arguments): (--[^\n]{1,1000})")
_Result = TypeVar("_Result")


class _FirstWords:
    """What a server says before it listens."""

    def __init__(self) -> None:
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.port_is_taken = False
        self.unknown_flags = ""

    def hear(self, line: str) -> None:
        """Every line of its output."""
        if self.port.done():
            return
        if (found := _LISTENING.search(line)) is not None:
            self.port.set_result(int(found[1] or found[2]))
        elif (unknown := _UNKNOWN_FLAGS.search(line)) is not None:
            self.unknown_flags = unknown[1]
        elif _PORT_TAKEN.search(line):
            self.port_is_taken = True


class LlamaServerBackend:
    """A Backend over one llama.cpp server process."""

    def __init__(self, config: LlamaServerConfig, gpu: GpuTime | None = None) -> None:
        self._config = config
        self._process = EngineProcess(config.graces, gpu, config.leftovers)
        self._http: OpenAiHttp | None = None
        self._slots: LlamaSlots | None = None
        self._port = 0
        """The one that was taken for it; 0: its own choice."""

    @property
    def process_id(self) -> int | None:
        """See Backend.process_id."""
        return self._process.pid

    @property
    def log(self) -> LogRing:
        """See Backend.log."""
        return self._process.log

    def log_lines(self, count: int) -> list[str]:
        """See Backend.log_lines."""
        return self._process.log.last(count)

    @property
    def containment(self) -> str:
        """See Backend.containment."""
        return self._process.containment

    def load_progress(self) -> float | None:
        """None: llama.cpp's server has a callback of its own for it and prints nothing, at any level of its log."""
        return None

    def signs(self) -> ProcessSigns | None:
        """See Backend.signs."""
        return self._process.signs()

    async def responds(self, timeout_seconds: float) -> bool:
        """See Backend.responds."""
        http = self._http
        return http is not None and await http.status_of(HEALTH, timeout_seconds) is not None

    @property
    def load_parameters(self) -> Sequence[LoadParameter]:
        """See Backend.load_parameters."""
        return load_parameters(self._config)

    def check_load(self, parameters: Mapping[str, LoadValue], field: str = "parameters") -> None:
        """See ChecksLoads.check_load."""
        check_parameters(parameters, self.load_parameters, field)
        check_together(parameters, field)

    @property
    def cache_isolation(self) -> CacheIsolation:
        """See Backend.cache_isolation."""
        knows_no_slots = self._slots is not None and not self._slots.count
        shares = shares_between_slots(self._config.extra_arguments) or knows_no_slots
        return CacheIsolation.NONE if shares else CacheIsolation.SLOTS

    @property
    def slot_count(self) -> int:
        """See SlottedEngine.slot_count."""
        return 0 if self._slots is None else self._slots.count

    async def slot_snapshots(self) -> Sequence[SlotSnapshot]:
        """See SlottedEngine.slot_snapshots."""
        return () if self._slots is None else await self._slots.look()

    def processes(self) -> tuple[ProcessId, ...]:
        """See Backend.processes."""
        return self._process.processes()

    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """See Backend.erase_cache."""
        if self._slots is None:
            return ErasedCache(entry_count=0, token_count=0)
        return await self._slots.erase(slots)

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        """See Backend.start. Raises INVALID_ARGUMENT for parameters that it does not take."""
        order, config = order or LoadOrder(), self._config
        self.check_load(order.parameters)
        key = secrets.token_urlsafe(24)
        try:
            # The engine has no sandbox of its own for what comes with a model file.
            templates = await check_before_load(order.model_path or config.model_path, config.chat_template_path)
            # The key travels in the environment: arguments are visible to every user of the machine.
            environment = {**os.environ, **NO_HOST_CACHE, **hidden_devices(order), "LLAMA_API_KEY": key}
            port = await self._listen(order, environment)
            url = f"http://{LOOPBACK}:{port}"
            endpoint = Endpoint(
                base_url=url, api_key=key, parameters=config.profile(templates.all), is_llama_server=True
            )
            self._http = OpenAiHttp(endpoint, config.timeouts, self._explain_break)
            await self._while_loading(self._until_healthy(self._http))
            props = await self._while_loading(read_props(self._http))
            self._slots = LlamaSlots(self._http, props.slots)
        except BaseException:
            await self.stop()
            raise
        return BackendFacts(
            operations=config.operations,
            context_tokens=props.context_tokens or context_of(config, order),
            slots=props.slots or slots_of(config, order),
        )

    async def _listen(self, order: LoadOrder, environment: Mapping[str, str]) -> int:
        """Start the server, and again on another port while somebody is faster; its port, as it says itself."""
        ports, tried = self._config.ports, set[int]()
        while True:
            if ports is not None:
                self._port = ports.take(tried)
                tried.add(self._port)
            words = _FirstWords()
            arguments = self._config.arguments(order, self._port)
            await self._process.start([*self._config.command, *arguments], environment, words.hear)
            try:
                return await self._while_loading(words.port)
            except WeftError:
                if (refused := refused_parameter(words.unknown_flags, order)) is not None:
                    message = "cannot be set: this llama.cpp server does not know it"
                    raise invalid_field(f"parameters.{refused}", message) from None
                if ports is None or not words.port_is_taken or len(tried) == MAX_PORT_ATTEMPTS:
                    raise
                await self._stop_process()

    async def wait_exit(self) -> ExitReport:
        """See Backend.wait_exit."""
        return await self._process.wait_exit()

    async def stop(self) -> None:
        """See Backend.stop. Connections are closed first: a server without requests obeys its first SIGTERM."""
        http, self._http, self._slots = self._http, None, None
        try:
            if http is not None:
                await http.close()
        finally:
            await self._stop_process()

    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """See Backend.generate."""
        return self._running().generate(payload, self._process.noting(call))

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        """See Backend.embed."""
        if not self._config.embeddings:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, f"{self._config.alias} is not configured for embeddings")
        result = await self._running().embed(payload, call)
        self._process.note_answer()
        return result

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        """See Tokenizes.tokenize."""
        return await tokenize(self._running(), payload, call)

    async def rerank(self, payload: rerank_pb2.RerankPayload, call: CallInfo) -> RerankResult:
        """See Reranks.rerank."""
        if not self._config.reranks:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, f"{self._config.alias} is not configured for reranking")
        result = await rerank(self._running(), payload, call)
        self._process.note_answer()
        return result

    async def _stop_process(self) -> None:
        await self._process.stop()
        port, self._port = self._port, 0
        if self._config.ports is not None:
            self._config.ports.give_back(port)

    def _running(self) -> OpenAiHttp:
        if self._http is None:
            raise WeftError(Reason.BACKEND_NOT_READY, "the backend is not running")
        return self._http

    async def _until_healthy(self, http: OpenAiHttp) -> None:
        pause = FIRST_HEALTH_PAUSE_SECONDS
        while not await http.healthy(HEALTH_TIMEOUT_SECONDS):
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_HEALTH_PAUSE_SECONDS)

    async def _while_loading(self, awaited: Awaitable[_Result]) -> _Result:
        return await self._process.while_loading(awaited, self._config.load_stall_seconds)

    async def _explain_break(self, reason: Reason) -> WeftError | None:
        del reason
        return await self._process.explain_break()
