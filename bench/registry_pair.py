"""How long a pair of registries is away when its owner is killed or frozen: `python -m bench.registry_pair`.

Two `weft serve registry` on a PostgreSQL of the wheel pgserver, and sessions of runners over the list of both
addresses, in this process. Each round ends the owner and brings it back as the standby. It asserts nothing.
"""

import argparse
import asyncio
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runner_svc.config import RunnerConfig
from runner_svc.session.report import RunnerReport
from runner_svc.session.session import RunnerSession
from weft.api.registry.v1 import registry_service_pb2, registry_service_pb2_grpc, runner_pb2
from weft.kernel.clock import SystemClock
from weft.kernel.failover_channel import READINESS, FailoverChannel
from weft.kernel.rpc import open_channel
from weft.kernel.telemetry import configure_logging
from weft_testing.free_port import free_port
from weft_testing.postgres_server import running_postgres

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub

POLL_SECONDS = 0.005
CALL_SECONDS = 1.0
ROUND_SECONDS = 120.0
SETTLE_SECONDS = 3.0


class Registry:
    """One registry of the pair, on a port that it keeps."""

    def __init__(self, folder: Path, database_url: str) -> None:
        folder.mkdir()
        self._folder = folder
        (folder / "weft.yaml").write_text(yaml.safe_dump({"registry": {"database_url": database_url}}))
        self.address = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts it, and returns once it listens."""
        home = ["--home", str(self._folder), "--config", str(self._folder / "weft.yaml")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weft_app.cli.main", "serve", "registry", *home, "--listen", self.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        """Kills it, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    async def serves(self) -> bool:
        """Whether its health says so."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(READINESS, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def session(folder: Path, number: int, addresses: str) -> AsyncIterator[None]:
    """A runner's session as `runner_svc.service` has it, without engines."""
    name, clock = f"runner-{number:03}", SystemClock()
    channel = open_channel(addresses)
    assert isinstance(channel, FailoverChannel)
    config = RunnerConfig(
        name=name,
        host=name,
        address=f"unix:/{name}",
        registry_address=addresses,
        session_file=folder / f"{name}.session",
        models=(),
    )
    running = RunnerSession(
        registry=channel,
        report=RunnerReport(config, f"life-{number}", []),
        gates=(),
        incarnation=f"life-{number}",
        session_file=config.session_file,
        clock=clock,
        jitter=random.SystemRandom().random,
    )
    channel.on_move(running.note_other_registry)
    await running.start()
    try:
        yield
    finally:
        await running.stop()
        await channel.close(grace=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one change of the owner took, in seconds since the signal."""

    serving: float
    """Until the health of the other registry says SERVING."""
    answered: float
    """Until a client over both addresses has an answer that includes every runner as active."""
    reported: float
    """Until each runner has sent the new owner a heartbeat."""
    inactive: int
    """Runners that were inactive in any answer."""


class Pair:
    """The pair with its runners, and a client."""

    def __init__(self, registries: Sequence[Registry], runners: int, channel: grpc.aio.Channel) -> None:
        self.registries = registries
        self._runners = runners
        self._stub = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(channel))

    async def listed(self) -> list[runner_pb2.Runner]:
        """The runners; empty where no registry answers."""
        try:
            request = registry_service_pb2.ListRunnersRequest()
            return list((await self._stub.ListRunners(request, timeout=CALL_SECONDS)).runners)
        except grpc.aio.AioRpcError:
            return []

    async def all_listed(self) -> None:
        """Returns once every runner is listed, and both registries have their roles."""
        while len(await self.listed()) < self._runners:  # noqa: ASYNC110 - another process is asked
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.sleep(SETTLE_SECONDS)

    async def change(self, number: signal.Signals) -> Round:
        """Ends the owner by a signal, and brings it back."""
        (owner,) = [each for each in self.registries if await each.serves()]
        (standby,) = [each for each in self.registries if each is not owner]
        began, began_utc = time.monotonic(), datetime.now(UTC)
        owner.send(number)
        serving, (answered, reported, inactive) = await asyncio.gather(
            self._serving_after(standby, began), self._followed(began, began_utc)
        )
        if number is signal.SIGSTOP:
            owner.send(signal.SIGCONT)
            await asyncio.sleep(SETTLE_SECONDS)
        owner.end()
        owner.start()
        await self.all_listed()
        return Round(serving=serving, answered=answered, reported=reported, inactive=inactive)

    async def _serving_after(self, standby: Registry, began: float) -> float:
        while not await standby.serves():  # noqa: ASYNC110 - as above
            await asyncio.sleep(POLL_SECONDS)
        return time.monotonic() - began

    async def _followed(self, began: float, began_utc: datetime) -> tuple[float, float, int]:
        answered, inactive = 0.0, 0
        while time.monotonic() - began < ROUND_SECONDS:
            found = await self.listed()
            active = [each for each in found if each.status == runner_pb2.Runner.STATUS_ACTIVE]
            inactive = max(inactive, len(found) - len(active))
            if len(active) == self._runners and not answered:
                answered = time.monotonic() - began
            beats = [each.last_heartbeat_time.ToDatetime(UTC) for each in active]
            if len(beats) == self._runners and all(each > began_utc for each in beats):
                return answered, time.monotonic() - began, inactive
            await asyncio.sleep(POLL_SECONDS)
        return answered, ROUND_SECONDS, inactive


async def measure(runners: int, kills: int, freezes: int) -> None:
    """Measures, and prints a table."""
    async with AsyncExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        postgres = ends.enter_context(running_postgres())
        database_url = postgres.url(ends.enter_context(postgres.fresh_database()))
        registries = [Registry(folder / name, database_url) for name in ("first", "second")]
        for each in registries:
            ends.callback(each.end)
            each.start()
        addresses = ",".join(each.address for each in registries)
        for number in range(runners):
            await ends.enter_async_context(session(folder, number, addresses))
        channel = await ends.enter_async_context(open_channel(addresses))
        pair = Pair(registries, runners, channel)
        await pair.all_listed()
        print(f"{platform.machine()}, Python {platform.python_version()}, {runners} runners")
        print(
            "| event | rounds | new owner serves, s | a client has its answer, s | runners have reported, s | expired |"
        )
        print("|---|---|---|---|---|---|")
        for words, number, count in (("kill -9", signal.SIGKILL, kills), ("SIGSTOP", signal.SIGSTOP, freezes)):
            rounds = [await pair.change(number) for _ in range(count)]
            if rounds:
                figures = [
                    f"{median(values):.2f} (at most {max(values):.2f})"
                    for values in zip(*((each.serving, each.answered, each.reported) for each in rounds), strict=True)
                ]
                print(f"| {words} | {count} | {' | '.join(figures)} | {max(each.inactive for each in rounds)} |")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", type=int, default=50)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--freezes", type=int, default=5)
    options = parser.parse_args()
    configure_logging("bench", level="warning", file=None)
    asyncio.run(measure(options.runners, options.kills, options.freezes))


if __name__ == "__main__":
    main()
