"""What callers notice when a router is lost: `python -m bench.router_failover`.

A registry, three `weft serve router` on one PostgreSQL, a gateway, and a runner on a fake engine that answers at once.
A caller sends one chat after the other; each round ends the router that leads and brings it back. It asserts nothing.
"""

import argparse
import asyncio
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import aiohttp

from weft_testing.fake_backend.process import fake_backend_command
from weft_testing.postgres_server import running_postgres

POOL = "pool"
ROUTERS = ("r1", "r2", "r3")
AFTER_SECONDS = 15.0
"""How long a round looks after the signal: longer than the session of a router."""
QUIET_SECONDS = 3.0
POLL_SECONDS = 0.05
REQUEST_SECONDS = 60.0


class Process:
    """One `weft serve` process with a separate home and configuration."""

    def __init__(self, folder: Path, service: str, configuration: object, *arguments: str) -> None:
        folder.mkdir(parents=True)
        config = folder / "weft.yaml"
        config.write_text(json.dumps(configuration))
        where = ["--home", str(folder / "home"), "--config", str(config)]
        self._command = [sys.executable, "-m", "weft_app.cli.main", "serve", service, *where, *arguments]
        self.process: subprocess.Popen[str] | None = None
        self.address = ""

    def start(self) -> None:
        """Starts it, and returns once it serves."""
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def end(self) -> None:
        """Kills it, if it was started."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


class Round(NamedTuple):
    """What a caller noticed of one loss."""

    slowest: float
    """The longest chat that was sent after the signal, in seconds."""
    usual: float
    """The median of those before it."""
    failed: int
    """Chats without an answer."""


class Mesh:
    """The processes of a mesh."""

    def __init__(self, folder: Path, database_url: str, ends: ExitStack) -> None:
        registry = f"unix:{folder}/registry/home/run/registry.sock"
        addresses = {"addresses": {"registry": registry}}
        engine = fake_backend_command(answer_tokens=2)
        models = [{"name": "m", "pool": POOL, "path": __file__, "slots": 4}]
        runner = {"runners": [{"name": "box", "command": engine, "models": models}], **addresses}
        self.registry = Process(folder / "registry", "registry", {})
        self.routers = {
            name: Process(
                folder / name, "router", {"router": {"name": name, "database_url": database_url}, **addresses}
            )
            for name in ROUTERS
        }
        self._runner = Process(folder / "runner", "runner", runner)
        self.gateway = Process(folder / "gateway", "gateway", {"port": 0, **addresses})
        for each in (self.registry, *self.routers.values(), self._runner, self.gateway):
            ends.callback(each.end)
            each.start()

    async def leader(self, http: aiohttp.ClientSession) -> Process:
        """Returns the router that leads, once all routers are registered."""
        while True:
            async with http.get("/api/v1/routers") as response:
                routers = (await response.json())["items"] if response.status == 200 else []
            leading = [router["name"] for router in routers if router.get("leading")]
            if leading and len(routers) == len(ROUTERS):
                return self.routers[leading[0]]
            await asyncio.sleep(POLL_SECONDS)

    async def lose(self, http: aiohttp.ClientSession, number: signal.Signals) -> Round:
        """Ends the leader by a signal, looks what callers notice, and brings it back."""
        leader = await self.leader(http)
        before = [await chat(http) for _ in range(50)]
        began = time.monotonic()
        assert leader.process is not None
        leader.process.send_signal(number)
        after = []
        while time.monotonic() - began < AFTER_SECONDS:
            after.append(await chat(http))
        leader.end()
        leader.start()
        await self.leader(http)
        await asyncio.sleep(QUIET_SECONDS)
        return Round(
            slowest=max(seconds for seconds, _ in after),
            usual=median(seconds for seconds, _ in before),
            failed=sum(not is_good for _, is_good in after),
        )


async def chat(http: aiohttp.ClientSession) -> tuple[float, bool]:
    """Returns how long one chat took, and whether it had an answer."""
    began = time.monotonic()
    body = {"model": POOL, "messages": [{"role": "user", "content": "hi"}]}
    try:
        async with http.post("/v1/chat/completions", json=body) as response:
            await response.read()
            return time.monotonic() - began, response.status == 200
    except aiohttp.ClientError:
        return time.monotonic() - began, False


async def measure(rounds: int) -> None:
    """Measures, and prints a table."""
    with ExitStack() as ends:
        postgres = ends.enter_context(running_postgres())
        database_url = postgres.url(ends.enter_context(postgres.fresh_database()))
        mesh = Mesh(Path(ends.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))), database_url, ends)
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        async with aiohttp.ClientSession(mesh.gateway.address, timeout=timeout) as http:
            while not (await chat(http))[1]:  # noqa: ASYNC110 - there is nothing to wait for
                await asyncio.sleep(POLL_SECONDS)
            print(f"{platform.machine()}, Python {platform.python_version()}, three routers, one caller")
            print("| event | rounds | slowest chat after it, s | usual chat, s | failed |")
            print("|---|---|---|---|---|")
            for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
                found = [await mesh.lose(http, number) for _ in range(rounds)]
                slowest = [each.slowest for each in found]
                row = f"{median(slowest):.2f} (at most {max(slowest):.2f}) | {median(each.usual for each in found):.3f}"
                print(f"| {number.name} | {rounds} | {row} | {sum(each.failed for each in found)} |", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(measure(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
