"""The runner-session generator: a process of its own that plays many runners, and those who watch them.

    echo '{"address": "127.0.0.1:7070", "sessions": 1000, "seconds": 10}' | python -m bench.sessions

Every session is what a runner opens: one model, heartbeats at an even pace, each with a capability report. A probe is
a report whose detail holds the moment it was sent, so that a watcher in this process knows the age of a change.
"""

import asyncio
import itertools
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import grpc
import msgspec
import uvloop

from bench.load import percentile
from weft.api.registry.v1 import (
    model_pb2,
    registry_service_pb2,
    registry_service_pb2_grpc,
    runner_pb2,
    runner_session_service_pb2_grpc,
)
from weft.api.registry.v1 import runner_session_service_pb2 as session_pb2
from weft.kernel.rpc import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub
    from weft.api.registry.v1.runner_session_service_pb2_grpc import RunnerSessionServiceAsyncStub

CHANNELS = 16
"""Connections that the sessions share: the bench is about the registry, not about its sockets."""
OPENING_AT_ONCE = 64
SLOTS = 4
CALL_SECONDS = 30.0
PROBE = "probe "
SETTLE_SECONDS = 1.0


class SessionJob(msgspec.Struct, kw_only=True, frozen=True):
    """How many play, and for how long."""

    address: str
    sessions: int
    seconds: float
    interval_seconds: float = 30.0
    """Between two heartbeats of one session."""
    changing: bool = True
    """Whether every report differs from the one before; otherwise none does."""
    watchers: int = 0
    probes_per_second: float = 0.0


class SessionResult(msgspec.Struct, kw_only=True, frozen=True):
    """The result. `news_p50` and `news_p99` are ages of probes when watchers received them, in milliseconds."""

    opening_seconds: float
    began: float
    """`time.time()` when everything stood and heartbeats began."""
    wall_seconds: float
    heartbeats: int
    failures: dict[str, int]
    news: int
    """Probes that watchers received, counted once per watcher; `news_expected` were sent."""
    news_expected: int
    news_p50: float
    news_p99: float


class Crowd:
    """All sessions of a job."""

    def __init__(self, job: SessionJob) -> None:
        self._job = job
        # gRPC shares connections between channels with equal options; the number makes them different.
        self._channels = [
            grpc.aio.insecure_channel(job.address, options=[*CHANNEL_OPTIONS, ("bench.channel", number)])
            for number in range(CHANNELS)
        ]
        self._session_ids: list[str] = []
        self._sequence = itertools.count(1)
        self.heartbeats = 0
        self.failures: Counter[str] = Counter()
        self.news: list[float] = []
        self.probes = 0

    async def open(self) -> float:
        """Open every session; how long that took."""
        began = time.perf_counter()
        gate = asyncio.Semaphore(OPENING_AT_ONCE)

        async def one(number: int) -> str:
            async with gate:
                response = await self._stub(number).OpenSession(_opening(number), timeout=CALL_SECONDS)
                return response.session_id

        self._session_ids = list(await asyncio.gather(*map(one, range(self._job.sessions))))
        return time.perf_counter() - began

    async def beat(self) -> None:
        """Heartbeats of all sessions, evenly over the interval, until the time is up."""
        pause = self._job.interval_seconds / self._job.sessions
        began, sent, running = time.perf_counter(), 0, set[asyncio.Task[None]]()
        while (elapsed := time.perf_counter() - began) < self._job.seconds:
            while sent * pause <= elapsed:
                task = asyncio.create_task(self._heartbeat(sent % self._job.sessions, self._detail(sent)))
                running.add(task)
                task.add_done_callback(running.discard)
                sent += 1
            await asyncio.sleep(min(pause, 0.01))
        if running:
            await asyncio.wait(running)

    async def probe(self) -> None:
        """Probes at their own pace, one at a time, by the first session."""
        if not self._job.probes_per_second:
            return
        until = time.perf_counter() + self._job.seconds
        while time.perf_counter() < until:
            self.probes += 1
            await self._heartbeat(0, f"{PROBE}{time.perf_counter()}")
            await asyncio.sleep(1 / self._job.probes_per_second)

    async def watch(self, number: int, standing: asyncio.Semaphore) -> None:
        """One watcher; sets `standing` when it has its snapshot."""
        channel = self._channels[number % CHANNELS]
        stub = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(channel))
        async for response in stub.Watch(registry_service_pb2.WatchRequest()):
            if response.HasField("snapshot"):
                standing.release()
                continue
            for state in response.change.runner.runner.capability.instances:
                if state.detail.startswith(PROBE):
                    self.news.append((time.perf_counter() - float(state.detail.removeprefix(PROBE))) * 1e3)

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()

    def _detail(self, sent: int) -> str:
        return f"report {sent}" if self._job.changing else ""

    async def _heartbeat(self, number: int, detail: str) -> None:
        request = session_pb2.HeartbeatRequest(
            session_id=self._session_ids[number],
            incarnation=f"run-{number}",
            sequence=next(self._sequence),
            capability=_capability(number, detail),
        )
        try:
            await self._stub(number).Heartbeat(request, timeout=CALL_SECONDS)
            self.heartbeats += 1
        except grpc.aio.AioRpcError as error:
            self.failures[f"{error.code().name}: {error.details()}"] += 1

    def _stub(self, number: int) -> "RunnerSessionServiceAsyncStub":
        channel = self._channels[number % CHANNELS]
        return cast("RunnerSessionServiceAsyncStub", runner_session_service_pb2_grpc.RunnerSessionServiceStub(channel))


async def play(job: SessionJob) -> SessionResult:
    """The whole job."""
    crowd = Crowd(job)
    opening_seconds = await crowd.open()
    standing = asyncio.Semaphore(0)
    watchers = [asyncio.create_task(crowd.watch(number, standing)) for number in range(job.watchers)]
    for _ in watchers:
        await standing.acquire()
    began, clock = time.time(), time.perf_counter()
    await asyncio.gather(crowd.beat(), crowd.probe())
    wall_seconds = time.perf_counter() - clock
    await asyncio.sleep(SETTLE_SECONDS)
    for watcher in watchers:
        watcher.cancel()
    ended = await asyncio.gather(*watchers, return_exceptions=True)
    crowd.failures.update(f"watcher: {end!r}" for end in ended if not isinstance(end, asyncio.CancelledError))
    await crowd.close()
    news = sorted(crowd.news)
    return SessionResult(
        opening_seconds=opening_seconds,
        began=began,
        wall_seconds=wall_seconds,
        heartbeats=crowd.heartbeats,
        failures=dict(crowd.failures),
        news=len(news),
        news_expected=crowd.probes * job.watchers,
        news_p50=percentile(news, 0.5) if news else 0.0,
        news_p99=percentile(news, 0.99) if news else 0.0,
    )


def _opening(number: int) -> Any:
    return session_pb2.OpenSessionRequest(
        request_id=f"open-{number}",
        runner=runner_pb2.Runner(
            name=f"runner-{number}",
            incarnation=f"run-{number}",
            address=f"dns:///host-{number}.example:7071",
            host=f"host-{number}",
            runtime="llama_server",
            version="0",
            capability=_capability(number, ""),
        ),
        models=[
            model_pb2.ModelManifest(
                name=f"model-{number}",
                pool_name=f"pool-{number % 100}",
                operations=[model_pb2.MODEL_OPERATION_CHAT],
                context_tokens=8192,
            )
        ],
    )


def _capability(number: int, detail: str) -> runner_pb2.Capability:
    state = runner_pb2.InstanceState(
        model=f"model-{number}",
        phase=runner_pb2.InstanceState.PHASE_READY,
        slots_total=SLOTS,
        context_tokens=8192,
        detail=detail,
    )
    return runner_pb2.Capability(instances=[state])


def main() -> None:
    """A job from stdin, its result to stdout."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=SessionJob)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(play(job))))


if __name__ == "__main__":
    main()
