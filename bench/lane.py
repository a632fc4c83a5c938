"""CPU time of the Envoy lane: `python -m bench.lane [--requests N] [--streams N]`.

One stub endpoint behind one Envoy, twice in one run: with the reader of usage and the access log alone, and with the
endpoint picker besides, over a real scheduler in a process of its own.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from gateway.config import GatewayConfig
from gateway.deps import InferenceDeps
from gateway.metrics import GatewayMetrics
from gateway.picker.lane_requests import LanePorts
from gateway.picker.limits import PickerLimits
from gateway.picker.service import build
from router_svc.loop import LoopDeps, RouterRecords, SchedulingLoop, TicketIssuer, WakeFinished
from router_svc.placement import LocalPlacement
from router_svc.policy.decisions import Wakes
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.settings import Settings
from weft.api.registry.v1 import runner_pb2
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.fleet import FleetView, ModelView, RunnerView
from weft.dispatch.reconnecting_placement import ReconnectConfig
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.clock import SystemClock
from weft.kernel.request import Operation
from weft.kernel.rpc import ChannelPool, new_server
from weft.kernel.telemetry import configure_logging
from weft_app.config.config import WeftConfig
from weft_app.edge.edge_document import edge_document
from weft_app.edge.plan import EdgePlan, Endpoint, LanePlan, limits_of
from weft_testing.free_port import free_port

EVENTS = 403
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"token"},"finish_reason":null}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":400,"total_tokens":409}}\n\ndata: [DONE]\n\n'
)
UNARY = b'{"choices":[{"message":{"content":"a"}}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 400}]}


async def serve_stub(port: int) -> None:
    """Serves answers of a fixed form: a stream of EVENTS chunks, each written by itself, or one object."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _until_head(reader):
            body = await _body(reader, head)
            if b'"stream": true' not in body:
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                    % (len(UNARY), UNARY)
                )
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for index in range(EVENTS):
                chunk = USAGE if index == EVENTS - 1 else CHUNK
                writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                await asyncio.sleep(0.002)
            writer.write(b"0\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    await server.serve_forever()


async def _until_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    lower = head.lower()
    if b"content-length:" in lower:
        return await reader.readexactly(int(lower.split(b"content-length:")[1].split(b"\r\n")[0]))
    found = b""
    while size := int(await reader.readline(), 16):
        found += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return found


class NoWakes:
    """A waker that nothing asks."""

    def begin(self, wakes: Wakes, finished: WakeFinished) -> None:
        """Begins nothing."""

    def give_up(self, model: str) -> None:
        """Ends nothing."""


class _Fleet:
    def __init__(self, url: str) -> None:
        ready = runner_pb2.InstanceState(model="tiny", phase=runner_pb2.InstanceState.PHASE_READY, slots_total=4096)
        runner = RunnerView(
            name="r",
            incarnation="1",
            address="unix:/nowhere",
            host="h",
            runtime="stub",
            active=True,
            draining=False,
            ticket_key=b"k" * 32,
            instances={"tiny": ready},
            lane_url=url,
        )
        model = ModelView(
            name="tiny",
            pool="tiny",
            runner="r",
            operations=frozenset({Operation.CHAT}),
            remote=False,
            active=True,
            context_tokens=0,
            created_at_seconds=0,
        )
        self.view = FleetView(1, {"r": runner}, {"tiny": model})


async def serve_picker(port: int, stub: int) -> None:
    """Serves a picker over a real scheduler."""
    clock, fleet, channels = SystemClock(), _Fleet(f"http://127.0.0.1:{stub}"), ChannelPool()
    tickets = TicketIssuer(clock, lifetime_seconds=30.0)
    deps = LoopDeps(waker=NoWakes(), tickets=tickets, records=RouterRecords.empty(clock))
    loop = SchedulingLoop(SchedulerLimits(), Settings(), clock, deps)
    loop.update_view(fleet.view)
    placement = LocalPlacement(loop)
    inference = InferenceDeps(
        config=GatewayConfig(),
        dispatcher=Dispatcher(placement, channels, clock=clock),
        fleet=fleet,
        metrics=GatewayMetrics(),
        clock=clock,
    )
    ports = LanePorts(
        placement=placement, fleet=fleet, channels=channels, clock=clock, report_to="router", steady=ReconnectConfig()
    )
    picker = build(PickerLimits(report_wait_seconds=0.2), inference, ports, JournalPolicy(fleet))
    server = new_server()
    picker.register(server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await picker.start()
    await server.wait_for_termination()


def _documents(picker: int, stub: int) -> dict[str, dict[str, Any]]:
    """Returns the configurations: `bare` without the picker's filter, else the same, and `lane`."""
    own = {name: Endpoint(host="127.0.0.1", port=port) for name, port in (("picker", picker), ("stub", stub))}
    found = {}
    for name in ("bare", "lane"):
        lane = LanePlan(picker=own["picker"], endpoints=(own["stub"],))
        plan = EdgePlan(
            listen=Endpoint(host="127.0.0.1", port=free_port()),
            gateways=(own["stub"],),
            limits=limits_of(WeftConfig()),
            lane=lane,
        )
        found[name] = edge_document(plan)
    manager = found["bare"]["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][-1]["typed_config"]
    manager["http_filters"] = [each for each in manager["http_filters"] if "ext_proc" not in each["name"]]
    # The log of every request: without the picker none has a destination.
    for log in manager["access_log"]:
        log.pop("filter", None)
    return found


@contextmanager
def _process(*command: str, **environment: str) -> Iterator[psutil.Process]:
    with subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL) as child:
        try:
            yield psutil.Process(child.pid)
        finally:
            child.kill()


def _cpu(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


async def _until_served(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(200):
            try:
                async with http.post(url, json=BODY) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} does not serve")


async def _one_by_one(url: str, count: int) -> list[float]:
    """Returns the seconds of each of `count` requests, one after the other."""
    found = []
    async with aiohttp.ClientSession() as http:
        for _ in range(count):
            began = time.perf_counter()
            async with http.post(url, json=BODY) as answer:
                await answer.read()
                assert answer.status == 200, answer.status
            found.append(time.perf_counter() - began)
    return sorted(found)


async def _streams(url: str, count: int) -> None:
    async def one() -> None:
        async with http.post(url, json={**BODY, "stream": True, "stream_options": {"include_usage": True}}) as answer:
            assert (await answer.read()).count(b"data: ") == EVENTS + 1, "every event has arrived"

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(one() for _ in range(count)))


async def _measure(envoy: psutil.Process, picker: psutil.Process | None, url: str, given: Any) -> dict[str, float]:
    await _until_served(url)
    await _one_by_one(url, 50)
    before = _cpu(envoy), _cpu(picker)
    seconds = await _one_by_one(url, given.requests)
    await asyncio.sleep(0.5)
    unary = _cpu(envoy) - before[0], _cpu(picker) - before[1]
    before = _cpu(envoy), _cpu(picker)
    await _streams(url, given.streams)
    await asyncio.sleep(0.5)
    streamed = _cpu(envoy) - before[0], _cpu(picker) - before[1]
    each, chunks = given.requests, given.streams * EVENTS
    per_request = unary[0] / each, unary[1] / each
    return {
        "envoy us/request": per_request[0] * 1e6,
        "picker us/request": per_request[1] * 1e6,
        "envoy us/chunk": (streamed[0] - per_request[0] * given.streams) / chunks * 1e6,
        "picker us/chunk": (streamed[1] - per_request[1] * given.streams) / chunks * 1e6,
        "p50 ms": seconds[each // 2] * 1e3,
    }


async def _main(given: Any) -> None:
    picker_port, stub_port = free_port(), free_port()
    own = (sys.executable, "-m", "bench.lane")
    documents = _documents(picker_port, stub_port)
    rows = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        _process(*own, "--stub", str(stub_port)),
        _process(*own, "--picker", str(picker_port), "--stub-port", str(stub_port)) as picker,
    ):
        for name, document in documents.items():
            file = Path(folder) / f"{name}.json"
            file.write_text(json.dumps(document))
            port = document["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"]
            command = (
                str(Path(sys.executable).with_name("envoy")),
                "-c",
                str(file),
                "--concurrency",
                "1",
                "-l",
                "error",
            )
            with _process(*command, "--use-dynamic-base-id") as envoy:
                url = f"http://127.0.0.1:{port}/v1/chat/completions"
                rows[name] = await _measure(envoy, picker, url, given)
    names = list(rows["bare"])
    print(f"load average {os.getloadavg()[0]:.1f}")
    print("| | " + " | ".join(names) + " |\n|---" * 1 + "|---" * len(names) + "|")
    for name, figures in rows.items():
        print(f"| {name} | " + " | ".join(f"{figures[each]:.2f}" for each in names) + " |")


def main() -> None:
    """Run the benchmark, or one of its processes."""
    parser = argparse.ArgumentParser(prog="python -m bench.lane", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--stub", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--picker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--stub-port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stub:
        asyncio.run(serve_stub(given.stub))
    elif given.picker:
        # The log is written as in a mesh, and read by nobody.
        with Path(os.devnull).open("w") as nothing:
            configure_logging("picker", file=nothing)
            asyncio.run(serve_picker(given.picker, given.stub_port))
    else:
        asyncio.run(_main(given))


if __name__ == "__main__":
    main()
