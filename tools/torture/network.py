"""The network of a torture run: each service has a network namespace, joined to the others by links that can be cut.

The run itself is the hub, in a namespace of its own (`python -m tools.torture --apart` makes it): all links end
there, and it forwards what goes from one service to another. PostgreSQL listens at the hub.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from weft.kernel.channels.tls import TlsFiles

HUB = "10.78.0.1"
HUB_NAME = "hub"
DATABASE_PORT = 5432
WITHIN = "WEFT_TORTURE_APART"
"""Set in a process that runs in a network namespace of its own."""
MESH = "weft://mesh/"
SLOW_LINK = ("rate", "64kbit", "burst", "4kb", "latency", "400ms")
"""Parameters of the token bucket filter on a slow link."""
_UNSHARE = ("unshare", "--net")
_HOLD = ("sh", "-c", "echo ready; exec cat")
"""Ends with the process that made it."""


class CutKind(StrEnum):
    """How a link between two services is disturbed."""

    BOTH_WAYS = "black hole"
    """Nothing passes between two services."""
    ONE_WAY = "half-open"
    """Packets from the first to the second are dropped, the others arrive."""
    LINK_DOWN = "link down"
    """The first is cut off from everything."""
    SLOW = "slow link"
    """The link to the first has 64 kbit/s."""


class NoNetworkError(Exception):
    """Network namespaces cannot be used here; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace with one service."""

    name: str
    number: int
    pid: int
    """The process that holds it open."""

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return f"10.78.{self.number}.2"

    @property
    def link(self) -> str:
        """The name of its link at the hub."""
        return f"weft{self.number}"

    @property
    def within(self) -> Sequence[str]:
        """The command that runs another one there."""
        return ("nsenter", "--target", str(self.pid), "--net", "--")


class Network:
    """The places of a run, and their certificates."""

    def __init__(self, places: Mapping[str, Place], folder: Path) -> None:
        """`folder`: where certificates are written."""
        self.places = places
        from weft_testing.certificates import Authority  # noqa: PLC0415 - needs trustme, and other runs do not

        self._authority = Authority()
        self._folder = folder

    def files(self, name: str) -> TlsFiles:
        """Returns a new certificate for a service, or for a client at the hub. Raises OSError."""
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        address = self.places[name].address if name in self.places else HUB
        return self._authority.issue(address, f"{MESH}{name}").write(folder, self._authority)

    def cut(self, kind: CutKind, first: str, second: str) -> None:
        """Disturbs the connection of a service with another one, or with the database at the hub.

        Raises NoNetworkError.
        """
        for command in self._commands(kind, first, second, "add", "down"):
            _run(*command)

    def heal(self, kind: CutKind, first: str, second: str) -> None:
        """Undoes `cut`. Raises NoNetworkError."""
        for command in self._commands(kind, first, second, "del", "up"):
            _run(*command)

    def _commands(self, kind: CutKind, first: str, second: str, route: str, link: str) -> list[Sequence[str]]:
        place = self.places[first]
        if kind is CutKind.LINK_DOWN:
            return [("ip", "link", "set", place.link, link)]
        if kind is CutKind.SLOW:
            slow = ("tbf", *SLOW_LINK) if route == "add" else ()
            return [("tc", "qdisc", route, "dev", place.link, "root", *slow)]
        ends = [(place, self._address(second))]
        # The hub is also where the clients are: towards it, only the service drops packets.
        if kind is CutKind.BOTH_WAYS and second in self.places:
            ends.append((self.places[second], place.address))
        return [(*end.within, "ip", "route", route, "blackhole", f"{other}/32") for end, other in ends]

    def _address(self, name: str) -> str:
        return HUB if name == HUB_NAME else self.places[name].address


def network_missing() -> str:
    """Returns why namespaces with links cannot be made here; empty: they can."""
    for program in ("ip", "tc", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: iproute2, util-linux)"
    probe = (
        "ip link add weft0 type veth peer name weft1 && echo 1 > /proc/sys/net/ipv4/ip_forward"
        f" && tc qdisc add dev weft0 root tbf {' '.join(SLOW_LINK)}"
    )
    command = [*_UNSHARE, "sh", "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - of this module
    return done.stderr.strip() if done.returncode else ""


def enter_own_network(command: Sequence[str]) -> None:
    """Runs a command in a new network namespace, in place of this process. Raises OSError."""
    os.execvpe(_UNSHARE[0], [*_UNSHARE, *command], {**os.environ, WITHIN: "1"})  # noqa: S606 - of this module


@contextmanager
def joined(names: Sequence[str], folder: Path) -> Iterator[Network]:
    """Yields a network with a place for each name; this process is the hub. Raises NoNetworkError."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "replace", f"{HUB}/32", "dev", "lo")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    with ExitStack() as stack:
        places = {name: stack.enter_context(_place(name, number)) for number, name in enumerate(names, start=1)}
        yield Network(places, folder)


@contextmanager
def _place(name: str, number: int) -> Iterator[Place]:
    command = [*_UNSHARE, *_HOLD]
    with subprocess.Popen(  # noqa: S603 - a command of this module
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        try:
            if not holder.stdout.readline():
                raise NoNetworkError("a network namespace cannot be made")
            place = Place(name, number, holder.pid)
            _run("ip", "link", "add", place.link, "type", "veth", "peer", "name", "eth0", "netns", str(place.pid))
            _run("ip", "address", "add", f"10.78.{number}.1/24", "dev", place.link)
            _run("ip", "link", "set", place.link, "up")
            for words in (
                ("link", "set", "lo", "up"),
                ("address", "add", f"{place.address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("route", "add", "default", "via", f"10.78.{number}.1"),
            ):
                _run(*place.within, "ip", *words)
            yield place
        finally:
            holder.kill()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - of this module
    if done.returncode:
        raise NoNetworkError(f"`{' '.join(command)}`: {done.stderr.strip()}")
