"""The meshes that are announced on the local network (mDNS), and the sockets that announcements need."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.compose.announcement import (
    MAX_MESHES,
    OTHER_WAY,
    SERVICE_TYPE,
    Announcement,
    joined_mesh,
    parse_announcement,
)
from weft_app.compose.join_address import JoinAddress

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

LISTEN_SECONDS = 2.0
"""How long announcements are listened for."""
RESOLVE_MILLISECONDS = 1000
"""Longest wait for the addresses of the meshes that were heard of; mostly they came with their names."""


@contextmanager
def multicast_errors() -> Iterator[None]:
    """Raises CONNECT_FAILED, with the other way to join, where this machine or its network has no multicast."""
    import zeroconf  # noqa: PLC0415 - few commands need it

    try:
        yield
    except (OSError, RuntimeError, zeroconf.Error) as error:
        # RuntimeError: there is no interface with an address.
        detail = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
        raise WeftError(
            Reason.CONNECT_FAILED, f"this machine or its network has no multicast DNS: {detail}; {OTHER_WAY}"
        ) from error


def open_multicast(interfaces: Sequence[str] = ()) -> "AsyncZeroconf":
    """Returns the sockets of multicast DNS, on the interfaces with these addresses, or all; see `multicast_errors`."""
    from zeroconf import InterfaceChoice, IPVersion  # noqa: PLC0415 - few commands need it
    from zeroconf.asyncio import AsyncZeroconf  # noqa: PLC0415

    chosen = list(interfaces) or InterfaceChoice.All
    return AsyncZeroconf(interfaces=chosen, ip_version=IPVersion.V4Only)


async def find_meshes(seconds: float = LISTEN_SECONDS, interfaces: Sequence[str] = ()) -> tuple[Announcement, ...]:
    """Returns the meshes that answer within this time, by name. Raises CONNECT_FAILED without multicast."""
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


async def find_addresses(fingerprint: str) -> tuple[JoinAddress, ...]:
    """Returns where the mesh with this fingerprint is announced now. Raises NOT_FOUND, or CONNECT_FAILED."""
    return joined_mesh(await find_meshes(), fingerprint)


def _announced(info: Any) -> Announcement | None:
    name = info.name.removesuffix(f".{SERVICE_TYPE}")
    return parse_announcement(name, info.port, info.properties, info.parsed_scoped_addresses())
