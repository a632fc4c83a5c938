"""A whole mesh as real processes: `weft up` on a temporary home, and what a test needs to look into it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import msgspec
import psutil
import yaml
from kit.resources import records
from kit.warm_python import warm
from kit.warm_server import NAME as SERVER_NAME

from weft.api.registry.v1 import registry_service_pb2, registry_service_pb2_grpc, runner_pb2
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.kernel.channels.rpc import open_channel
from weft.kernel.values.address import metadata_of
from weft_app.cli.stages import STOP_LINE
from weft_testing.fake_backend.behaviour import Behaviour
from weft_testing.fake_backend.process import FakeControl, fake_backend_command

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub
    from weft.api.runner.v1.runner_service_pb2_grpc import RunnerServiceAsyncStub

START_SECONDS = 60.0
ORPHAN_SECONDS = 2.0
"""The promise: nothing outlives a supervisor that is killed for longer."""
STOP_SECONDS = 30.0
LOG_SECONDS = 10.0
MAX_LOG_LINES = 1000
"""The most that a runner gives at once."""
POLL_SECONDS = 0.02
POOL = "pool"
WEFT = warm("weft_app.cli.main")
COLD_WEFT = (sys.executable, "-m", "weft_app.cli.main")
"""For tests of how a process starts, and of what others see of it."""


def fake_runner(name: str, *, slots: int = 4, pool: str = POOL, **switches: Any) -> dict[str, Any]:
    """A runner section with one model `m-<name>` on a fake backend."""
    return {
        "name": name,
        "command": fake_backend_command(**switches),
        "models": [{"name": f"m-{name}", "pool": pool, "path": __file__, "slots": slots}],
        "first_term_seconds": 0.5,
    }


def write_config(folder: Path, *runners: dict[str, Any], **sections: Any) -> Path:
    """A weft.yaml in `folder`."""
    path = folder / "weft.yaml"
    path.write_text(yaml.safe_dump({"runners": list(runners), "port": 0, "drain_seconds": 5.0, **sections}))
    return path


class MeshProcess:
    """A running `weft up`."""

    def __init__(self, home: Path, process: subprocess.Popen[bytes]) -> None:
        self.home = home
        self.process = process
        self.facts: dict[str, Any] = {}

    @property
    def url(self) -> str:
        """Base URL of the HTTP surface."""
        return str(self.facts["url"])

    @property
    def grpc(self) -> str:
        """gRPC target of registry and router."""
        return str(self.facts["grpc"])

    def family(self) -> list[psutil.Process]:
        """Every process that belongs to it, itself included."""
        with suppress(psutil.NoSuchProcess):
            host = psutil.Process(self.process.pid)
            return [host, *own_descendants(host)]
        return []

    async def runners(self) -> list[runner_pb2.Runner]:
        """What the registry knows of runners."""
        async with open_channel(self.grpc) as channel:
            stub = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(channel))
            response = await stub.ListResources(registry_service_pb2.ListResourcesRequest(kind="runner"), timeout=5.0)
            return records(response.resources)

    async def describe(self, runner: str, log_lines: int = 0) -> runner_service_pb2.InstanceDescription:
        """The only instance of a runner, as the runner itself describes it."""
        address = next(known.address for known in await self.runners() if known.name == runner)
        async with open_channel(address) as channel:
            stub = cast("RunnerServiceAsyncStub", runner_service_pb2_grpc.RunnerServiceStub(channel))
            request = runner_service_pb2.DescribeRequest(log_line_count=log_lines)
            response = await stub.Describe(request, timeout=5.0, metadata=metadata_of(address))
            return response.instances[0]

    async def backend(self, runner: str) -> FakeControl:
        """The fake behind a runner; close it when done."""

        async def url() -> str | None:
            lines = (await self.describe(runner, log_lines=MAX_LOG_LINES)).log_lines
            found = re.findall(r"listening on (http://\S+)", "\n".join(lines))
            return found[-1] if found else None

        # A model may be ready before the runner has read the first line of its server.
        return FakeControl(await eventually(url, LOG_SECONDS, f"the server of {runner} has not named its address"))

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        """The host's log lines about one kind of event."""
        lines = (self.home / "logs" / "host.log").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == event]

    async def busy(self, *runners: str) -> str:
        """Returns the first of these runners whose backend processes a request, as soon as there is one."""

        async def found() -> str | None:
            for name in runners:
                if (await self.describe(name)).active_request_ids:
                    return name
            return None

        name: str = await eventually(found, 5.0, "no runner processes the request")
        return name

    async def reset(self, *runners: str) -> None:
        """Give the fakes behind these runners their normal behaviour back."""
        for runner in runners:

            async def is_normal(runner: str = runner) -> bool:
                try:
                    async with await self.backend(runner) as backend:
                        await backend.set_behaviour(**msgspec.to_builtins(Behaviour()))
                except aiohttp.ClientConnectionError:
                    return False  # It has ended, and its successor has not named its address.
                return True

            await eventually(is_normal, LOG_SECONDS, f"the server of {runner} does not answer")

    async def weft(self, *words: str, stdin: str | None = None) -> str:
        """What a command prints that succeeds."""
        return await weft_output(*words, home=self.home, stdin=stdin)

    def request_line(self, request_id: str) -> dict[str, Any]:
        """The one log line of a request that is over."""
        (line,) = [line for line in self.log_lines("request") if line["request_id"] == request_id]
        return line

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """End it as a user would; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)


@contextmanager
def running_mesh(
    home: Path, *arguments: str, within: tuple[str, ...] = (), weft: tuple[str, ...] = WEFT
) -> Iterator[MeshProcess]:
    """`weft up --home <home>` until it is ready and has said so; ended with the block, and nothing of it may be left.

    `within` is a command that it is started by.
    """
    said = home.parent / f"{home.name}.out"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*within, *weft, "up", "--home", str(home), *arguments],
            env=user_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    mesh = MeshProcess(home, process)
    family: list[psutil.Process] = []
    try:
        wait_until_ready(mesh)
        deadline = time.monotonic() + START_SECONDS
        while STOP_LINE not in said.read_text():
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(POLL_SECONDS)
        family = mesh.family()
        yield mesh
        family += mesh.family()
        # Whoever ends it by a signal of its own ends all of it first; a host that is killed is followed within moments.
        deadline = time.monotonic() + (ORPHAN_SECONDS if mesh.stop() == -signal.SIGKILL else 0.0)
        while alive(family) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        survivors = {process: process.cmdline() for process in alive(family)}
        assert not survivors, f"weft up left processes behind: {survivors}"
    finally:
        for left in [*family, *mesh.family()]:
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait(STOP_SECONDS)


def user_environment() -> dict[str, str]:
    """As a user starts it: Python made unbuffered by the workplace would hide a word that is not flushed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def own_descendants(host: psutil.Process) -> list[psutil.Process]:
    """All that it has started; the server that its runners are forked from is the tests'."""
    found = []
    for process in host.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() != SERVER_NAME:
                found.append(process)
    return found


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a zombie does not."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_until_ready(mesh: MeshProcess) -> None:
    """Return once `weft up` has written down where it serves, and that its models are ready."""
    up_file = mesh.home / "run" / "up.json"
    deadline = time.monotonic() + START_SECONDS
    while not _is_ready(_text_of(up_file), mesh.process.pid):
        if mesh.process.poll() is not None or time.monotonic() > deadline:
            output = (mesh.home.parent / f"{mesh.home.name}.out").read_text()
            raise AssertionError(f"weft up is not ready (exit {mesh.process.returncode}):\n{output}")
        time.sleep(POLL_SECONDS)
    mesh.facts = json.loads(up_file.read_text())


def _is_ready(text: str, pid: int) -> bool:
    return f'"host": {pid}' in text and '"state": "starting"' not in text


def _text_of(path: Path) -> str:
    """Empty without the file: a start removes that of a host that was killed."""
    with suppress(FileNotFoundError):
        return path.read_text()
    return ""


async def run_weft(
    *arguments: str, home: Path, stdin: bytes | None = None, url: str = "", seconds: float = START_SECONDS
) -> tuple[int, str, str]:
    """A `weft` command to its end: exit code, stdout, stderr. `url`: of a mesh elsewhere. `seconds`: its timeout."""
    process = await asyncio.create_subprocess_exec(
        *WEFT,
        *arguments,
        env={**user_environment(), "WEFT_HOME": str(home), "COLUMNS": "200", **({"WEFT_URL": url} if url else {})},
        stdin=asyncio.subprocess.PIPE if stdin is not None else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return process.returncode or 0, out.decode(), err.decode()


async def weft_output(*words: str, home: Path, stdin: str | None = None) -> str:
    """What a `weft` command prints that succeeds."""
    code, out, error = await run_weft(*words, home=home, stdin=None if stdin is None else stdin.encode())
    assert code == 0, out + error
    return out


async def eventually(condition: Callable[[], Any], seconds: float, otherwise: str) -> Any:
    """The first true result of `condition` (awaited where it is a coroutine); AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"{otherwise} (after {seconds} s)")
        await asyncio.sleep(POLL_SECONDS)
