"""An OpenAI-compatible server that weft starts: a child process, its port, its health, and requests to it.

Another program on its port is never mistaken for it: nothing is sent on a connection before one of the server's
processes has accepted it.
"""

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from typing_extensions import override

from runner_svc.backend.devices import hidden_devices
from runner_svc.backend.engine_process import LOOPBACK, ProcessBackend, free_port
from runner_svc.backend.port import (
    BackendFacts,
    CallInfo,
    EnginePage,
    LoadOrder,
)
from runner_svc.backend.prefix_reports import PrefixReports
from runner_svc.openai_upstream.client import Endpoint, OpenAiHttp
from runner_svc.openai_upstream.server_probes import HEALTH
from runner_svc.policy.engine_blocks import ClearedCache
from runner_svc.policy.host_memory import configured_limit
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.engine_figures import FigureSampler, MetricsPage
from runner_svc.runtimes.kv_events import BlockEvents
from runner_svc.runtimes.model_engine import ModelContext, parameter_profile
from runner_svc.runtimes.runtime_settings import StartedModelSettings
from runner_svc.runtimes.server_calls import ServerCalls
from runner_svc.supervise.peer_process import ForeignPeerError
from weft.api.registry.v1 import runner_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.started_server")

HEALTH_TIMEOUT_SECONDS = 2.0
HEALTHY = 200
FIRST_HEALTH_PAUSE_SECONDS = 0.02
MAX_HEALTH_PAUSE_SECONDS = 1.0
MAX_PORT_ATTEMPTS = 16
"""Number of ports tried in one start, since another program may bind a port before the engine does."""
MAX_FOREIGN_LISTENERS = 2
"""Number of starts with another process on the port before the start fails; losing a port is a rare race."""
# Two writers share the pipe, so another line may follow the port directly: six digits are not a port.
LISTENING = re.compile(r"listening on http://[^\s:]+:(\d{2,5})(?!\d)|listening, .*port: (\d{2,5})(?!\d)")
# Messages of llama.cpp, the operating system and Docker.
_PORT_TAKEN = re.compile(r"couldn't bind .*socket|address already in use|port is already allocated", re.IGNORECASE)
Model = TypeVar("Model", bound=StartedModelSettings)


class _ForeignListenerError(WeftError):
    """Another process than the server accepts connections on the port."""


class StartLog:
    """Reads the output of a starting server: its address, and lines that its runtime handles."""

    def __init__(self, order: LoadOrder, note: Callable[[str, "StartLog"], None]) -> None:
        """`note` is called for each line."""
        self.order = order
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.port_is_taken = False
        self.is_finished = False
        """Whether the server accepts requests."""
        self.is_ready = asyncio.Event()
        """Set by a line that shows that the server accepts requests."""
        self.share: float | None = None
        """The loaded share of the model; None: unknown."""
        self.memory = runner_pb2.EngineLoad()
        """The server's memory according to its output."""
        self.refusal: WeftError | None = None
        """The cause of a failed start according to the output; None: unknown."""
        self._note = note

    def read_lines(self, lines: list[str]) -> None:
        """Reads output lines until the server accepts requests."""
        for line in lines if not self.is_finished else ():
            self._note(line, self)
            if self.port.done():
                continue
            if (found := LISTENING.search(line)) is not None:
                self.port_is_taken = False
                self.port.set_result(int(next(filter(None, found.groups()))))
            elif _PORT_TAKEN.search(line):
                self.port_is_taken = True

    def finish(self, port: int) -> None:
        """Stops reading: the server accepts requests. `port` is used if no line has named one."""
        self.is_finished = True
        if not self.port.done():
            self.port.set_result(port)


class StartedServer(ServerCalls, ProcessBackend, Generic[Model]):
    """Base of backends for OpenAI-compatible servers that weft starts: one model in one process.

    A runtime defines `engine_parameters`, `command`, `key_variable` and `arguments`, and overrides other methods whose
    defaults do not fit.
    """

    engine_parameters: EngineParameters
    command: tuple[str, ...] = ()
    """The program and its first arguments, unless the context overrides them."""
    noun = "the server"
    """Name of the server in the log."""
    needs_port: bool = False
    """Whether the server needs an assigned port because it does not print the one it has chosen."""
    external_listener: bool = False
    """Whether a process that the server did not start listens on its port, which disables the check of connections."""
    listener_remedy: str = ""
    """Advice for a correct server without a process listening on its port; empty: none."""
    health_path: str = HEALTH
    """Route that returns `healthy_status` once the server accepts requests."""
    healthy_status: int = HEALTHY
    folder: Path | None = None
    """Working directory of the server; None: the runner's."""
    metrics_page: MetricsPage | None = None
    """The page for sampling load figures; None: there is none."""
    start_timeout_seconds: float | None = None
    """Maximum start time; None: unlimited while it makes progress."""
    operations = frozenset({Operation.CHAT, Operation.COMPLETION})
    reports_blocks: bool = False
    """Whether the server publishes which blocks its prefix cache has (`kv_events`)."""
    key_variable: str
    """Environment variable for the key that the server requires. Each start has a new key, which keeps other programs
    off the server's port. Empty: no key."""

    def __init__(self, model: Model, context: ModelContext) -> None:
        super().__init__(context.graces, context.leftovers, context.load_stall_seconds)
        self.model = model
        self.context = context
        self.parameters = parameter_profile(model, self.engine_parameters)
        self.figures = FigureSampler()
        self._sleeps = False
        """Whether it sleeps in its process."""
        self._order = LoadOrder()
        """Options of the current load ..."""
        self._facts: BackendFacts | None = None
        """... and its facts; None: not loaded."""
        self._memory = runner_pb2.EngineLoad()
        """Memory that the server reported when it started."""
        self._http: OpenAiHttp | None = None
        self._log: StartLog | None = None
        """Output of the current load; None: not loading."""
        self._port = 0
        """Port assigned to the server; 0: it chooses one."""
        self._reports = PrefixReports() if self.reports_blocks else None
        self._events: BlockEvents | None = None
        """What the running server publishes."""

    def arguments(self, order: LoadOrder, port: int) -> Sequence[str]:
        """Returns the arguments after the command; port 0: any free local port, unless `needs_port`."""
        raise NotImplementedError

    def environment(self, order: LoadOrder) -> Mapping[str, str]:
        """Returns environment variables in addition to the runner's, without the key."""
        return hidden_devices(order)

    async def prepare(self, order: LoadOrder) -> None:
        """Checks the preconditions of a start. Raises the error of the load if they fail."""

    def note_line(self, line: str, log: StartLog) -> None:
        """Handles an output line of a start: progress, memory, cause of failure, readiness."""

    async def address(self, log: StartLog) -> str:
        """Returns the server's base URL once it is known, possibly before the server responds there."""
        return f"http://{LOOPBACK}:{self._port if self.needs_port else await log.port}"

    def endpoint(self, base_url: str, api_key: str) -> Endpoint:
        """Returns how to send requests to the server."""
        return Endpoint(base_url=base_url, api_key=api_key, model=self.model.name, parameters=self.parameters)

    async def until_ready(self, http: OpenAiHttp, log: StartLog) -> None:
        """Returns once the server accepts requests; part of its load."""
        del log
        pause = FIRST_HEALTH_PAUSE_SECONDS
        while await http.status_of(self.health_path, HEALTH_TIMEOUT_SECONDS) != self.healthy_status:
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_HEALTH_PAUSE_SECONDS)

    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        """Returns the facts about the healthy server; part of its load."""
        del http, order
        return BackendFacts(
            operations=self.operations, context_tokens=self.model.slot_context_tokens, slots=self.model.slots
        )

    async def free_memory(self, http: OpenAiHttp, order: LoadOrder) -> bool:
        """Frees the accelerator memory but keeps the process. `order`: the options of its load.

        False: not possible now. Raises WeftError if it fails.
        """
        del http, order
        return False

    async def take_memory(self, http: OpenAiHttp) -> None:
        """Returns once a server accepts requests again after its memory was freed; part of its load."""
        raise NotImplementedError

    @override
    async def sleep(self) -> bool:
        if (http := self._http) is None:
            return False
        try:
            self._sleeps = await self.free_memory(http, self._order)
        except WeftError as error:
            what = f"{self.noun} did not go to sleep"
            log.warning(what, model=self.model.name, message=error.log_message)
        if self._sleeps:
            await self.figures.end()
            self.note_emptied_cache()
        return self._sleeps

    def note_build(self, build: str) -> None:
        """Called with the version that a started server reports; empty: it reports none."""

    def note_emptied_cache(self) -> None:
        """Records that the server's prefix cache is empty: its own event comes with its next request."""
        if self._reports is not None:
            self._reports.apply([ClearedCache()])

    @override
    def load_progress(self) -> float | None:
        return None if self._log is None else self._log.share

    @override
    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        order = order or LoadOrder()
        self.check_load(order.parameters)
        timeout = asyncio.timeout(self.start_timeout_seconds)
        try:
            async with timeout:
                return await self._woken(order) or await self._started(order)
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError) and timeout.expired():
                limit = f"{self.start_timeout_seconds:g} s (start_timeout_seconds)"
                raise WeftError(Reason.LOAD_STALLED, f"{self.noun} was not ready within {limit}") from error
            raise

    async def _started(self, order: LoadOrder) -> BackendFacts:
        """Restarts the server and returns its facts."""
        if self._http is not None:
            await self.stop()
        await self.prepare(order)
        http = await self._healthy(order)
        facts = await self.while_loading(self.facts(http, order))
        self._order, self._facts, self._log = order, facts, None
        self.figures.begin(http, self.metrics_page)
        return facts

    async def _woken(self, order: LoadOrder) -> BackendFacts | None:
        """Wakes its sleeping process and returns its facts; None: a start is required."""
        http, facts = self._http, self._facts
        if not self._sleeps or http is None or facts is None or not order.needs_same_process(self._order):
            return None
        try:
            await self.while_loading(self.take_memory(http))
        except WeftError as error:
            what = f"{self.noun} did not wake; it is restarted"
            log.warning(what, model=self.model.name, message=error.log_message)
            return None
        self._sleeps, self._order = False, order
        self.figures.begin(http, self.metrics_page)
        return facts

    @property
    @override
    def engine_load(self) -> runner_pb2.EngineLoad | None:
        if not self._memory.ListFields() or self._facts is None or self._sleeps:
            return self.figures.load
        load = runner_pb2.EngineLoad()
        load.CopyFrom(self._memory)
        if self.figures.load is not None:
            load.MergeFrom(self.figures.load)
        return load

    @property
    @override
    def engine_page(self) -> EnginePage:
        return self.figures.page

    @override
    async def responds(self, timeout_seconds: float) -> bool:
        http = self._http
        return http is not None and await http.status_of(self.health_path, timeout_seconds) is not None

    async def stop(self) -> None:
        """See Backend.stop. Connections are closed first, because an idle llama-server obeys its first SIGTERM."""
        http, self._http = self._http, None
        self._sleeps, self._facts, self._log = False, None, None
        events, self._events = self._events, None
        try:
            await self.figures.end()
            if events is not None:
                await events.end()
            if http is not None:
                await http.close()
        finally:
            await super().stop()
            port, self._port = self._port, 0
            if self.context.ports is not None:
                self.context.ports.give_back(port)

    @override
    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        http, reports, prefixes = self._running(), self._reports, call.prefixes
        if reports is None or prefixes is None:
            return http.generate(payload, self.noting(call))
        reported = replace(call, cache=replace(call.cache, session=call.request_id))
        return reports.attributed(http.generate(payload, self.noting(reported)), call.request_id, prefixes)

    @property
    @override
    def prefix_reports(self) -> PrefixReports | None:
        return self._reports

    @contextmanager
    @override
    def _asking(self, operation: Operation, call: CallInfo) -> Iterator[tuple[OpenAiHttp, CallInfo]]:
        with super()._asking(operation, self.noting(call)) as asked:
            yield asked
        if operation is not Operation.TOKENIZE:
            self.note_answer()

    async def _healthy(self, order: LoadOrder) -> OpenAiHttp:
        """Starts the server and returns its client; tries more ports if other programs take them."""
        tried = set[int]()
        foreign: list[WeftError] = []
        while True:
            try:
                self._port = self._next_port(tried)
            except WeftError as error:
                raise (foreign or [error])[-1] from None
            tried.add(self._port)
            self._log = log = StartLog(order, self.note_line)
            try:
                return await self._attempt(order, log)
            except WeftError as error:
                if log.refusal is not None:
                    raise log.refusal from None
                if isinstance(error, _ForeignListenerError):
                    foreign.append(error)
                elif not (self._port and log.port_is_taken):
                    raise
                if len(foreign) == MAX_FOREIGN_LISTENERS or len(tried) == MAX_PORT_ATTEMPTS:
                    raise
                await StartedServer.stop(self)

    def _next_port(self, tried: Container[int]) -> int:
        """Returns a port that is free now; 0: the server chooses."""
        if self.context.ports is not None:
            return self.context.ports.take(tried)
        return free_port() if self.needs_port else 0

    async def _attempt(self, order: LoadOrder, log: StartLog) -> OpenAiHttp:
        """Starts the server on one port and returns its client once it is healthy."""
        key = secrets.token_urlsafe(24) if self.key_variable else ""
        # The key is passed in the environment because arguments are visible to all users of the machine.
        secret = {self.key_variable: key} if key else {}
        environment = {**self.context.environment, **self.environment(order), **secret}
        arguments = [*(self.context.command or self.command), *self.arguments(order, self._port)]
        if self._reports is not None:
            self._events = await BlockEvents.begin(self._reports, self.model.name)
            arguments += self._events.arguments
        limit_bytes = configured_limit(self.model.host_memory_mb, order.host_limit_bytes)
        if limit_bytes is not None:
            limit_bytes += self.kept_prompt_bytes
        await self.start_process(arguments, environment, log.read_lines, self.folder, limit_bytes)
        endpoint = self.endpoint(await self.while_loading(self.address(log)), key)
        if not self.external_listener and not endpoint.socket_path:
            endpoint = replace(endpoint, verify=self._require_own)
        self._http = http = OpenAiHttp(endpoint, self.context.timeouts, self.explain_break)
        await self.while_loading(self.until_ready(http, log))
        log.finish(self._port)
        self._memory = log.memory
        return http

    async def _require_own(self, transport: asyncio.BaseTransport) -> None:
        """See `require_peer`. Raises _ForeignListenerError instead during a load, which tries another port."""
        try:
            await self.require_peer(transport)
        except ForeignPeerError as error:
            if self._log is None:
                raise
            port = transport.get_extra_info("peername")[1]
            message = f"another program listens on port {port}, not the server{self.listener_remedy}"
            raise _ForeignListenerError(Reason.CONNECT_FAILED, message) from error

    @override
    def _running(self) -> OpenAiHttp:
        if self._http is None:
            raise WeftError(Reason.BACKEND_NOT_READY, "the engine is not running")
        return self._http
