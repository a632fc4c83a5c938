"""Networks of namespaces: a laptop behind address translation, and one beside a mesh."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

MESH_ADDRESS, GATEWAY_OUTSIDE = "203.0.113.1", "203.0.113.2"
LAPTOP_ADDRESS, GATEWAY_INSIDE = "10.77.0.2", "10.77.0.1"
LAN_MESH, LAN_LAPTOP = "192.168.77.1", "192.168.77.2"
ESTABLISHED, LISTENING = "01", "0A"
_HOLD = ("sh", "-c", "echo ready; exec sleep 600")


@dataclass(frozen=True, slots=True)
class Place:
    """One network namespace, held open by a process."""

    pid: int

    @property
    def enter(self) -> tuple[str, ...]:
        """The command that runs another one there."""
        return ("nsenter", "--target", str(self.pid), "--user", "--preserve-credentials", "--net", "--")

    def run(self, *command: str) -> None:
        """Run a command there. Skips the test where that is not allowed."""
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"`{' '.join(command)}` is not allowed here: exit {done.returncode} {done.stderr.strip()}")

    def tcp_sockets(self, state: str) -> list[tuple[str, str]]:
        """Local and remote address of its TCP sockets in a state; of IPv6 those that stand for IPv4 ones."""
        tables = [Path(f"/proc/{self.pid}/net/{table}").read_text() for table in ("tcp", "tcp6")]
        found = [line.split() for table in tables for line in table.splitlines()[1:]]
        return [(_address(fields[1]), _address(fields[2])) for fields in found if fields[3] == state]


@dataclass(frozen=True, slots=True)
class NatWorld:
    """Where things run."""

    mesh: Place
    gateway: Place
    laptop: Place


@contextmanager
def nat_world() -> Iterator[NatWorld]:
    """The three places, joined. Skips the test, with the reason, where namespaces are not allowed."""
    with ExitStack() as stack:
        gateway = stack.enter_context(_place("unshare", "--user", "--map-root-user", "--net"))
        into_user = gateway.enter[:-2]
        mesh = stack.enter_context(_place(*into_user, "--", "unshare", "--net"))
        laptop = stack.enter_context(_place(*into_user, "--", "unshare", "--net"))
        _join(gateway, mesh, "out", GATEWAY_OUTSIDE, MESH_ADDRESS)
        _join(gateway, laptop, "in", GATEWAY_INSIDE, LAPTOP_ADDRESS)
        laptop.run("ip", "route", "add", "default", "via", GATEWAY_INSIDE)
        gateway.run("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        gateway.run(sys.executable, str(Path(__file__).with_name("masquerade.py")))
        yield NatWorld(mesh, gateway, laptop)


@dataclass(frozen=True, slots=True)
class LanWorld:
    """A mesh and a laptop on one network."""

    mesh: Place
    laptop: Place


@contextmanager
def lan_world() -> Iterator[LanWorld]:
    """Two places on one network. Skips the test, with the reason, where namespaces are not allowed."""
    with ExitStack() as stack:
        mesh = stack.enter_context(_place("unshare", "--user", "--map-root-user", "--net"))
        laptop = stack.enter_context(_place(*mesh.enter[:-2], "--", "unshare", "--net"))
        _join(mesh, laptop, "lan", LAN_MESH, LAN_LAPTOP)
        yield LanWorld(mesh, laptop)


@contextmanager
def _place(*command: str) -> Iterator[Place]:
    try:
        process = subprocess.Popen([*command, *_HOLD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        pytest.skip(f"{command[0]} is not here: {error.strerror}")
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if not process.stdout.readline():
                pytest.skip(f"network namespaces are not allowed here: {process.stderr.read().strip()}")
            yield Place(process.pid)
        finally:
            process.kill()


def _join(gateway: Place, other: Place, name: str, gateway_address: str, other_address: str) -> None:
    gateway.run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(other.pid))
    for place, link, address in ((gateway, name, gateway_address), (other, "eth0", other_address)):
        place.run("ip", "address", "add", f"{address}/24", "dev", link)
        place.run("ip", "link", "set", link, "up")
        place.run("ip", "link", "set", "lo", "up")
    # A link runs some time after it was set up: until then its address is none of the machine's.
    for place, link in ((gateway, name), (other, "eth0")):
        place.run(
            "timeout", "10", "sh", "-c", f"until ip link show dev {link} | grep -q 'state UP'; do sleep 0.01; done"
        )


def _address(text: str) -> str:
    """An address as /proc writes it: words of four bytes in the host's order, in hex; the last one is IPv4's."""
    number = int(text.partition(":")[0][-8:], 16)
    return socket.inet_ntoa(number.to_bytes(4, sys.byteorder))
