"""A host with fake devices, real runner processes with real engines, and the registry's ledger."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import psutil
import yaml

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.store import SqlStore
from registry_svc.registry_config import LedgerConfig, RegistryConfig
from registry_svc.registry_service import RegistryService
from runner_svc.policy.lifecycle import Phase
from weft.api.registry.v1.lease_service_pb2 import HostMemory
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1 import runner_service_pb2_grpc
from weft.kernel.channels.rpc import new_server, open_channel
from weft.kernel.time.clock import SystemClock
from weft_testing.fake_backend.process import fake_backend_command
from weft_testing.fake_nvml import FOLDER_VARIABLE, FakeCards, fake_nvml_library

GIB = 1024**3
MIB = 1024**2
MARGIN_BYTES = 512 * MIB
CARD_BYTES = 8 * GIB
POLL_SECONDS = 0.02
WAIT_SECONDS = 60.0
# What an engine takes is a little less than what is booked for it, as an estimate should be.
MODELS = {"r1": {"small": 2000, "middle": 5000, "wide": 12_000}, "r2": {"little": 2500, "medium": 4500, "large": 7000}}
"""Memory that each model leases, in MiB: "wide" needs two devices."""
SPARE_MIB = 64


class RunningRegistry:
    """The registry itself, on a database that outlives it."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/registry.sock"
        self._database_url = f"sqlite:///{folder}/registry.db"
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Start it, or start it again."""
        account = LedgerConfig(
            lease_time_to_live_seconds=3.0,
            renew_interval_seconds=0.5,
            watch_interval_seconds=0.1,
            reclaim_wait_seconds=1.0,
            restart_grace_seconds=5.0,
            device_margin_mb=MARGIN_BYTES // MIB,
        )
        config = RegistryConfig(
            database_url=self._database_url, heartbeat_interval_seconds=2.0, report_interval_seconds=0.2, ledger=account
        )
        store = SqlStore(self._database_url)
        self.core = RegistryCore(store, SystemClock(), config)
        service, server = RegistryService(self.core, store), new_server()
        self.ledger = service.ledger
        service.register(server)
        server.add_insecure_port(self.address)
        await service.start()
        self._stack.push_async_callback(service.stop, 0.0)
        await server.start()
        self._stack.push_async_callback(server.stop, None)

    async def stop(self) -> None:
        """End it. Idempotent."""
        await self._stack.aclose()


@dataclass
class LeasedWorld:
    """The host, the runners, and the violations found."""

    folder: Path
    cards: FakeCards
    registry: RunningRegistry
    environment: dict[str, str]
    greed: float = 1.0
    """Share of its lease that an engine uses; more than 1: its configuration is wrong."""
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Changed settings by runner."""
    broken: list[str] = field(default_factory=list)
    runners: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    most_held: int = 0
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    @property
    def core(self) -> RegistryCore:
        """The present registry's ledger."""
        return self.registry.core

    async def start_runner(self, name: str) -> None:
        """Start it, or start it again."""
        config = self.folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(self._config(name)), "utf-8")
        arguments = ["serve", "runner", "--runner", name, "--home", str(self.folder / name), "--config", str(config)]
        with (self.folder / f"{name}.out").open("ab") as output:
            self.runners[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "weft_app.cli.main", *arguments, "--registry", self.registry.address),
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    async def kill_runner(self, name: str) -> None:
        """Send SIGKILL."""
        process = self.runners.pop(name)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def stop_runner(self, name: str) -> None:
        """Send SIGTERM, and wait."""
        process = self.runners.pop(name, None)
        if process is not None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(WAIT_SECONDS):
                await process.wait()

    async def wake(self, runner: str, model: str) -> None:
        """Request a model, as a router does; the outcome is ignored."""
        with suppress(grpc.aio.AioRpcError, TimeoutError):
            await self.control(runner).Wake(pb.WakeRequest(model=model), timeout=WAIT_SECONDS)

    def control(self, runner: str) -> Any:
        """The runner's control plane."""
        address = f"unix:{self.folder / runner / 'run' / f'runner-{runner}.sock'}"
        member = self.core.mesh.of_runner(runner)
        address = member.profile.address if member is not None else address
        if runner not in self._channels:
            self._channels[runner] = open_channel(address)
        return cast("Any", runner_service_pb2_grpc.RunnerServiceStub(self._channels[runner]))

    def engines(self) -> list[psutil.Process]:
        """Returns the living engines of this world."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                line, lives = process.cmdline(), process.status() != psutil.STATUS_ZOMBIE
                if lives and "--take-device-memory" in line and str(self.folder) in " ".join(line):
                    found.append(process)
        return found

    def check(self) -> None:
        """Check the invariants: no memory is leased twice, and no engine uses memory that is not there."""
        host = self.host()
        devices, leases = ((), ()) if host is None else (host.devices, host.leases)
        for device in devices:
            index = device.device.index
            booked = sum(share.bytes for each in leases for share in each.shares if share.device_index == index)
            if booked > CARD_BYTES - MARGIN_BYTES:
                self._note(f"card {index} is booked with {booked} bytes")
        held = self.cards.held_bytes()
        self.most_held = max(self.most_held, *held)
        for card, amount in enumerate(held):
            if amount > CARD_BYTES:
                self._note(f"card {card} is full beyond its brim: {amount} bytes")

    def host(self) -> HostMemory | None:
        """The ledger of this host."""
        return next(iter(self.registry.ledger.hosts()), None)

    def memory_deaths(self) -> list[str]:
        """Engines that died for want of memory: they were granted memory in use."""
        lines = []
        for path in self.folder.glob("r*/logs/*"):
            lines += [
                line for line in path.read_text("utf-8", "replace").splitlines() if "it ran out of memory" in line
            ]
        return lines

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait, and check the invariants meanwhile."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            assert time.monotonic() < deadline, f"{what}: {self.host()} engines {self.engines()}"
            await asyncio.sleep(POLL_SECONDS)

    async def watch_for_ever(self) -> None:
        """Check until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(POLL_SECONDS)

    async def kill_engine(self, dice: random.Random) -> None:
        """Send SIGKILL to one engine."""
        engines = self.engines()
        if engines:
            with suppress(psutil.Error):
                dice.choice(engines).kill()

    def ready(self, runner: str, model: str) -> bool:
        """Whether the registry knows that it takes requests."""
        member = self.core.mesh.of_runner(runner)
        states = member.capability.message().instances if member is not None else ()
        return any(state.model == model and state.phase == Phase.READY.value for state in states)

    def _note(self, what: str) -> None:
        if what not in self.broken:
            self.broken.append(what)

    def _config(self, name: str) -> dict[str, Any]:
        model_file = self.folder / "model.gguf"
        model_file.touch()
        models = [
            {
                "name": model,
                "path": str(model_file),
                "memory_mb": size,
                "start_asleep": True,
                "threads": 1,
                "embeddings": False,
                "environment": {FOLDER_VARIABLE: str(self.cards.folder)},
                "extra_arguments": ["--take-device-memory", str(int((size - SPARE_MIB) * MIB * self.greed))],
            }
            for model, size in MODELS[name].items()
        ]
        runner = {
            "name": name,
            "command": fake_backend_command(load_seconds=0.1),
            "models": models,
            "memory_wait_seconds": 10.0,
            "first_pause_seconds": 1.0,
            "first_term_seconds": 0.3,
            **self.changes.get(name, {}),
        }
        return {"runners": [runner], "drain_seconds": 0.1}

    async def close(self) -> None:
        """End the remaining processes."""
        for channel in self._channels.values():
            await channel.close(grace=None)
        for name in list(self.runners):
            await self.kill_runner(name)
        for engine in self.engines():
            with suppress(psutil.Error):
                engine.kill()


@asynccontextmanager
async def leased_world(folder: Path, *, greed: float = 1.0, cards: int = 2) -> AsyncIterator[LeasedWorld]:
    """Yields the world, without runners."""
    library, fake = fake_nvml_library(), FakeCards(folder / "cards")
    for _ in range(cards):
        fake.add(total_bytes=CARD_BYTES)
    registry = RunningRegistry(folder)
    world = LeasedWorld(folder, fake, registry, fake.environment(library), greed)
    await registry.start()
    try:
        yield world
    finally:
        await world.close()
        await registry.stop()
