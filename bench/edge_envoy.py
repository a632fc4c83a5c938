"""What Envoy at the edge adds to a request, beside the gateway asked directly: `python -m bench.edge_envoy`.

One mesh with a fake engine and `edge.proxy: envoy`; one connection; the ways take turns in rounds, so that load from
elsewhere meets both of them.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from weft_testing.fake_backend.process import fake_backend_command

ROUNDS = 8
REQUESTS = 100
START_SECONDS = 90.0
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Way:
    """One way to the same model, and what was measured of it."""

    name: str
    url: str
    milliseconds: list[float] = field(default_factory=list)
    envoy_seconds: float = 0.0

    def row(self) -> str:
        """Returns its row of the table."""
        p50 = statistics.median(self.milliseconds)
        p95 = statistics.quantiles(self.milliseconds, n=20)[-1]
        cpu = self.envoy_seconds / len(self.milliseconds) * 1e6
        return f"| {self.name} | {len(self.milliseconds)} | {p50:.2f} | {p95:.2f} | {cpu:.0f} |"


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _measure(ways: list[Way], envoy: psutil.Process) -> None:
    for _ in range(ROUNDS):
        for way in ways:
            async with aiohttp.ClientSession() as http:
                await _ask(http, way)
                before = _cpu(envoy)
                for _ in range(REQUESTS):
                    began = time.perf_counter()
                    await _ask(http, way)
                    way.milliseconds.append((time.perf_counter() - began) * 1e3)
                way.envoy_seconds += _cpu(envoy) - before


async def _ask(http: aiohttp.ClientSession, way: Way) -> None:
    async with http.post(f"{way.url}/v1/chat/completions", json=BODY) as answer:
        if answer.status != 200:
            raise RuntimeError(await answer.text())
        await answer.read()


def _facts(home: Path, process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    deadline = time.monotonic() + START_SECONDS
    file = home / "run" / "up.json"
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists():
            found: dict[str, Any] = yaml.safe_load(file.read_text())
            return found
        time.sleep(0.1)
    raise RuntimeError("the mesh did not start")


def _gateway_url(host: psutil.Process) -> str:
    """Returns the gateway's own address, the only one of TCP that the process listens on."""
    (address,) = [each.laddr for each in host.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return f"http://{address.ip}:{address.port}"


def main() -> None:
    """Start a mesh, measure, print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runner = {
            "name": "a",
            "command": fake_backend_command(),
            "models": [{"name": "m", "path": __file__, "slots": 4}],
        }
        config = {"runners": [runner], "port": 0, "edge": {"proxy": "envoy"}}
        (folder / "weft.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "weft_app.cli.main", "up", "--config", str(folder / "weft.yaml")]
        process = subprocess.Popen([*command, "--home", str(folder / "home")], stdout=subprocess.DEVNULL)
        try:
            facts = _facts(folder / "home", process)
            direct = _gateway_url(psutil.Process(process.pid))
            url = str(facts["url"])
            ways = [
                Way("gateway, asked directly", direct),
                Way("Envoy, then the gateway", url),
            ]
            asyncio.run(_measure(ways, psutil.Process(facts["pids"]["edge"])))
        finally:
            process.terminate()
            process.wait(30.0)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} processors, load {load:.1f} at the end; {ROUNDS} rounds of {REQUESTS} requests a way\n")
    print("| way | requests | p50 ms | p95 ms | CPU of Envoy, us a request |\n|---|---|---|---|---|")
    for way in ways:
        print(way.row())


if __name__ == "__main__":
    main()
