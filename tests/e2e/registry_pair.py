"""Two registries on one PostgreSQL, each a process of its own, whose owner a test kills or freezes."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from mesh_process import WEFT, user_environment

from weft.api.registry.v1 import registry_service_pb2
from weft_testing.free_port import free_port

WAIT_SECONDS = 60.0
CHECK_SECONDS = 1.0
POLL_SECONDS = 0.02
SERVICE = registry_service_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name
SERVING = health_pb2.HealthCheckResponse.SERVING


class Member:
    """One registry of a pair, on a home and a port that it keeps over restarts."""

    def __init__(self, folder: Path, **registry: object) -> None:
        self.home = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[str] | None = None
        folder.mkdir()
        self._config = folder / "weft.yaml"
        self._config.write_text(yaml.safe_dump({"registry": registry}))

    def start(self) -> None:
        """Starts its process, as the owner or as a standby."""
        where = ["--home", str(self.home), "--config", str(self._config), "--listen", self.address]
        with (self.home / "errors").open("a") as errors:
            self.process = subprocess.Popen(
                [*WEFT, "serve", "registry", *where],
                env=user_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        assert "serves at" in self.process.stdout.readline(), (self.home / "errors").read_text()

    def send(self, number: signal.Signals) -> None:
        """Sends its process a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """Waits for the end of its process, and returns the exit code."""
        assert self.process is not None
        process, self.process = self.process, None
        code = process.wait(WAIT_SECONDS)
        assert process.stdout is not None
        process.stdout.close()
        return code

    def end(self) -> None:
        """Kills its process where one runs, a frozen one too."""
        if self.process is not None:
            self.process.kill()
            self.wait()

    @property
    def serves(self) -> bool:
        """Whether its health is that of an owner."""
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=CHECK_SECONDS)
            except grpc.RpcError:
                return False
        return bool(answer.status == SERVING)

    def said(self) -> str:
        """What it has written to its log, and to its terminal."""
        return "".join(path.read_text() for path in (self.home / "logs" / "registry.log", self.home / "errors"))


class Pair:
    """The two, of which each may be the owner."""

    def __init__(self, members: tuple[Member, Member]) -> None:
        self.members = members

    @property
    def addresses(self) -> str:
        """Both addresses, as clients are given them."""
        return ",".join(each.address for each in self.members)


def until(condition: Callable[[], bool]) -> float:
    """Waits for a condition, at most WAIT_SECONDS, and returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < WAIT_SECONDS, "it did not come true"
        time.sleep(POLL_SECONDS)
    return time.monotonic() - began


@contextmanager
def running_pair(folder: Path, database_url: str, *, first_url: str = "", **registry: object) -> Iterator[Pair]:
    """Yields a pair of which the first one is the owner; whatever runs in the end is killed.

    `first_url`: where the first one reaches the database, if not where the second one does.
    """
    first = Member(folder / "first", database_url=first_url or database_url, **registry)
    second = Member(folder / "second", database_url=database_url, **registry)
    try:
        for member in (first, second):
            member.start()
        until(lambda: "its standby" in second.said())
        yield Pair((first, second))
    finally:
        for member in (first, second):
            member.end()
