"""Failover channels: several addresses of one service, of which one serves at a time (a registry and its standby).

Calls go to the address that reports SERVING. A call in progress is not moved: it fails if its server fails.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typing_extensions import override

from weft.kernel.channels.chosen_channel import ChosenSyncChannel, PickedChannel
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.cancellation import task_is_cancelled
from weft.kernel.time.clock import Clock, SystemClock

log = get_logger("weft.failover")

READINESS = health_pb2.HealthCheckRequest(service="readiness")
"""Health check that each server is asked for."""
SETTLE_SECONDS = 2.0
"""Maximum wait of the first calls for a server to report SERVING."""
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 2.0
"""Bounds of the backoff between checks of an unreachable server."""
POLL_SECONDS = 2.0
"""Pause between checks of a server that supports Check but not Watch."""
CHECK_TIMEOUT_SECONDS = 2.0


class Reach(Enum):
    """Known state of one server."""

    UNKNOWN = auto()
    SERVING = auto()
    NOT_SERVING = auto()
    AWAY = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The server that calls go to, and the known state of each."""

    reaches: tuple[Reach, ...]
    chosen: int = 0
    is_sure: bool = False
    """Whether the chosen server has reported SERVING and has been reachable since."""

    @property
    def is_settled(self) -> bool:
        """Whether a server serves, or all have answered or failed."""
        return self.is_sure or Reach.UNKNOWN not in self.reaches


def after_news(choice: Choice, index: int, reach: Reach) -> Choice:
    """Returns the choice after a change of one server.

    The server that became SERVING last is chosen: a frozen owner reported it before its standby took over.
    """
    before = choice.reaches[index]
    reaches = (*choice.reaches[:index], reach, *choice.reaches[index + 1 :])
    if reach is Reach.SERVING and before is not Reach.SERVING:
        return Choice(reaches=reaches, chosen=index, is_sure=True)
    changed = replace(choice, reaches=reaches)
    if index != choice.chosen or reach is Reach.SERVING:
        return changed
    if Reach.SERVING in reaches:
        return replace(changed, chosen=reaches.index(Reach.SERVING), is_sure=True)
    # A server that reports NOT_SERVING, such as an owner with a full disk, still answers some calls.
    return changed if reach is Reach.NOT_SERVING else replace(changed, is_sure=False)


def after_call(choice: Choice) -> Choice:
    """Returns the choice for the next call: round robin while no server is known to serve."""
    if choice.is_sure:
        return choice
    count = len(choice.reaches)
    order = [(choice.chosen + step) % count for step in range(1, count + 1)]
    return replace(choice, chosen=next((each for each in order if choice.reaches[each] is not Reach.AWAY), order[0]))


def reach_of(status: int) -> Reach:
    """Returns the state for a status of grpc.health.v1."""
    return Reach.SERVING if status == health_pb2.HealthCheckResponse.SERVING else Reach.NOT_SERVING


class FailoverChannel(PickedChannel):
    """A grpc.aio channel over several servers. It watches their health from the first call on."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel], clock: Clock | None = None) -> None:
        """`channels` by address; `close` closes them too."""
        super().__init__(self._picked)
        self._addresses = tuple(channels)
        self._channels = tuple(channels.values())
        self._clock = clock or SystemClock()
        self._choice = Choice(reaches=tuple(Reach.UNKNOWN for _ in self._channels))
        self._settled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._on_move: list[Callable[[], None]] = []

    @property
    def address(self) -> str:
        """Address that the next call goes to."""
        return self._addresses[self._choice.chosen]

    def on_move(self, notice: Callable[[], None]) -> None:
        """Calls `notice` whenever calls move to another server, or the same server comes back."""
        self._on_move.append(notice)

    async def settled(self) -> None:
        """Waits until the choice is settled, at most SETTLE_SECONDS."""
        self._begin()
        await self._settled.wait()

    @override
    async def close(self, grace: float | None = None) -> None:
        tasks, self._tasks = self._tasks, []
        await stop_tasks(tasks)
        self._settled.set()
        for channel in self._channels:
            await channel.close(grace)

    @override
    def current(self) -> grpc.aio.Channel:
        return self._channels[self._choice.chosen]

    @override
    async def channel_ready(self) -> None:
        await self.settled()
        await super().channel_ready()

    @override
    def method(self, kind: str, names: tuple[Any, ...], options: dict[str, Any]) -> Any:
        begin = super().method(kind, names, options)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._begin()
            if kind != "unary_unary" or self._settled.is_set():
                return begin(*args, **kwargs)
            return self._later(partial(begin, *args, **kwargs))

        return call

    async def _later(self, begin: Callable[[], Any]) -> Any:
        await self.settled()
        return await begin()

    def _picked(self) -> grpc.aio.Channel:
        self._begin()
        channel = self.current()
        if self._settled.is_set():
            self._choice = after_call(self._choice)
        return channel

    def _begin(self) -> None:
        if not self._tasks and not self._settled.is_set():
            watches = [self._watch(index) for index in range(len(self._channels))]
            self._tasks = [start_task(each, name="failover-health") for each in (*watches, self._settle_in_time())]

    async def _settle_in_time(self) -> None:
        await self._clock.sleep(SETTLE_SECONDS)
        self._settled.set()

    async def _watch(self, index: int) -> None:
        stub: Any = health_pb2_grpc.HealthStub(self._channels[index])
        pause, can_watch = FIRST_PAUSE_SECONDS, True
        while True:
            try:
                if can_watch:
                    async for answer in stub.Watch(READINESS):
                        self._note(index, reach_of(answer.status))
                        pause = FIRST_PAUSE_SECONDS
                    self._note(index, Reach.AWAY)
                else:
                    answer = await stub.Check(READINESS, timeout=CHECK_TIMEOUT_SECONDS)
                    self._note(index, reach_of(answer.status))
                    pause = POLL_SECONDS
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED and can_watch:
                    can_watch = False
                    continue
                self._note(index, Reach.AWAY)
            except asyncio.CancelledError:
                # Closing a connection with an earlier certificate cancels its calls, but not this task.
                if task_is_cancelled():
                    raise
                self._note(index, Reach.AWAY)
            await self._clock.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _note(self, index: int, reach: Reach) -> None:
        before = self._choice
        self._choice = after_news(before, index, reach)
        is_first = not self._settled.is_set()
        if self._choice.is_settled:
            self._settled.set()
        is_back = index == before.chosen and reach is Reach.SERVING and before.reaches[index] is not Reach.SERVING
        if is_first or not (is_back or self._choice.chosen != before.chosen):
            return
        if not is_back:
            log.info("calls go to another server", address=self.address, before=self._addresses[before.chosen])
        for notice in self._on_move:
            notice()


class BlockingFailoverChannel(ChosenSyncChannel):
    """A blocking gRPC channel over several servers. Checks their health before the first call and after a failure."""

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        """`close` closes the `channels` too."""
        self._channels = tuple(channels)
        self._chosen: grpc.Channel | None = None
        self._lock = threading.Lock()

    @override
    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    @override
    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        for channel in self._channels:
            channel.unsubscribe(callback)

    @override
    def method(self, kind: str, names: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return _BlockingMethod(self, kind, names, options)

    @override
    def current(self) -> grpc.Channel:
        """Returns the channel of the serving server; otherwise of one that answers, otherwise the first."""
        with self._lock:
            if self._chosen is None:
                self._chosen = self._asked()
            return self._chosen

    def note_failure(self, channel: grpc.Channel, code: grpc.StatusCode | None) -> None:
        """Checks health again before the next call if a call found its server away, frozen or not serving."""
        if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
            with self._lock:
                if self._chosen is channel:
                    self._chosen = None

    def _asked(self) -> grpc.Channel:
        answered = threading.Condition()

        def note(_: Any) -> None:
            with answered:
                answered.notify_all()

        checks = []
        for channel in self._channels:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            checks.append(stub.Check.future(READINESS, timeout=CHECK_TIMEOUT_SECONDS))
            checks[-1].add_done_callback(note)

        def reaches() -> list[Reach]:
            return [_reach_of_check(check) for check in checks]

        with answered:
            answered.wait_for(
                lambda: Reach.SERVING in reaches() or Reach.UNKNOWN not in reaches(), 2 * CHECK_TIMEOUT_SECONDS
            )
        known = reaches()
        best = next((each for each in (Reach.SERVING, Reach.NOT_SERVING) if each in known), known[0])
        for check in checks:
            check.cancel()
        return self._channels[known.index(best)]


def _reach_of_check(check: Any) -> Reach:
    if not check.done():
        return Reach.UNKNOWN
    return Reach.AWAY if check.code() is not grpc.StatusCode.OK else reach_of(check.result().status)


class _BlockingMethod:
    """An rpc on the server that is chosen when it is called."""

    def __init__(self, owner: BlockingFailoverChannel, kind: str, method: Any, options: Any) -> None:
        """`kind` is the channel method, such as "unary_stream", that makes the rpc of the other arguments."""
        self._owner = owner
        self._kind = kind
        self._method = method
        self._options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        channel = self._owner.current()
        try:
            call = getattr(channel, self._kind)(*self._method, **self._options)(*args, **kwargs)
        except grpc.RpcError as error:
            self._owner.note_failure(channel, _code_of(error))
            raise
        if self._kind.endswith("_stream"):
            call.add_callback(lambda: self._owner.note_failure(channel, _code_of(call)))
        return call


def _code_of(call: Any) -> grpc.StatusCode | None:
    code: grpc.StatusCode | None = call.code()
    return code
