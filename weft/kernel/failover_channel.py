"""Channels over several addresses of one service, of which one serves at a time: a registry and its standby.

Calls go to the address whose health says SERVING. A call that has begun stays where it is, and fails there.
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

from weft.kernel.chosen_channel import ChosenSyncChannel, PickedChannel
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.interrupt import task_is_cancelled
from weft.kernel.log import get_logger
from weft.kernel.service import start_task, stop_tasks

log = get_logger("weft.failover")

READINESS = health_pb2.HealthCheckRequest(service="readiness")
"""What is asked of each server: whether it should get calls."""
SETTLE_SECONDS = 2.0
"""How long the first calls wait until it is known who serves."""
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 2.0
"""Pauses before a server that cannot be reached is asked again."""
POLL_SECONDS = 2.0
"""Pause between checks of a server that lets its health be checked but not watched."""
CHECK_TIMEOUT_SECONDS = 2.0


class Reach(Enum):
    """What is known of one server."""

    UNKNOWN = auto()
    SERVING = auto()
    NOT_SERVING = auto()
    AWAY = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which of several servers calls go to, and what is known of each."""

    reaches: tuple[Reach, ...]
    chosen: int = 0
    is_sure: bool = False
    """Whether the chosen one has said that it serves, and has been there since."""

    @property
    def is_settled(self) -> bool:
        """Whether more knowledge would choose no better: one serves, or each has answered or failed."""
        return self.is_sure or Reach.UNKNOWN not in self.reaches


def after_news(choice: Choice, index: int, reach: Reach) -> Choice:
    """Returns the choice after one server was found so.

    The server that has begun to serve last is chosen: of an owner and its standby only one serves, and an owner that is
    frozen said so before its standby took over.
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
    # A server that says no more than NOT_SERVING, such as an owner whose disk is full, still answers some calls.
    return changed if reach is Reach.NOT_SERVING else replace(changed, is_sure=False)


def after_call(choice: Choice) -> Choice:
    """Returns the choice for the next call. While none is known to serve, they take turns: one may answer this call."""
    if choice.is_sure:
        return choice
    count = len(choice.reaches)
    order = [(choice.chosen + step) % count for step in range(1, count + 1)]
    return replace(choice, chosen=next((each for each in order if choice.reaches[each] is not Reach.AWAY), order[0]))


def reach_of(status: int) -> Reach:
    """Returns what a status of grpc.health.v1 says."""
    return Reach.SERVING if status == health_pb2.HealthCheckResponse.SERVING else Reach.NOT_SERVING


class FailoverChannel(PickedChannel):
    """A channel of grpc.aio over several servers, whose health it watches from the first call on."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel], clock: Clock | None = None) -> None:
        """`channels` by address; they are closed with this one."""
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
        """Where the next call goes."""
        return self._addresses[self._choice.chosen]

    def on_move(self, notice: Callable[[], None]) -> None:
        """Have `notice` called when calls go to another server from now on, or to the same one after it was away."""
        self._on_move.append(notice)

    async def settled(self) -> None:
        """Returns once the serving address is known, or that none serves; after SETTLE_SECONDS at the latest."""
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
        """Begins a call with one response once it is known who serves."""
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
                # A connection of an earlier certificate that is cut cancels its calls, and not this task.
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
    """A channel of grpc over several servers, for threads.

    It asks who serves before the first call, and after a failed one.
    """

    def __init__(self, channels: Sequence[grpc.Channel]) -> None:
        """`channels` are closed with this one."""
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
        """Returns the channel of the server that serves; where none does, of one that answers, else the first one."""
        with self._lock:
            if self._chosen is None:
                self._chosen = self._asked()
            return self._chosen

    def note_failure(self, channel: grpc.Channel, code: grpc.StatusCode | None) -> None:
        """Asks again before the next call where a call has found that a server is away, frozen, or does not serve."""
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
    """An rpc on whatever server is chosen when it is called."""

    def __init__(self, owner: BlockingFailoverChannel, kind: str, method: Any, options: Any) -> None:
        """`kind` is the method of a gRPC channel that makes an rpc of the other arguments."""
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
