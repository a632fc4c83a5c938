"""The edge with keys: latency at a fixed rate, memory under idle streams, how soon a hang-up reaches the engine."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from bench import measures
from bench.contender import WEFT
from bench.cpu import MB
from bench.launch import LaunchError, free_port, own_mesh, with_key
from bench.load import percentile
from bench.measures import Measure
from bench.offered import Offer, Outcome
from bench.report import Figures
from bench.scenarios import PROMPT, UNARY_TOKENS, Options
from weft_testing.fake_backend.process import FakeControl, fake_backend_command, run_fake_backend

MODEL = "edge"
RATE = 500.0
STREAMS = 1_000
SLOTS = 64
HANG_UPS = 200
SLOW_TOKENS_PER_SECOND = 20.0
SETTLE_SECONDS = 2.0
POLL_SECONDS = 0.001
LONGEST_SECONDS = 60.0


class WayIn(StrEnum):
    """The way of requests into a mesh."""

    GATEWAY = "gateway"
    """Connections are the gateway's."""
    EDGE = "edge"
    """They are Envoy's, which passes requests to the gateway."""


@dataclass(frozen=True, slots=True)
class _HangUps:
    """The rows of one way in."""

    way: WayIn
    p50: Measure
    p99: Measure
    in_prefill_p99: Measure


_HANG_UPS = (
    _HangUps(WayIn.GATEWAY, measures.HANG_UP_P50, measures.HANG_UP_P99, measures.PREFILL_HANG_UP_P99),
    _HangUps(WayIn.EDGE, measures.EDGE_HANG_UP_P50, measures.EDGE_HANG_UP_P99, measures.EDGE_PREFILL_HANG_UP_P99),
)


@dataclass(frozen=True, slots=True)
class _Mesh:
    host: psutil.Process
    port: int
    engine_port: int
    key: str

    def headers(self) -> dict[str, str]:
        return {"Authorization": self.key}


def measure_edge(options: Options, figures: Figures, folder: Path) -> None:
    """A fixed rate, and idle streams, each on a mesh of its own."""
    for number in range(options.repetitions):
        _measure_rate(figures, folder / f"rate-{number}", max(5.0, options.seconds))
    with _mesh(folder / "idle", slots=STREAMS, answer_tokens=0) as mesh:
        asyncio.run(_behave(mesh, stall_after_tokens=1))
        _measure_idle(figures, mesh)


def measure_hang_ups(_: Options, figures: Figures, folder: Path) -> None:
    """Each way in on a mesh of its own: streams in mid-answer, and then requests whose prefill lasts."""
    for rows in _HANG_UPS:
        with _mesh(folder / f"hang-ups-{rows.way}", way=rows.way, answer_tokens=0) as mesh:
            asyncio.run(_behave(mesh, tokens_per_second=SLOW_TOKENS_PER_SECOND))
            freed = asyncio.run(_hang_up(mesh, HANG_UPS))
            asyncio.run(_behave(mesh, prefill_seconds=LONGEST_SECONDS, prefill_idle=True))
            unbegun = asyncio.run(_hang_up(mesh, HANG_UPS, in_prefill=True))
        figures.add(rows.p50, WEFT.name, 1e3 * percentile(freed, 0.50))
        figures.add(rows.p99, WEFT.name, 1e3 * percentile(freed, 0.99), f"{len(freed)} streams hung up on")
        figures.add(rows.in_prefill_p99, WEFT.name, 1e3 * percentile(unbegun, 0.99), f"{len(unbegun)} hung up on")


def _measure_rate(figures: Figures, folder: Path, seconds: float) -> None:
    """The same offer to the gateway and to an engine like the one behind it, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": UNARY_TOKENS}
    with _mesh(folder) as mesh:
        through = _offered(Offer(port=mesh.port, body=body | {"model": MODEL}, rate=RATE, seconds=seconds,
                                 headers=mesh.headers()))  # fmt: skip
    direct = asyncio.run(_direct(body, seconds))
    refused = through.offered - through.served
    figures.add(measures.RATE_P99, WEFT.name, through.served_p99, f"{through.offered} offered, {refused} not served")
    figures.add(measures.RATE_ADDED_P99, WEFT.name, through.served_p99 - direct.served_p99)
    figures.add(measures.RATE_ADDED_P50, WEFT.name, through.served_p50 - direct.served_p50)


async def _direct(body: dict[str, Any], seconds: float) -> Outcome:
    async with run_fake_backend("--parallel", "64", "--ctx-size", str(64 * 65_536)) as engine:
        port = int(engine.base_url.rpartition(":")[2])
        offer = Offer(port=port, body=body | {"model": "fake"}, rate=RATE, seconds=seconds)
        return await asyncio.to_thread(_offered, offer)


def _measure_idle(figures: Figures, mesh: _Mesh) -> None:
    ours = [mesh.host, *(child for child in mesh.host.children(recursive=True) if not _is_engine(child))]
    before = sum(process.memory_info().rss for process in ours)
    host_before = mesh.host.memory_info().rss
    host_after, after = asyncio.run(_under_idle_streams(mesh, ours))
    figures.add(measures.IDLE_HOST, WEFT.name, host_after / MB, f"{STREAMS} streams; before: {host_before / MB:.1f} MB")
    figures.add(measures.IDLE_GROWTH, WEFT.name, (after - before) / MB, "host and runner together, engines apart")


async def _under_idle_streams(mesh: _Mesh, ours: list[psutil.Process]) -> tuple[int, int]:
    writers = []
    async with asyncio.timeout(LONGEST_SECONDS):
        for _ in range(STREAMS):
            reader, writer = await _stream(mesh)
            await reader.readuntil(b"tok0")
            writers.append(writer)
        await asyncio.sleep(SETTLE_SECONDS)
    measured = mesh.host.memory_info().rss, sum(process.memory_info().rss for process in ours)
    for writer in writers:
        writer.close()
    return measured


async def _hang_up(mesh: _Mesh, count: int, *, in_prefill: bool = False) -> list[float]:
    """Seconds from closing a connection until the engine has its slot back, one stream after another."""
    found = []
    async with FakeControl(f"http://127.0.0.1:{mesh.engine_port}") as engine:
        for _ in range(count):
            reader, writer = await _stream(mesh)
            if in_prefill:
                await _until_busy(engine)
            else:
                await reader.readuntil(b"tok1")
            closed = time.perf_counter()
            writer.transport.abort()
            while (await engine.state()).busy_slots:
                if time.perf_counter() - closed > LONGEST_SECONDS:
                    raise LaunchError("a slot was never given back")
                await asyncio.sleep(POLL_SECONDS)
            found.append(time.perf_counter() - closed)
    return found


async def _behave(mesh: _Mesh, **switches: Any) -> None:
    """From now on: a mesh is up once it has answered."""
    async with FakeControl(f"http://127.0.0.1:{mesh.engine_port}") as engine:
        await engine.set_behaviour(**switches)


async def _until_busy(engine: FakeControl) -> None:
    async with asyncio.timeout(LONGEST_SECONDS):
        # The engine is another process, so there is nothing to wait on.
        while not (await engine.state()).busy_slots:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)


async def _stream(mesh: _Mesh) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4_000, "stream": True}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.port)
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {mesh.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return reader, writer


@contextmanager
def _mesh(folder: Path, *, slots: int = SLOTS, way: WayIn = WayIn.GATEWAY, **switches: Any) -> Iterator[_Mesh]:
    folder.mkdir(parents=True, exist_ok=True)
    config, engine_port = folder / "weft.yaml", free_port()
    runner: dict[str, Any] = {
        "name": "box",
        "command": fake_backend_command(**switches),
        "port_range": f"{engine_port}-{engine_port}",
        "max_requests": slots,
        "models": [{"name": MODEL, "path": __file__, "slots": slots, "context_tokens": 8_192}],
    }
    sections: dict[str, Any] = {} if way is WayIn.GATEWAY else {"edge": {"proxy": "envoy"}}
    config.write_text(yaml.safe_dump({"auth": {"required": True}, "runners": [runner], **sections}))
    with own_mesh(folder, MODEL, config) as (host, home):
        arguments = host.cmdline()
        port = int(arguments[arguments.index("--port") + 1])
        key = with_key(WEFT, folder, home.parent).headers["Authorization"]
        yield _Mesh(host, port, engine_port, key)


def _offered(offer: Offer) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", "bench.offered"], input=msgspec.json.encode(offer), stdout=subprocess.PIPE, check=True
    )
    return msgspec.json.decode(done.stdout, type=Outcome)


def _is_engine(process: psutil.Process) -> bool:
    return "weft_testing.fake_backend" in " ".join(process.cmdline())
