"""A mesh on two sides of a network that can be cut: each has a router and a gateway; they share registry and runner.

Both sides reach the registry, the runner and the database over Unix sockets, whatever happens to the network between
them; side 0 reaches the registry over a socket that can be cut as well.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from apart_mesh import Apart
from mesh_process import fake_runner, write_config
from nat_world import PartitionWorld, Place, partition_world
from task_mesh import QUICK_TASKS

from weft_testing.certificates import Authority
from weft_testing.cut_socket import CutSocket, cut_socket
from weft_testing.postgres_server import PostgresServer

SLOTS = 2
TOKENS_PER_SECOND = 40
ROUTERS = ("r0", "r1")
_FORWARDER = Path(__file__).with_name("port_on_socket.py")


@dataclass(frozen=True, slots=True)
class Side:
    """A router and a gateway."""

    services: Apart
    socket: Path
    """Of the gateway, for the test."""

    @property
    def router_log(self) -> Path:
        """The log of its router."""
        return self.services.home / "logs" / "router.log"


@dataclass(frozen=True, slots=True)
class PartitionedMesh:
    """The mesh."""

    world: PartitionWorld
    registry_of_side_0: CutSocket
    sides: tuple[Side, Side]
    common: Apart
    """Registry and runner."""
    backend_log: Path


@contextmanager
def running_partitioned_mesh(folder: Path, postgres: PostgresServer, database: str) -> Iterator[PartitionedMesh]:
    """Starts all of it; what is left in the end ends with exit code 0."""
    backend_log = folder / "backend.jsonl"
    runner = fake_runner("a", slots=SLOTS, answer_tokens=0, tokens_per_second=TOKENS_PER_SECOND)
    runner["command"] += ["--request-log", str(backend_log)]
    with ExitStack() as stack:
        world = stack.enter_context(partition_world())
        common = Apart(folder / "home", write_config(folder, runner))
        stack.callback(_end, common)
        common.start("registry")
        common.start("runner")
        registry = folder / "home" / "run" / "registry.sock"
        network = stack.enter_context(cut_socket(folder / "registry-of-0.sock", registry))
        # The user of a namespace may not enter the folder of the server.
        stack.enter_context(cut_socket(folder / postgres.socket.name, postgres.socket))
        url = postgres.url(database, folder)
        ca = Authority()
        sides = [
            _side(stack, folder / name, world, number, path, ca, url)
            for number, (name, path) in enumerate(zip(ROUTERS, (folder / "registry-of-0.sock", registry), strict=True))
        ]
        yield PartitionedMesh(world, network, (sides[0], sides[1]), common, backend_log)


def _side(
    stack: ExitStack,
    folder: Path,
    world: PartitionWorld,
    number: int,
    registry: Path,
    ca: Authority,
    database_url: str,
) -> Side:
    folder.mkdir()
    place, address = world.sides[number], world.addresses[number]
    files = ca.issue(address, f"weft://mesh/{folder.name}").write(folder, ca)
    config = write_config(
        folder,
        addresses={"registry": f"unix:{registry}"},
        router={"name": folder.name, "database_url": database_url, "tasks": QUICK_TASKS},
        tls={
            "certificate_file": str(files.certificate_file),
            "key_file": str(files.key_file),
            "ca_file": str(files.ca_file),
            "announced_host": address,
            "allowed_clients": {"router": ["weft://mesh/*"]},
        },
    )
    services = Apart(folder / "home", config)
    stack.callback(_end, services)
    services.start("router", "--listen", f"tls:{address}:0", within=place.enter)
    url = services.start("gateway", within=place.enter)
    return Side(services, stack.enter_context(_forwarded(place, folder, int(url.rpartition(":")[2]))))


def _end(services: Apart) -> None:
    codes = services.end_all()
    assert set(codes) <= {0}, codes


@contextmanager
def _forwarded(place: Place, folder: Path, port: int) -> Iterator[Path]:
    path = folder / "gateway.sock"
    command = [*place.enter, sys.executable, str(_FORWARDER), str(path), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield path
        finally:
            process.kill()
