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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from runner_svc.backends.engine_process import EngineProcess
from runner_svc.backends.openai_http import HEALTH, Endpoint, OpenAiHttp
from runner_svc.backends.port import BackendFacts, CallInfo, EmbeddingResult, ExitReport, ProcessSigns
from runner_svc.gpu_time import GpuTime
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.supervise.leftovers import Leftovers
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process import StopGraces
from runner_svc.templates.model_templates import check_before_load
from weft.api.common.v1 import embedding_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

HEALTH_TIMEOUT_SECONDS = 2.0
FIRST_HEALTH_PAUSE_SECONDS = 0.02
MAX_HEALTH_PAUSE_SECONDS = 1.0

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
    chat_template_path: Path | None = None
    """A template to use instead of the model file's own."""
    extra_arguments: tuple[str, ...] = ()
    load_stall_seconds: float = 300.0
    """Loading is given up when neither output nor CPU time moved for this long."""
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    graces: StopGraces = field(default_factory=StopGraces)
    leftovers: Leftovers | None = None
    """Remembers its process for the runner's next life."""
    parameters: ParameterProfile = field(default_factory=ParameterProfile)
    """Which parameters beyond weft's own it is sent, and whether the model thinks by default."""

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
        if self.chat_template_path is not None:
            arguments += ["--chat-template-file", str(self.chat_template_path)]
        return [*arguments, *self.extra_arguments]


class LlamaServerBackend:
    """A Backend over one llama.cpp server process."""

    def __init__(self, config: LlamaServerConfig, gpu: GpuTime | None = None) -> None:
        self._config = config
        self._process = EngineProcess(config.graces, gpu, config.leftovers)
        self._http: OpenAiHttp | None = None

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

    async def start(self) -> BackendFacts:
        """See Backend.start."""
        key = secrets.token_urlsafe(24)
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def hear(line: str) -> None:
            found = _LISTENING.search(line)
            if found is not None and not listening.done():
                listening.set_result(int(found[1] or found[2]))

        try:
            # The engine has no sandbox of its own for what comes with a model file.
            await check_before_load(self._config.model_path, self._config.chat_template_path)
            # The key travels in the environment: arguments are visible to every user of the machine.
            await self._process.start(
                [*self._config.command, *self._config.arguments()],
                {**os.environ, "LLAMA_API_KEY": key},
                hear,
            )
            port = await self._while_loading(listening)
            url, parameters = f"http://127.0.0.1:{port}", self._config.parameters
            endpoint = Endpoint(base_url=url, api_key=key, parameters=parameters, reports_prefill=True)
            self._http = OpenAiHttp(endpoint, self._config.timeouts, self._explain_break)
            await self._while_loading(self._until_healthy(self._http))
        except BaseException:
            await self.stop()
            raise
        return BackendFacts(operations=self._config.operations, context_tokens=self._config.context_tokens)

    async def wait_exit(self) -> ExitReport:
        """See Backend.wait_exit."""
        return await self._process.wait_exit()

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
        return await self._process.while_loading(awaited, self._config.load_stall_seconds)

    async def _explain_break(self, reason: Reason) -> WeftError | None:
        del reason
        return await self._process.explain_break()
