"""An OpenAI-compatible server that weft starts: a child process, its port, its health, and the requests to it.

The program binds port 0 and prints where it listens, so another program on a recycled port is never mistaken for it.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from typing_extensions import override

from runner_svc.backend.engine_process import LOOPBACK, EngineProcess, EngineProcessSettings, ProcessBackend
from runner_svc.backend.port import CallInfo, EmbeddingResult
from runner_svc.openai_upstream.client import HEALTH, Endpoint, OpenAiHttp
from runner_svc.supervise.process_time import GpuTime
from weft.api.common.v1 import embedding_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

HEALTH_TIMEOUT_SECONDS = 2.0
FIRST_HEALTH_PAUSE_SECONDS = 0.02
MAX_HEALTH_PAUSE_SECONDS = 1.0
MAX_PORT_ATTEMPTS = 16
"""Number of ports tried in one start: another program may bind a port between the check and the engine's bind."""
# Two writers share the pipe, so another line may begin directly after the port: six digits are not a port.
LISTENING = re.compile(r"listening on http://[^\s:]+:(\d{2,5})(?!\d)|listening, .*port: (\d{2,5})(?!\d)")
# llama.cpp's message for it, and the operating system's.
_PORT_TAKEN = re.compile(r"couldn't bind .*socket|address already in use", re.IGNORECASE)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedServerConfig(EngineProcessSettings):
    """The configuration of every server that weft starts."""

    command: tuple[str, ...]
    """The program and its first arguments; the backend appends others."""
    alias: str
    """The model's name, for messages."""
    embeddings: bool = True


class StartLog:
    """Reads the output of a server until it listens."""

    def __init__(self) -> None:
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.port_is_taken = False

    def read(self, line: str) -> None:
        """Read a line of output."""
        if self.port.done():
            return
        if (found := LISTENING.search(line)) is not None:
            self.port.set_result(int(found[1] or found[2]))
        elif _PORT_TAKEN.search(line):
            self.port_is_taken = True
        else:
            self.read_other(line)

    def read_other(self, line: str) -> None:
        """Read a line that does not concern the port."""


class StartedServer(ProcessBackend):
    """The common part of backends over OpenAI-compatible servers that weft starts.

    A runtime adds `start`, which calls `_listen` and `_connect`, and its server's further operations.
    """

    def __init__(self, config: StartedServerConfig, gpu: GpuTime | None = None) -> None:
        super().__init__(EngineProcess(config.graces, gpu, config.leftovers))
        self._server = config
        self._http: OpenAiHttp | None = None
        self._port = 0
        """The reserved port; 0: the server chooses."""

    @override
    async def responds(self, timeout_seconds: float) -> bool:
        http = self._http
        return http is not None and await http.status_of(HEALTH, timeout_seconds) is not None

    async def stop(self) -> None:
        """See Backend.stop. Connections are closed first: llama-server without requests obeys its first SIGTERM."""
        http, self._http = self._http, None
        try:
            if http is not None:
                await http.close()
        finally:
            await self._stop_process()

    @override
    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        return self._running().generate(payload, self._process.noting(call))

    @override
    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        if not self._server.embeddings:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, f"{self._server.alias} is not configured for embeddings")
        result = await self._running().embed(payload, call)
        self._process.note_answer()
        return result

    async def _listen(
        self,
        arguments: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        explain: Callable[[StartLog], WeftError | None] = lambda _: None,
        make_log: Callable[[], StartLog] = StartLog,
    ) -> str:
        """Start the server and return its base URL; further ports are tried while another program takes them.

        `arguments` returns the arguments after the command for a port; `explain` may name the cause of a failed start.
        """
        ports, tried = self._server.ports, set[int]()
        while True:
            if ports is not None:
                self._port = ports.take(tried)
                tried.add(self._port)
            log = make_log()
            await self._process.start([*self._server.command, *arguments(self._port)], environment, log.read)
            try:
                return f"http://{LOOPBACK}:{await self._while_loading(log.port)}"
            except WeftError:
                if (error := explain(log)) is not None:
                    raise error from None
                if ports is None or not log.port_is_taken or len(tried) == MAX_PORT_ATTEMPTS:
                    raise
                await self._stop_process()

    async def _connect(self, endpoint: Endpoint) -> OpenAiHttp:
        """Open the client for requests; returns once the server is healthy."""
        self._http = http = OpenAiHttp(endpoint, self._server.timeouts, self._explain_break)
        await self._while_loading(_until_healthy(http))
        return http

    def _running(self) -> OpenAiHttp:
        if self._http is None:
            raise WeftError(Reason.BACKEND_NOT_READY, "the backend is not running")
        return self._http

    async def _while_loading(self, awaited: Awaitable[_Result]) -> _Result:
        return await self._process.while_loading(awaited, self._server.load_stall_seconds)

    async def _stop_process(self) -> None:
        await self._process.stop()
        port, self._port = self._port, 0
        if self._server.ports is not None:
            self._server.ports.give_back(port)

    async def _explain_break(self, reason: Reason) -> WeftError | None:
        del reason
        return await self._process.explain_break()


async def _until_healthy(http: OpenAiHttp) -> None:
    pause = FIRST_HEALTH_PAUSE_SECONDS
    while not await http.healthy(HEALTH_TIMEOUT_SECONDS):
        await asyncio.sleep(pause)
        pause = min(pause * 2, MAX_HEALTH_PAUSE_SECONDS)
