"""The common part of backends whose engine is a library in a host program that the runner starts.

docs/decisions/0011-in-process-engines.md explains the program and its messages. `media_backend` adds images and
recordings.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from typing_extensions import override

from runner_svc.backend.devices import hidden_devices
from runner_svc.backend.engine_process import LOADING, WORKING, EngineProcess, ProcessBackend
from runner_svc.backend.port import BackendFacts, LoadOrder
from runner_svc.engine_host.channel import ChannelClosedError, EngineChannel
from runner_svc.engine_host.messages import TOKEN_VARIABLE, Answer, Ready, Sleep, Wake, Work
from runner_svc.environments.environment import EngineEnvironment
from runner_svc.policy.host_memory import configured_limit
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.library_server import engine_command
from runner_svc.runtimes.model_engine import ModelContext, parameter_profile
from runner_svc.runtimes.settings import StartedModelSettings
from runner_svc.supervise.process_time import GpuTime
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

log = get_logger("weft.runner")

SLEEP_SECONDS = 30.0
"""Maximum time in which the engine frees its memory; then it is ended."""

Settings = TypeVar("Settings", bound=StartedModelSettings)


class HostBackend(ProcessBackend, Generic[Settings]):
    """A Backend over one host process."""

    program: ClassVar[str]
    """The module of the host program."""
    engine_parameters: ClassVar[EngineParameters]
    missing_library: ClassVar[str]
    """The error for a library that cannot be imported, with its remedy."""
    engine_environment: ClassVar[EngineEnvironment | None] = None
    """The environment of the host program where the runner has no `command`; None: weft's own."""

    def __init__(self, model: Settings, context: ModelContext, gpu: GpuTime | None = None) -> None:
        super().__init__(EngineProcess(context.graces, gpu, context.leftovers))
        self.model = model
        self.context = context
        self.parameters = parameter_profile(model, self.engine_parameters)
        self._channel: EngineChannel | None = None
        self._loading = False
        self._slots, self._free = 1, asyncio.Semaphore(1)
        """One place per running request: admission admits no more, but a cancelled one may still be ending."""
        self._holding_all = asyncio.Lock()
        self._started: tuple[LoadOrder, BackendFacts] | None = None
        """The order of the present process, and what became of it; None: none is ready."""
        self._asleep = False

    @abstractmethod
    def arguments(self, order: LoadOrder, socket: Path) -> list[str]:
        """Returns the command line of the host program after its command."""

    @abstractmethod
    def operations(self) -> frozenset[Operation]:
        """Returns the operations that the model offers."""

    def environment(self, order: LoadOrder) -> Mapping[str, str]:
        """Returns environment variables in addition to the runner's."""
        return hidden_devices(order)

    def sleeps_in_place(self, order: LoadOrder) -> bool:
        """Whether the engine can free its memory and keep its process after such a load, and is configured so."""
        del order
        return False

    async def before_start(self, order: LoadOrder) -> None:
        """Read what the runner itself needs of the model's files, before the engine starts. Raises as `start`."""

    @abstractmethod
    async def facts_of(self, ready: Ready) -> BackendFacts:
        """Returns the facts about the loaded model. Raises as `start`."""

    @override
    def load_progress(self) -> float | None:
        return self._channel.load_share if self._loading and self._channel is not None else None

    async def responds(self, timeout_seconds: float) -> bool:
        """See Backend.responds. Another thread than the engine's answers."""
        channel = self._channel
        return channel is not None and await channel.ping(timeout_seconds)

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        """See Backend.start. Raises also what `before_start` and `facts_of` raise."""
        order = order or LoadOrder()
        self.check_load(order.parameters)
        if (facts := await self._woken(order)) is not None:
            return facts
        self._loading = True
        try:
            await self.before_start(order)
            self._channel = channel = EngineChannel(self.missing_library)
            await channel.open()
            # The token is passed in the environment: arguments are visible to every user of the machine.
            environment = {**self.context.environment, **self.environment(order), TOKEN_VARIABLE: channel.token}
            command = [*self.engine_command(), *self.arguments(order, channel.path)]
            limit_bytes = configured_limit(self.model.host_memory_mb, order.host_limit_bytes)
            await self._process.start(command, environment, limit_bytes=limit_bytes)
            ready = await self._until_ready(channel)
            facts = await self.facts_of(ready)
        except BaseException:
            await self.stop()
            raise
        finally:
            self._loading = False
        self._slots, self._free = ready.slots, asyncio.Semaphore(ready.slots)
        self._started = order, facts
        return facts

    @override
    async def sleep(self) -> bool:
        if self._channel is None or self._started is None or not self.sleeps_in_place(self._started[0]):
            return False
        try:
            async with asyncio.timeout(SLEEP_SECONDS), self._all_slots():
                await self._do(self._channel, Sleep(self._channel.next_id()))
        except (TimeoutError, WeftError, ChannelClosedError) as error:
            log.warning("an engine did not go to sleep", model=self.model.name, message=str(error))
            return False
        self._asleep = True
        return True

    async def _woken(self, order: LoadOrder) -> BackendFacts | None:
        """Wake an engine that sleeps, and return its facts; None: there is none that can be woken for this order."""
        asleep, self._asleep = self._asleep, False
        if not asleep or self._channel is None or self._started is None:
            return None
        channel, (before, facts) = self._channel, self._started
        try:
            if order.needs_same_process(before):
                waking = self._do(channel, Wake(channel.next_id()))
                await self._process.while_loading(waking, self.context.load_stall_seconds)
                self._started = order, facts
                return facts
        except (WeftError, ChannelClosedError) as error:
            log.warning("an engine was not woken and starts again", model=self.model.name, message=str(error))
        except BaseException:
            await self.stop()
            raise
        await self.stop()
        return None

    @override
    async def stop(self) -> None:
        channel, self._channel = self._channel, None
        self._started, self._asleep = None, False
        try:
            await self._process.stop()
        finally:
            if channel is not None:
                await channel.close()

    def engine_command(self) -> Sequence[str]:
        """Returns the command of the host program. Raises CONNECT_FAILED where its environment is not installed."""
        return engine_command(self.context, self.program, self.engine_environment)

    async def _answers(self, channel: EngineChannel, request: Work) -> AsyncGenerator[list[Answer]]:
        """Yields the answers to a request. Raises as Backend.generate where the engine ends meanwhile."""
        try:
            async with aclosing(channel.answers_to(request)) as arrivals:
                async for answers in arrivals:
                    yield answers
        except ChannelClosedError:
            raise await self._explain_break() from None

    async def _do(self, channel: EngineChannel, request: Sleep | Wake) -> None:
        """Return once the engine has done something that has no other answer."""
        async with aclosing(channel.answers_to(request)) as arrivals:
            async for _ in arrivals:
                pass

    @asynccontextmanager
    async def _all_slots(self) -> AsyncGenerator[None]:
        """Hold every slot of the engine, once its running requests have ended."""
        async with self._holding_all, AsyncExitStack() as held:
            free = self._free
            for _ in range(self._slots):
                await held.enter_async_context(free)
            yield

    def _running(self) -> EngineChannel:
        if self._channel is None or self._asleep:
            raise WeftError(Reason.BACKEND_NOT_READY, "the engine is not running")
        return self._channel

    async def _until_ready(self, channel: EngineChannel) -> Ready:
        try:
            return await self._process.while_loading(
                channel.ready(), self.context.load_stall_seconds, lambda: channel.load_share
            )
        except ChannelClosedError:
            raise await self._explain_break(LOADING) from None

    async def _explain_break(self, when: str = WORKING) -> WeftError:
        """Returns the error for a closed channel."""
        return await self._process.explain_break(when) or WeftError(
            Reason.BACKEND_PROTOCOL_ERROR, "the engine closed its connection and still runs"
        )
