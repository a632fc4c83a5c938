"""CPU time of the Envoy lane: `python -m bench.lane [--requests N] [--streams N] [--rounds N] [--against TREE]`.

One stub endpoint behind one Envoy for each row, all in one run and in turns:

    bare    the reader of usage and the access log alone
    grpc    besides, an external processor that checks nothing, on gRPC's own server
    plain   the same on the server that the picker uses: what is left is the transport's part
    lane    the endpoint picker over a real scheduler, in a process of its own; the runner's HTTP port answers
    engine  the same where the engine itself answers, whose slot the picker takes at a runner
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvloop

from bench.lane_processes import EVENTS, serve_picker, serve_plain, serve_runner, serve_stub
from weft.kernel.rpc import new_server
from weft.kernel.rpc_server.server import LocalServer
from weft.kernel.telemetry import configure_logging
from weft_app.config.config import WeftConfig
from weft_app.edge.edge_document import edge_document
from weft_app.edge.plan import EdgePlan, Endpoint, LanePlan, limits_of
from weft_testing.free_port import free_port

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 400}]}
CONNECTIONS = 32
SETTLE_SECONDS = 0.7
"""After the last answer: the access log is flushed, and what waits for a second witness ends."""
ROWS = ("bare", "grpc", "plain", "lane", "engine")
_CONTROLS = ("bare", "grpc", "plain")
Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to the stub."""

    url: str
    envoy: psutil.Process
    picker: psutil.Process


def _document(picker: int, stub: int, *, is_bare: bool) -> dict[str, Any]:
    """Returns an Envoy's configuration; a bare one is without the picker's filter, else the same."""
    own = Endpoint(host="127.0.0.1", port=stub)
    lane = LanePlan(picker=Endpoint(host="127.0.0.1", port=picker), endpoints=(own,))
    listen = Endpoint(host="127.0.0.1", port=free_port())
    found = edge_document(EdgePlan(listen=listen, gateways=(own,), limits=limits_of(WeftConfig()), lane=lane))
    manager = found["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][-1]["typed_config"]
    if is_bare:
        manager["http_filters"] = [each for each in manager["http_filters"] if "ext_proc" not in each["name"]]
        # The log of every request: without the picker none has a destination.
        for log in manager["access_log"]:
            log.pop("filter", None)
    return found


@contextmanager
def _process(*command: str, folder: Path | None = None) -> Iterator[psutil.Process]:
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as child:
        try:
            yield psutil.Process(child.pid)
        finally:
            child.kill()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _until_served(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(600):
            try:
                async with http.post(url, json=BODY) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} does not serve")


async def _ask(url: str, count: int, connections: int) -> list[float]:
    """Returns the seconds of each of `count` requests, over some connections, one after the other on each."""
    found, left = [], iter(range(count))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask_on() -> None:
            for _ in left:
                began = time.perf_counter()
                async with http.post(url, json=BODY) as answer:
                    await answer.read()
                    assert answer.status == 200, answer.status
                found.append(time.perf_counter() - began)

        await asyncio.gather(*(ask_on() for _ in range(connections)))
    return sorted(found)


async def _streams(url: str, count: int) -> None:
    async def one() -> None:
        async with http.post(url, json={**BODY, "stream": True, "stream_options": {"include_usage": True}}) as answer:
            found = await answer.read()
            assert found.count(b"data: ") == EVENTS + 1, found[-200:]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(one() for _ in range(count)))


async def _unary(row: Row, count: int, connections: int) -> Figures:
    before, began = (_cpu(row.envoy), _cpu(row.picker)), time.perf_counter()
    seconds = await _ask(row.url, count, connections)
    took = time.perf_counter() - began
    await asyncio.sleep(SETTLE_SECONDS)
    where = f"{connections} conn."
    return {
        f"{where}: envoy us/request": (_cpu(row.envoy) - before[0]) / count * 1e6,
        f"{where}: picker us/request": (_cpu(row.picker) - before[1]) / count * 1e6,
        f"{where}: p50 ms": seconds[count // 2] * 1e3,
        f"{where}: p99 ms": seconds[count * 99 // 100] * 1e3,
        f"{where}: requests/s": count / took,
    }


async def _measure(row: Row, given: Any) -> Figures:
    """Returns the figures of one turn."""
    found = dict(await _unary(row, given.requests, 1))
    found |= await _unary(row, given.requests, CONNECTIONS)
    if given.streams:
        before = _cpu(row.envoy), _cpu(row.picker)
        await _streams(row.url, given.streams)
        await asyncio.sleep(SETTLE_SECONDS)
        chunks = given.streams * EVENTS
        for each, process, was in (("envoy", row.envoy, before[0]), ("picker", row.picker, before[1])):
            own = found[f"{CONNECTIONS} conn.: {each} us/request"] * given.streams
            found[f"{each} us/chunk"] = ((_cpu(process) - was) * 1e6 - own) / chunks
    return found


class _Bench:
    """The processes of a run."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self._stub = free_port()
        # The address of a runner of the same mesh and machine.
        self._runner = f"unix:{folder}/runner.sock"
        self._serve("stub", self._stub)
        self._serve("runner", 0, "--stub-port", str(self._stub), "--runner", self._runner)

    def _serve(self, what: str, port: int, *more: str, tree: Path | None = None) -> psutil.Process:
        python = sys.executable if tree is None else str(tree / ".venv" / "bin" / "python")
        command = (python, "-m", "bench.lane", "--serve", what, "--port", str(port), *more)
        return self._stack.enter_context(_process(*command, folder=tree))

    def row(self, name: str, tree: Path | None) -> Row:
        """Starts the processes of a row; `tree`: another checkout, whose picker it uses."""
        port = free_port()
        more = ["--stub-port", str(self._stub)]
        if name == "engine":
            more += ["--runner", self._runner]
        picker = self._serve(
            {"bare": "grpc"}.get(name, name if name in _CONTROLS else "picker"), port, *more, tree=tree
        )
        document = _document(port, self._stub, is_bare=name == "bare")
        file = self._folder / f"{port}.json"
        file.write_text(json.dumps(document))
        envoy = str(Path(sys.executable).with_name("envoy"))
        options = ("--concurrency", "1", "-l", "error", "--use-dynamic-base-id")
        process = self._stack.enter_context(_process(envoy, "-c", str(file), *options))
        listen = document["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"]
        return Row(url=f"http://127.0.0.1:{listen}/v1/chat/completions", envoy=process, picker=picker)


async def _main(given: Any) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = _Bench(stack, folder)
        rows = {name: bench.row(name, None) for name in given.only}
        if given.against is not None:
            against = [name for name in given.only if name not in _CONTROLS]
            rows |= {f"{name} of {given.against.name}": bench.row(name, given.against) for name in against}
        for row in rows.values():
            await _until_served(row.url)
            await _ask(row.url, 200, 4)
        found: dict[str, list[Figures]] = {name: [] for name in rows}
        load = os.getloadavg()[0]
        for turn in range(given.rounds):
            for name in list(rows)[:: -1 if turn % 2 else 1]:
                found[name].append(await _measure(rows[name], given))
    _show(found, load)


def _show(found: Mapping[str, list[Figures]], load: float) -> None:
    names = list(next(iter(found.values()))[0])
    print(f"load average before {load:.1f}, after {os.getloadavg()[0]:.1f}")
    print("| median of turns | " + " | ".join(found) + " |\n|---" + "|---" * len(found) + "|")
    for name in names:
        values = [[each[name] for each in turns] for turns in found.values()]
        shown = (f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in values)
        print(f"| {name} | " + " | ".join(shown) + " |")


async def _serve(given: Any) -> None:
    match given.serve:
        case "stub":
            await serve_stub(given.port)
        case "runner":
            await serve_runner(given.runner, given.stub_port)
        case "grpc" | "plain":
            server = new_server() if given.serve == "grpc" else LocalServer()
            await serve_plain(server, given.port, given.stub_port)
        case _:
            await serve_picker(given.port, given.stub_port, given.runner)


def main() -> None:
    """Run the benchmark, or one of its processes."""
    parser = argparse.ArgumentParser(prog="python -m bench.lane", description=__doc__)
    parser.add_argument("--requests", type=int, default=500, help="in each turn, over 1 and over 32 connections each")
    parser.add_argument("--streams", type=int, default=24, help="at once, in each turn; 0: none")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--against", type=Path, help="another checkout, whose picker is measured in turns")
    parser.add_argument("--serve", choices=("stub", "runner", "grpc", "plain", "picker"), help=argparse.SUPPRESS)
    for name in ("--port", "--stub-port"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--runner", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    # On the event loop of services, as in a mesh.
    if given.serve:
        # The log is written as in a mesh, to no file.
        with Path(os.devnull).open("w") as nothing:
            configure_logging("picker", file=nothing)
            uvloop.run(_serve(given))
    else:
        uvloop.run(_main(given))


if __name__ == "__main__":
    main()
