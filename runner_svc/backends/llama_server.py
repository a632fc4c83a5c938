"""The llama.cpp HTTP server as a supervised child process.

The command is any program that takes llama-server's flags and speaks its HTTP contract: a native `llama-server`, our
launcher around the `xllamacpp` wheel, or `weft.testing.fake_backend`. The program binds port 0 and says on its own
output where it listens, so a stranger on a recycled port is never mistaken for it; a random key per start keeps
everybody else off the port.
"""

import asyncio
import os
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from runner_svc.backends.openai_http import Endpoint, HttpTimeouts, OpenAiHttp
from runner_svc.backends.port import BackendFacts, CallInfo, EmbeddingResult
from runner_svc.policy.load_stall import LoadSigns, LoadWatch
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process import StopGraces, SupervisedProcess
from weft.api.common.v1 import embedding_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

DEATH_NOTICE_SECONDS = 0.5
"""How long a broken connection may be ahead of the news that the process died."""
LOAD_CHECK_SECONDS = 0.5
HEALTH_TIMEOUT_SECONDS = 2.0
FIRST_HEALTH_PAUSE_SECONDS = 0.02
MAX_HEALTH_PAUSE_SECONDS = 1.0
CRASH_LOG_LINES = 5

# Two writers share the pipe, so another line may begin right behind the port: six digits are not a port.
_LISTENING = re.compile(r"listening on http://[^\s:]+:(\d{2,5})(?!\d)|listening, .*port: (\d{2,5})(?!\d)")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServerConfig:
    """One model served by one llama.cpp server."""

    command: tuple[str, ...]
    """The program and its first arguments; the flags of `arguments` follow."""
    model_path: Path
    alias: str
    slots: int = 4
    context_tokens: int = 2048
    """Context of one slot; the server is given this times `slots`."""
    threads: int = 1
    """llama.cpp with as many threads as a shared machine has cores is 10 times slower (measured): leave one free."""
    embeddings: bool = True
    extra_arguments: tuple[str, ...] = ()
    load_stall_seconds: float = 300.0
    """Loading is given up when neither output nor CPU time moved for this long."""
    timeouts: HttpTimeouts = field(default_factory=HttpTimeouts)
    graces: StopGraces = field(default_factory=StopGraces)

    @property
    def operations(self) -> frozenset[Operation]:
        """What the model can be asked for."""
        generation = {Operation.CHAT, Operation.COMPLETION}
        return frozenset(generation | {Operation.EMBEDDING} if self.embeddings else generation)

    def arguments(self) -> list[str]:
        """The command line after `command`."""
        arguments = [
            *("--model", str(self.model_path), "--alias", self.alias),
            *("--host", "127.0.0.1", "--port", "0"),
            *("--parallel", str(self.slots), "--ctx-size", str(self.slots * self.context_tokens)),
            *("--threads", str(self.threads), "--metrics", "--slots", "--jinja"),
        ]
        if self.embeddings:
            arguments += ["--embeddings", "--pooling", "mean"]
        return [*arguments, *self.extra_arguments]


class LlamaServerBackend:
    """A Backend over one llama.cpp server process."""

    def __init__(self, config: LlamaServerConfig) -> None:
        self._config = config
        self._log = LogRing()
        self._process = SupervisedProcess(self._log, config.graces)
        self._http: OpenAiHttp | None = None

    @property
    def process_id(self) -> int | None:
        """See Backend.process_id."""
        return self._process.pid

    @property
    def log(self) -> LogRing:
        """See Backend.log."""
        return self._log

    def log_lines(self, count: int) -> list[str]:
        """See Backend.log_lines."""
        return self._log.last(count)

    async def start(self) -> BackendFacts:
        """See Backend.start."""
        key = secrets.token_urlsafe(24)
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def hear(line: str) -> None:
            found = _LISTENING.search(line)
            if found is not None and not listening.done():
                listening.set_result(int(found[1] or found[2]))

        try:
            # The key travels in the environment: arguments are visible to every user of the machine.
            await self._process.start(
                [*self._config.command, *self._config.arguments()],
                env={**os.environ, "LLAMA_API_KEY": key},
                on_line=hear,
            )
            port = await self._while_loading(listening)
            endpoint = Endpoint(base_url=f"http://127.0.0.1:{port}", api_key=key)
            self._http = OpenAiHttp(endpoint, self._config.timeouts, self._explain_break)
            await self._while_loading(self._until_healthy(self._http))
        except BaseException:
            await self.stop()
            raise
        return BackendFacts(operations=self._config.operations, context_tokens=self._config.context_tokens)

    async def wait_exit(self) -> str:
        """See Backend.wait_exit."""
        how = await self._process.wait()
        if self._process.ended_by_us:
            await asyncio.Event().wait()  # a stop is not news; whoever waits here is cancelled
        return how

    async def stop(self) -> None:
        """See Backend.stop. Connections are closed first: a server without requests obeys its first SIGTERM."""
        http, self._http = self._http, None
        try:
            if http is not None:
                await http.close()
        finally:
            await self._process.stop()

    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """See Backend.generate."""
        return self._running().generate(payload, call)

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        """See Backend.embed."""
        if not self._config.embeddings:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, f"{self._config.alias} is not configured for embeddings")
        return await self._running().embed(payload, call)

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
        """The result of `awaited`, unless the process dies (SERVER_DIED) or stalls (LOAD_STALLED) before it comes."""
        ready = asyncio.ensure_future(awaited)
        died = asyncio.create_task(self._process.wait())
        watch = LoadWatch(self._load_signs())
        try:
            while True:
                await asyncio.wait({ready, died}, timeout=LOAD_CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if ready.done():
                    return ready.result()
                if died.done():
                    raise self._death(died.result(), "while it loaded")
                signs = self._load_signs()
                watch = watch.observe(signs)
                if watch.stalled(signs.at_seconds, self._config.load_stall_seconds):
                    raise WeftError(
                        Reason.LOAD_STALLED, f"loading made no progress for {self._config.load_stall_seconds:.0f} s"
                    )
        finally:
            ready.cancel()
            died.cancel()

    def _load_signs(self) -> LoadSigns:
        cpu_seconds = 0.0
        pid = self._process.pid
        if pid is not None:
            with suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                cpu_seconds = times.user + times.system
        return LoadSigns(asyncio.get_running_loop().time(), self._log.total_bytes, cpu_seconds)

    async def _explain_break(self, reason: Reason) -> WeftError | None:
        """Why a connection broke, if it is because the process ended."""
        del reason
        try:
            how = await asyncio.wait_for(self._process.wait(), DEATH_NOTICE_SECONDS)
        except TimeoutError:
            return None
        if self._process.ended_by_us:
            return WeftError(Reason.WORKER_RESTARTED, "the backend was stopped while it worked on the request")
        return self._death(how, "while it worked on the request")

    def _death(self, how: str, when: str) -> WeftError:
        lines = " | ".join(self._log.last(CRASH_LOG_LINES)) if when == "while it loaded" else ""
        return WeftError(Reason.SERVER_DIED, f"the backend died {when} ({how}){': ' + lines if lines else ''}")
