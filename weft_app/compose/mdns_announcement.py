"""Announcements of meshes on the local network (mDNS): parsing, discovery, and the choice of the mesh to join.

`mdns_announcer` sends them. Announcements are untrusted: anyone on the network can send one.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

    from weft_app.compose.join_address import JoinAddress

SERVICE_TYPE = "_weft._tcp.local."
"""The DNS-SD service: `_weft`, over TCP."""
MAX_ADDRESSES = 8
"""Maximum number of addresses of a mesh."""
MAX_MESHES = 32
"""Maximum number of meshes found; later ones are ignored."""
MAX_NAME_CHARS = 63
"""Length of a DNS label."""
MAX_VERSION_CHARS = 32
FINGERPRINT_KEY, VERSION_KEY = "fp", "version"
"""Keys of the TXT record. Name, port and addresses are in other records."""
OTHER_WAY = (
    "join with the command that `weft runner token create` prints on the "
    "mesh's machine: it contains the mesh's addresses"
)
LISTEN_SECONDS = 2.0
RESOLVE_MILLISECONDS = 1000
"""Timeout for resolving addresses; most arrive with the names."""
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A mesh as announced."""

    name: str
    port: int
    """Port of the relay."""
    addresses: tuple[str, ...]
    fingerprint: str = ""
    """Fingerprint of the relay's certificate, as `sha256:<hex>`; empty: a public authority has issued it."""
    version: str = ""

    @property
    def properties(self) -> dict[str, str]:
        """The TXT record."""
        given = {FINGERPRINT_KEY: self.fingerprint, VERSION_KEY: self.version[:MAX_VERSION_CHARS]}
        return {key: value for key, value in given.items() if value}

    @property
    def join_addresses(self) -> "tuple[JoinAddress, ...]":
        """The possible addresses of the relay."""
        from weft_app.compose.join_address import JoinAddress  # noqa: PLC0415 - with gRPC; `find_meshes` needs none

        return tuple(JoinAddress(host=address, port=self.port, is_tls=True) for address in self.addresses)

    @property
    def shown_addresses(self) -> str:
        """The addresses as text, such as `192.168.1.5:7443`."""
        return ", ".join(address.target for address in self.join_addresses)


def parse_announcement(
    name: str, port: int | None, properties: Mapping[bytes, bytes | None], addresses: Iterable[str]
) -> Announcement | None:
    """Returns the announcement; None if it is invalid."""
    fingerprint, version = (_text(properties.get(key.encode())) for key in (FINGERPRINT_KEY, VERSION_KEY))
    reachable = tuple(dict.fromkeys(filter(_is_reachable, addresses)))[:MAX_ADDRESSES]
    if not name or len(name) > MAX_NAME_CHARS or not port or not reachable:
        return None
    if fingerprint and _FINGERPRINT.fullmatch(fingerprint) is None:
        return None
    return Announcement(
        name=name,
        port=port,
        addresses=reachable,
        fingerprint=fingerprint,
        version=version[:MAX_VERSION_CHARS],
    )


def joined_mesh(found: Sequence[Announcement], fingerprint: str) -> "tuple[JoinAddress, ...]":
    """Returns the addresses announced with this fingerprint. Raises NOT_FOUND if there are none.

    Names are not compared, because any mesh can announce any name.
    """
    same = [mesh for mesh in found if mesh.fingerprint == fingerprint]
    if same:
        return tuple(dict.fromkeys(address for mesh in same for address in mesh.join_addresses))
    others = "; ".join(listed(found))
    raise WeftError(
        Reason.NOT_FOUND,
        f"no mesh with the fingerprint {fingerprint} is announced on this network"
        + (f", only {others}" if others else "")
        + f"; {OTHER_WAY}",
    )


def require_same_mesh(mesh: Announcement, fingerprint: str) -> None:
    """Raises PERMISSION_DENIED if an announced mesh is not the one of an invitation."""
    if mesh.fingerprint != fingerprint:
        raise WeftError(
            Reason.PERMISSION_DENIED,
            f"the invitation is for the mesh with the fingerprint {fingerprint or 'of a public authority'}, and "
            f"{mesh.name} is announced with {mesh.fingerprint}; do not join there before its operator has told you why",
        )


def listed(found: Iterable[Announcement]) -> list[str]:
    """Returns one line of text per mesh."""
    return [
        f"{mesh.name} at {mesh.shown_addresses}, {mesh.fingerprint or 'certificate of a public authority'}"
        for mesh in found
    ]


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


def _is_reachable(address: str) -> bool:
    """Whether a machine can be reached at the address. Link-local IPv6 would need the interface, too."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return not (parsed.is_unspecified or parsed.is_multicast or (parsed.version == 6 and parsed.is_link_local))


@contextmanager
def multicast_errors() -> Iterator[None]:
    """Raises CONNECT_FAILED if the machine or its network has no multicast. The text names the other way to join."""
    import zeroconf  # noqa: PLC0415 - few commands need it

    try:
        yield
    except (OSError, RuntimeError, zeroconf.Error) as error:
        # RuntimeError: no interface has an address.
        detail = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
        raise WeftError(
            Reason.CONNECT_FAILED, f"this machine or its network has no multicast DNS: {detail}; {OTHER_WAY}"
        ) from error


def open_multicast(interfaces: Sequence[str] = ()) -> "AsyncZeroconf":
    """Opens multicast DNS on the interfaces with these addresses, by default all. Use within `multicast_errors`."""
    from zeroconf import InterfaceChoice, IPVersion  # noqa: PLC0415 - few commands need it
    from zeroconf.asyncio import AsyncZeroconf  # noqa: PLC0415

    chosen = list(interfaces) or InterfaceChoice.All
    return AsyncZeroconf(interfaces=chosen, ip_version=IPVersion.V4Only)


async def find_meshes(seconds: float = LISTEN_SECONDS, interfaces: Sequence[str] = ()) -> tuple[Announcement, ...]:
    """Returns the meshes that answer in time, sorted by name. Raises CONNECT_FAILED without multicast."""
    with multicast_errors():
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo  # noqa: PLC0415 - few commands need it

        names: dict[str, None] = {}

        def note(*, name: str, **_: Any) -> None:
            if len(names) < MAX_MESHES:
                names[name] = None

        async with open_multicast(interfaces) as multicast:
            async with AsyncServiceBrowser(multicast.zeroconf, SERVICE_TYPE, handlers=[note]):
                await asyncio.sleep(seconds)
            services = [AsyncServiceInfo(SERVICE_TYPE, name) for name in names]
            requests = (each.async_request(multicast.zeroconf, RESOLVE_MILLISECONDS) for each in services)
            answered = await asyncio.gather(*requests)
    found = [_announced(info) for info, has_answer in zip(services, answered, strict=True) if has_answer]
    return tuple(sorted((mesh for mesh in found if mesh is not None), key=lambda mesh: (mesh.name, mesh.fingerprint)))


async def find_addresses(fingerprint: str) -> "tuple[JoinAddress, ...]":
    """Returns the addresses now announced with this fingerprint. Raises NOT_FOUND or CONNECT_FAILED."""
    return joined_mesh(await find_meshes(), fingerprint)


def _announced(info: Any) -> Announcement | None:
    name = info.name.removesuffix(f".{SERVICE_TYPE}")
    return parse_announcement(name, info.port, info.properties, info.parsed_scoped_addresses())
