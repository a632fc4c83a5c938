"""An OpenAI-compatible server that weft starts: a child process, its port, its health, and the requests to it.

The program binds port 0 and prints where it listens, so another program on a recycled port is never mistaken for it.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

from typing_extensions import override

from runner_svc.backend.engine_process import LOOPBACK, EngineProcess, ProcessBackend
from runner_svc.backend.llama_flags import hidden_devices
from runner_svc.backend.port import BackendFacts, CallInfo, EmbeddingResult, LoadOrder
from runner_svc.openai_upstream.client import HEALTH, Endpoint, OpenAiHttp
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.model_engine import ModelContext, parameter_profile
from runner_svc.runtimes.settings import StartedModelSettings
from runner_svc.supervise.process_time import GpuTime
from weft.api.common.v1 import embedding_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

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
Model = TypeVar("Model", bound=StartedModelSettings)


class StartLog:
    """Reads the output of a server until it listens."""

    listening: ClassVar[re.Pattern[str]] = LISTENING
    """The line that says where it listens; the first group that is found is the port."""

    def __init__(self) -> None:
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.port_is_taken = False

    def read(self, line: str) -> None:
        """Read a line of output."""
        if self.port.done():
            return
        if (found := self.listening.search(line)) is not None:
            self.port.set_result(int(next(filter(None, found.groups()))))
        elif _PORT_TAKEN.search(line):
            self.port_is_taken = True
        else:
            self.read_other(line)

    def read_other(self, line: str) -> None:
        """Read a line that does not concern the port."""

    def refusal(self) -> WeftError | None:
        """Returns the error that the output names as the cause of a failed start; None: it names none."""
        return None


class StartedServer(ProcessBackend, Generic[Model]):
    """The common part of backends over OpenAI-compatible servers that weft starts: one model in one process.

    A runtime says what is its server's own: `engine_parameters`, `command`, `key_variable` and `arguments`, and where
    the defaults do not fit, the methods beside them. It needs no `start` and `stop` of its own.
    """

    engine_parameters: ClassVar[EngineParameters]
    """Request parameters that the server takes."""
    command: ClassVar[tuple[str, ...]] = ()
    """The program and its first arguments, where the context names no other."""
    key_variable: ClassVar[str]
    """Environment variable from which the server takes the key that it demands. The key is another one in each start:
    it keeps other programs off the server's port."""

    def __init__(self, model: Model, context: ModelContext, gpu: GpuTime | None = None) -> None:
        super().__init__(EngineProcess(context.graces, gpu, context.leftovers))
        self.model = model
        self.context = context
        self.parameters = parameter_profile(model, self.engine_parameters)
        self._http: OpenAiHttp | None = None
        self._port = 0
        """The reserved port; 0: the server chooses."""

    @property
    def operations(self) -> frozenset[Operation]:
        """The operations that the model offers."""
        return frozenset({Operation.CHAT, Operation.COMPLETION})

    def arguments(self, order: LoadOrder, port: int) -> Sequence[str]:
        """Returns the arguments after the command; port 0: any free one of this machine."""
        raise NotImplementedError

    def environment(self, order: LoadOrder) -> Mapping[str, str]:
        """Returns environment variables in addition to the runner's; the key is added to them."""
        return hidden_devices(order)

    async def prepare(self, order: LoadOrder) -> None:
        """Check what must be right before the server is started. Raises the error of the load otherwise."""

    def start_log(self, order: LoadOrder) -> StartLog:
        """Returns the reader of its output until it listens."""
        del order
        return StartLog()

    def endpoint(self, base_url: str, api_key: str) -> Endpoint:
        """Returns how requests are sent to the server."""
        return Endpoint(base_url=base_url, api_key=api_key, model=self.model.name, parameters=self.parameters)

    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        """Returns the facts about the healthy server; awaited as a part of its load."""
        del http, order
        return BackendFacts(
            operations=self.operations, context_tokens=self.model.slot_context_tokens, slots=self.model.slots
        )

    @override
    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        order = order or LoadOrder()
        self.check_load(order.parameters)
        key = secrets.token_urlsafe(24)
        try:
            await self.prepare(order)
            # The key travels in the environment: arguments are visible to every user of the machine.
            environment = {**self.context.environment, **self.environment(order), self.key_variable: key}
            base_url = await self._listen(order, environment)
            self._http = http = OpenAiHttp(self.endpoint(base_url, key), self.context.timeouts, self._explain_break)
            await self._while_loading(_until_healthy(http))
            return await self._while_loading(self.facts(http, order))
        except BaseException:
            await self.stop()
            raise

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
        if Operation.EMBEDDING not in self.operations:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, f"{self.model.name} is not configured for embeddings")
        result = await self._running().embed(payload, call)
        self._process.note_answer()
        return result

    async def _listen(self, order: LoadOrder, environment: Mapping[str, str]) -> str:
        """Start the server and return its base URL; further ports are tried while another program takes them."""
        ports, tried = self.context.ports, set[int]()
        command = self.context.command or self.command
        while True:
            if ports is not None:
                self._port = ports.take(tried)
                tried.add(self._port)
            log = self.start_log(order)
            await self._process.start([*command, *self.arguments(order, self._port)], environment, log.read)
            try:
                return f"http://{LOOPBACK}:{await self._while_loading(log.port)}"
            except WeftError:
                if (refusal := log.refusal()) is not None:
                    raise refusal from None
                if ports is None or not log.port_is_taken or len(tried) == MAX_PORT_ATTEMPTS:
                    raise
                await self._stop_process()

    def _running(self) -> OpenAiHttp:
        if self._http is None:
            raise WeftError(Reason.BACKEND_NOT_READY, "the backend is not running")
        return self._http

    async def _while_loading(self, awaited: Awaitable[_Result]) -> _Result:
        return await self._process.while_loading(awaited, self.context.load_stall_seconds)

    async def _stop_process(self) -> None:
        await self._process.stop()
        port, self._port = self._port, 0
        if self.context.ports is not None:
            self.context.ports.give_back(port)

    async def _explain_break(self, reason: Reason) -> WeftError | None:
        del reason
        return await self._process.explain_break()


async def _until_healthy(http: OpenAiHttp) -> None:
    pause = FIRST_HEALTH_PAUSE_SECONDS
    while not await http.healthy(HEALTH_TIMEOUT_SECONDS):
        await asyncio.sleep(pause)
        pause = min(pause * 2, MAX_HEALTH_PAUSE_SECONDS)
