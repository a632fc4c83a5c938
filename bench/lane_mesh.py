"""The mesh of `bench.lane_load`: registry, picker, runners with fake engines and Envoy, each a process of its own."""

import asyncio
import json
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import aiohttp
import grpc
import psutil

from bench.lane_ends import Receipt
from bench.launch import LaunchError
from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1 import key_service_pb2
from weft.api.registry.v1.key_service_pb2_grpc import KeyServiceStub
from weft.kernel.reasons import Reason
from weft_app.config.loader import load_config
from weft_app.edge.edge_document import edge_document
from weft_app.edge.plan import EdgePlan, Endpoint, LanePlan, limits_of
from weft_testing.fake_backend.process import FakeControl, fake_backend_command
from weft_testing.free_port import free_ports
from weft_testing.torture.final_state import SQLITE_PREFIX
from weft_testing.torture.history import complete_lines
from weft_testing.torture.mesh import MAX_LOG_BYTES, Member

if TYPE_CHECKING:
    from weft.api.registry.v1.key_service_pb2_grpc import KeyServiceAsyncStub

POOL = "pool"
START_SECONDS = 120.0
POLL_SECONDS = 0.05
SAMPLE_SECONDS = 1.0
MANY = 100_000
"""A limit that this mesh does not reach: what limits it is its processors and its engines."""
_LINE_BEGINS = b'{"component"'
EndpointName = Literal["sidecar", "engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """How large the mesh is."""

    runners: int = 4
    slots: int = 64
    """Of each engine at the start."""
    tenants: tuple[str, ...] = ()
    endpoint: EndpointName = "sidecar"


@dataclass(slots=True)
class CpuBook:
    """CPU seconds by role, over processes that come and go."""

    seconds: dict[int, float] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)

    def note(self, pid: int | None, role: str) -> None:
        """Note what a process and its children have used so far."""
        if pid is None:
            return
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = each.cpu_times()
                    is_engine = "weft_testing.fake_backend" in each.cmdline()
                    self.seconds[each.pid] = times.user + times.system
                    self.roles[each.pid] = "engines" if is_engine else role

    def by_role(self) -> Mapping[str, float]:
        """Returns the sums."""
        found: dict[str, float] = {}
        for pid, seconds in self.seconds.items():
            found[self.roles[pid]] = found.get(self.roles[pid], 0.0) + seconds
        return found


class LaneMesh:
    """All of its processes. Life cycle: start, stop."""

    def __init__(self, plan: MeshPlan, folder: Path) -> None:
        self.plan = plan
        self._slots = plan.slots
        self._folder = folder
        self._home = folder / "home"
        self._config = folder / "weft.yaml"
        first = free_ports(3 + 2 * plan.runners)
        self.port, self._picker_port, self._health_port = first, first + 1, first + 2
        self._http_ports = range(first + 3, first + 3 + plan.runners)
        self._engine_ports = range(first + 3 + plan.runners, first + 3 + 2 * plan.runners)
        self._requests = folder / "engines.jsonl"
        names = [f"r{number}" for number in range(plan.runners)]
        self._registry, self.picker = self._service("registry"), self._service("picker")
        self._runners = [self._service("runner", "--runner", name) for name in names]
        self._envoy: asyncio.subprocess.Process | None = None
        self.keys: dict[str, str] = {}
        """The Authorization header of each tenant."""
        self.cpu = CpuBook()
        self._sampling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts everything, and returns when tenants have keys. Raises LaunchError."""
        self._home.mkdir(parents=True, exist_ok=True)
        self._config.write_text(json.dumps(self._configuration()), "utf-8")
        for member in (self._registry, self.picker, *self._runners):
            await member.start()
            await self.until_serves(member)
        await self._make_keys()
        await self._start_envoy()
        self._sampling = asyncio.create_task(self._sample())

    async def stop(self) -> None:
        """Ends everything; the picker in order, so that it writes its records."""
        if self._sampling is not None:
            self._sampling.cancel()
        if self._envoy is not None and self._envoy.returncode is None:
            self._envoy.terminate()
            await self._envoy.wait()
        members = (self.picker, *self._runners, self._registry)
        for member in members:
            if member.signal(signal.SIGTERM):
                try:
                    await asyncio.wait_for(member.wait(), START_SECONDS)
                except TimeoutError:
                    await member.kill()
        for pid, role in self.cpu.roles.items():
            # An engine outlives no runner that ends in order; one that was killed may leave it for a moment.
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if role == "engines" and "weft_testing.fake_backend" in process.cmdline():
                    process.kill()

    async def resize(self, slots: int) -> None:
        """Starts the runners again, with so many slots of each engine. Raises LaunchError."""
        self.note_cpu()
        self._slots = slots
        self._config.write_text(json.dumps(self._configuration()), "utf-8")
        for runner in self._runners:
            runner.signal(signal.SIGTERM)
        for runner in self._runners:
            await runner.wait()
            await runner.start()
        for runner in self._runners:
            await self.until_serves(runner)

    async def until_serves(self, member: Member) -> None:
        """Returns once a service says that it serves. Raises LaunchError with its last words."""
        deadline = time.monotonic() + START_SECONDS
        while not member.serves:
            if time.monotonic() > deadline or member.exit_code is not None:
                words = (self._folder / f"{member.name}.out").read_text("utf-8", "replace")[-500:]
                raise LaunchError(f"{member.name} does not serve: {words}")
            await asyncio.sleep(POLL_SECONDS)

    async def set_pace(self, tokens_per_second: float) -> None:
        """Has each slot of all engines make so many tokens per second."""
        deadline = time.monotonic() + START_SECONDS
        for port in self._engine_ports:
            async with FakeControl(f"http://127.0.0.1:{port}") as engine:
                while True:
                    try:
                        await engine.set_behaviour(tokens_per_second=tokens_per_second)
                        break
                    except aiohttp.ClientError as error:
                        # It is still starting.
                        if time.monotonic() > deadline:
                            raise LaunchError(f"the engine on port {port} does not serve: {error}") from error
                        await asyncio.sleep(POLL_SECONDS)

    def note_cpu(self) -> Mapping[str, float]:
        """Returns the CPU seconds of all processes so far, those that were killed included."""
        self.cpu.note(self._registry.pid, "registry")
        self.cpu.note(self.picker.pid, "picker")
        self.cpu.note(None if self._envoy is None else self._envoy.pid, "envoy")
        for runner in self._runners:
            self.cpu.note(runner.pid, "runners")
        return self.cpu.by_role()

    def engine_ends(self) -> Mapping[str, Sequence[str]]:
        """Returns what engines logged of each request's ends."""
        found: dict[str, list[str]] = {}
        for line in map(json.loads, complete_lines(self._requests)):
            if line["event"] != "begun":
                found.setdefault(line["request_id"], []).append(line["event"])
        return found

    def receipts(self) -> Iterator[Receipt]:
        """Yields what the logs and the database of the picker have of each request's end."""
        for line in log_lines(self._home / "logs" / "router.log"):
            if line["event"] == "request":
                yield receipt_of_log(line)
        yield from receipts_of_database(self._home / "state" / "router.db")

    async def _sample(self) -> None:
        while True:
            self.note_cpu()
            await asyncio.sleep(SAMPLE_SECONDS)

    def _service(self, service: str, *arguments: str) -> Member:
        name = "-".join([service, *arguments[1:]])
        where = ["--home", str(self._home), "--config", str(self._config)]
        command = ["-m", "weft_app.cli.main", "serve", service, *where, *arguments]
        return Member(name, command, self._folder / f"{name}.out")

    async def _make_keys(self) -> None:
        async with grpc.aio.insecure_channel(f"unix:{self._home}/run/registry.sock") as channel:
            for tenant in self.plan.tenants:
                request = key_service_pb2.CreateKeyRequest(description="bench", tenant=tenant)
                stub = cast("KeyServiceAsyncStub", KeyServiceStub(channel))
                response = await stub.CreateKey(request, timeout=START_SECONDS)
                self.keys[tenant] = f"Bearer {response.text}"

    async def _start_envoy(self) -> None:
        plan = EdgePlan(
            listen=Endpoint(host="127.0.0.1", port=self.port),
            # What the lane leaves to gateways is refused by the picker: it has none.
            gateways=(Endpoint(host="127.0.0.1", port=self._health_port),),
            limits=limits_of(load_config(self._config)),
            lane=LanePlan(
                picker=Endpoint(host="127.0.0.1", port=self._picker_port),
                endpoints=tuple(Endpoint(host="127.0.0.1", port=port) for port in self._http_ports),
            ),
        )
        file = self._folder / "envoy.json"
        file.write_text(json.dumps(edge_document(plan)), "utf-8")
        with (self._folder / "envoy.out").open("wb") as output:
            self._envoy = await asyncio.create_subprocess_exec(
                *(str(Path(sys.executable).with_name("envoy")), "-c", str(file), "--concurrency", "1"),
                *("--disable-hot-restart", "-l", "warning"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _configuration(self) -> Mapping[str, Any]:
        engine = ("--request-log", str(self._requests))
        return {
            "auth": {"required": True},
            "log": {"max_file_bytes": MAX_LOG_BYTES},
            "router": {"database_url": f"{SQLITE_PREFIX}{self._home}/state/router.db"},
            "picker": {
                "listen": f"127.0.0.1:{self._picker_port}",
                "health_listen": f"127.0.0.1:{self._health_port}",
                "max_open_requests": MANY,
            },
            "edge": {
                "max_connections": MANY,
                "max_requests": MANY,
                "max_pending_requests": MANY,
                "max_requests_per_second": MANY,
                "max_request_burst": MANY,
            },
            "runners": [
                {
                    "name": f"r{number}",
                    "command": fake_backend_command(*engine, answer_tokens=0),
                    "http_port": self._http_ports[number],
                    "port_range": f"{self._engine_ports[number]}-{self._engine_ports[number]}",
                    "max_requests": self._slots,
                    "models": [
                        {
                            "name": f"m{number}",
                            "pool": POOL,
                            "path": __file__,
                            "slots": self._slots,
                            "context_tokens": 4096,
                            "lane": self.plan.endpoint,
                        }
                    ],
                }
                for number in range(self.plan.runners)
            ],
        }


def log_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the lines of a log, whose writers may have been killed: half a line then is before its successor's first.

    Raises ValueError for any other line that is not JSON.
    """
    for line in complete_lines(path):
        yield json.loads(line[max(0, line.rfind(_LINE_BEGINS)) :])


def receipt_of_log(line: Mapping[str, Any]) -> Receipt:
    """Returns the receipt that a line of a router's log about an ended request has."""
    return Receipt(
        request_id=line["request_id"],
        outcome=line["outcome"],
        reason=line.get("reason") or "",
        tokens=line.get("completion_tokens"),
    )


def receipts_of_database(path: Path) -> Iterator[Receipt]:
    """Yields the receipts of ended requests in a router's database. Raises sqlite3.Error."""
    with closing(sqlite3.connect(path)) as connection:
        wanted = "SELECT request_id, reason, receipt, ended_at FROM request_records WHERE ended_at IS NOT NULL"
        for request_id, number, kept, ended_at in connection.execute(wanted):
            receipt = receipt_pb2.Receipt.FromString(kept or b"")
            has_usage = receipt.HasField("usage")
            reason = Reason(number).name.lower() if number else ""
            yield Receipt(
                request_id=request_id,
                outcome="completed" if not number else "failed",
                reason=reason,
                tokens=receipt.usage.completion_tokens if has_usage else None,
                written_at=ended_at if number == Reason.ROUTER_LOST.value else 0.0,
            )
