"""A real ledger on a real gRPC server, written down in a home like one of `weft up`, and programs run against it."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from kit.home_gateway import home_gateway
from kit.warm_python import warm

from registry_svc.ledger.lease_store import LeaseStore
from registry_svc.ledger.ledger import Ledger
from registry_svc.ledger.policy.leases import LeaseState
from registry_svc.ledger.servicer import LeaseServicer
from registry_svc.mesh.runner_calls import EvictionAnswer, EvictionRequest, RunnerCalls
from registry_svc.mesh.store import SqlStore
from registry_svc.registry_config import LedgerConfig
from weft.api.registry.v1 import lease_service_pb2_grpc
from weft.api.registry.v1.lease_service_pb2 import HostMemory
from weft.kernel.channels.rpc import new_server
from weft.kernel.time.clock import SystemClock

WEFT = warm("weft_app.cli.main")
WAIT_SECONDS = 30.0
POLL_SECONDS = 0.02


class NoRunners(RunnerCalls):
    """There is nobody to ask."""

    def __init__(self) -> None: ...

    async def evict(self, request: EvictionRequest) -> EvictionAnswer:
        return EvictionAnswer.UNREACHABLE


def _no_session(_runner: str) -> None:
    """There is no runner."""


class LedgerHome:
    """A home whose registry is a ledger and nothing else; it may go away and come back."""

    def __init__(self, folder: Path, config: LedgerConfig) -> None:
        self.home = folder
        self._config = config
        self._port = 0
        self._stop: Callable[[], Any] | None = None
        self.ledger: Ledger | None = None

    async def start(self) -> None:
        """The ledger, as it was left."""
        store = SqlStore(f"sqlite:///{self.home}/registry.db")
        await store.open()
        ledger = Ledger(LeaseStore(store), SystemClock(), self._config, NoRunners(), _no_session)
        await ledger.start()
        server = new_server()
        lease_service_pb2_grpc.add_LeaseServiceServicer_to_server(LeaseServicer(ledger), server)
        self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
        await server.start()
        (self.home / "run").mkdir(parents=True, exist_ok=True)
        facts = self.home / "run" / "up.json"
        found = json.loads(facts.read_text()) if facts.exists() else {}
        facts.write_text(json.dumps(found | {"grpc": f"127.0.0.1:{self._port}"}))
        self.ledger = ledger

        async def stop() -> None:
            await ledger.stop(1.0)
            await server.stop(grace=None)
            await store.close()

        self._stop = stop

    async def stop(self) -> None:
        """The ledger goes away; what it keeps stays."""
        stop, self._stop, self.ledger = self._stop, None, None
        if stop is not None:
            await stop()

    def hosts(self) -> list[HostMemory]:
        assert self.ledger is not None
        return self.ledger.hosts()

    def leases(self) -> list[tuple[str, str, dict[int, int]]]:
        """(purpose, state, bytes by device) of every lease."""
        return [
            (
                one.purpose,
                LeaseState(one.state).name,
                {each.device_index: each.bytes for each in one.shares},
            )
            for host in self.hosts()
            for one in host.leases
        ]

    async def until(self, condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        """Wait until it holds. Raises TimeoutError with the leases as they are."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not condition():
            if asyncio.get_running_loop().time() > deadline:
                raise TimeoutError(f"still not so; leases: {self.leases()}")
            await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def ledger_home(folder: Path, **settings: Any) -> AsyncIterator[LedgerHome]:
    """A ledger that is quick to notice things."""
    quick = {
        "lease_time_to_live_seconds": 1.5,
        "renew_interval_seconds": 0.4,
        "watch_interval_seconds": 0.1,
        "restart_grace_seconds": 0.0,
        "device_margin_mb": 0,
    }
    home = LedgerHome(folder, LedgerConfig(**{**quick, **settings}))
    await home.start()
    try:
        with home_gateway(folder, json.loads((folder / "run" / "up.json").read_text())["grpc"]):
            yield home
    finally:
        await home.stop()


class Program:
    """A process that a test started, with all that it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.lines.append(line.decode(errors="replace").rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def says(self, words: str, seconds: float = WAIT_SECONDS) -> str:
        """The first line with these words."""
        async with asyncio.timeout(seconds):
            while not (found := [line for line in self.lines if words in line]):
                if self._reader.done():
                    raise AssertionError(f"it ended without saying {words!r}:\n{self.text}")
                await asyncio.sleep(POLL_SECONDS)
        return found[0]

    async def ended(self, seconds: float = WAIT_SECONDS) -> int:
        """Its exit status, once it and whoever else has its output are gone."""
        async with asyncio.timeout(seconds):
            status = await self.process.wait()
            await self._reader
        return status

    async def status(self, seconds: float = WAIT_SECONDS) -> int:
        """Its exit status alone; something it started may go on."""
        async with asyncio.timeout(seconds):
            # asyncio's own wait would wait for everybody who has its output.
            while (status := self.process.returncode) is None:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(POLL_SECONDS)
        return status

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def program(environment: dict[str, str], *command: str) -> AsyncIterator[Program]:
    """Run a program in a group of its own; the whole group ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    running = Program(process)
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await running.ended()


def weft_command(*arguments: str) -> list[str]:
    """A `weft` command line with this interpreter."""
    return [*WEFT, *arguments]


def acquire_command(memory: str, *command: str, options: tuple[str, ...] = ()) -> list[str]:
    """`weft mesh lease acquire` of a command."""
    return weft_command("mesh", "lease", "acquire", "--memory", memory, *options, "--", *command)
