"""What becomes of a pool that is asked for five times what it can do, and of one that has failed altogether."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from bench import measures
from bench.contender import WEFT
from bench.launch import free_port, own_mesh
from bench.offered import Offer, Outcome
from bench.report import Figures
from bench.scenarios import Options
from weft_testing.fake_backend.process import FakeControl, fake_backend_command

MODEL = "pool"
SLOTS = 8
TOKENS = 20
TOKENS_PER_SECOND = 100.0
CAPACITY = SLOTS * TOKENS_PER_SECOND / TOKENS
"""Requests per second, at most."""
OVERLOAD = 5.0
OUTAGE_RATE = 100.0
MIN_SECONDS = 10.0
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}


def measure_overload(options: Options, figures: Figures, folder: Path) -> None:
    """The highest goodput at what the pool can do, beside that at five times as much; then a total outage."""
    seconds = max(MIN_SECONDS, options.seconds)
    for number in range(options.repetitions):
        _measure_goodput(figures, folder / f"overload-{number}", seconds)
        _measure_outage(figures, folder / f"outage-{number}", seconds)


def _measure_goodput(figures: Figures, folder: Path, seconds: float) -> None:
    with own_mesh(folder, MODEL, _config(folder, _runner("box", tokens_per_second=TOKENS_PER_SECOND))) as (host, _):
        peak = _offered(_port(host), CAPACITY, seconds)
        before = host.memory_info().rss
        flood = _offered(_port(host), CAPACITY * OVERLOAD, seconds)
        growth = host.memory_info().rss / before - 1
    figures.add(measures.PEAK_GOODPUT, WEFT.name, peak.served_per_second)
    figures.add(measures.OVERLOAD_GOODPUT, WEFT.name, flood.served_per_second / peak.served_per_second)
    note = ", ".join(f"{status}: {count}" for status, count in sorted(flood.statuses.items()))
    figures.add(measures.REFUSAL_P99, WEFT.name, flood.refused_p99, f"{flood.offered} offered; {note}")
    figures.add(measures.REFUSAL_ADVICE, WEFT.name, float(flood.refused_without_advice))
    figures.add(measures.OVERLOAD_MEMORY, WEFT.name, 100 * growth)


def _measure_outage(figures: Figures, folder: Path, seconds: float) -> None:
    """Every engine answers 500: how many requests reach the engines per request that was sent."""
    ports = [free_port(), free_port()]
    runners = [
        _runner(name, port=port, tokens_per_second=TOKENS_PER_SECOND)
        for name, port in zip(("one", "two"), ports, strict=True)
    ]
    with own_mesh(folder, MODEL, _config(folder, *runners)) as (host, _):
        before = asyncio.run(_break_all(ports))
        outcome = _offered(_port(host), OUTAGE_RATE, seconds)
        tried = asyncio.run(_requests(ports)) - before
    note = ", ".join(f"{status}: {count}" for status, count in sorted(outcome.statuses.items()))
    figures.add(measures.AMPLIFICATION, WEFT.name, tried / outcome.offered, f"{outcome.offered} offered; {note}")


def _runner(name: str, *, port: int | None = None, **switches: Any) -> dict[str, Any]:
    runner: dict[str, Any] = {
        "name": name,
        "command": fake_backend_command(**switches),
        "models": [{"name": f"m-{name}", "pool": MODEL, "path": __file__, "slots": SLOTS}],
    }
    return runner if port is None else runner | {"port_range": f"{port}-{port}"}


def _config(folder: Path, *runners: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "weft.yaml"
    path.write_text(yaml.safe_dump({"runners": list(runners)}))
    return path


def _port(host: psutil.Process) -> int:
    """Where it listens for HTTP, as it was told."""
    arguments = host.cmdline()
    return int(arguments[arguments.index("--port") + 1])


def _offered(port: int, rate: float, seconds: float) -> Outcome:
    offer = Offer(port=port, body=BODY, rate=rate, seconds=seconds)
    done = subprocess.run(
        [sys.executable, "-m", "bench.offered"], input=msgspec.json.encode(offer), stdout=subprocess.PIPE, check=True
    )
    return msgspec.json.decode(done.stdout, type=Outcome)


async def _break_all(ports: list[int]) -> int:
    """Have every engine fail from now on; how many requests they have had so far."""
    for port in ports:
        async with FakeControl(f"http://127.0.0.1:{port}") as engine:
            await engine.set_behaviour(status=500)
    return await _requests(ports)


async def _requests(ports: list[int]) -> int:
    started = 0
    for port in ports:
        async with FakeControl(f"http://127.0.0.1:{port}") as engine:
            state = await engine.state()
            started += state.requests_started
    return started
