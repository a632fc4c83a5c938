"""Announces a running mesh on the local network (mDNS).

The announcement follows address changes of the machine and is withdrawn (a goodbye packet) when the mesh stops.
"""

import asyncio
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weft import __version__
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.values.address import split_address
from weft_app.compose.machine import this_machine
from weft_app.compose.mdns_announcement import (
    MAX_ADDRESSES,
    OTHER_WAY,
    SERVICE_TYPE,
    Announcement,
    multicast_errors,
    open_multicast,
)
from weft_app.compose.relay import RelayEndpoint
from weft_app.config.config import AnnounceSettings, WeftConfig

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

CHECK_INTERVAL_SECONDS = 15.0
NO_ADDRESS = "this machine has no network address"

log = get_logger("weft.announcer")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncementState:
    """Whether the mesh is announced."""

    name: str = ""
    """The announced name; empty: not announced. Numbered, as in `atlas-2`, if another mesh has the name."""
    fingerprint: str = ""
    why_not: str = ""


class Announcer:
    """Announces one mesh. Life cycle: start, stop. Without a network it retries at every check."""

    def __init__(
        self,
        announcement: Announcement,
        settings: AnnounceSettings,
        clock: Clock,
        read_addresses: Callable[[], tuple[str, ...]],
    ) -> None:
        """The addresses of `announcement` are ignored: each check takes those of `read_addresses`."""
        self._announcement = replace(announcement, addresses=())
        self._settings = settings
        self._clock = clock
        self._read_addresses = read_addresses
        self._host = f"weft-{uuid.uuid4().hex[:12]}.local."
        """A host name separate from the machine's, which belongs to its own mDNS responder."""
        self._multicast: AsyncZeroconf | None = None
        self._info: AsyncServiceInfo | None = None
        self._sending: asyncio.Future[Any] | None = None
        """The running transmission: each announcement is repeated twice within a second."""
        self._checks: asyncio.Task[None] | None = None
        self.state = AnnouncementState(fingerprint=announcement.fingerprint)

    async def start(self) -> None:
        """Announces the mesh, or records in `state` why it cannot, and starts the checks."""
        await self.check()
        self._checks = start_task(self._check_on(), name="announcement")

    async def stop(self) -> None:
        """Withdraws the announcement. Idempotent."""
        if self._checks is not None:
            await stop_tasks([self._checks])
            self._checks = None
        await self._withdraw()

    async def check(self) -> None:
        """Announces, updates or withdraws the mesh according to the machine's current addresses."""
        addresses = self._read_addresses()[:MAX_ADDRESSES]
        is_new = addresses != self._announcement.addresses
        self._announcement = replace(self._announcement, addresses=addresses)
        try:
            if not addresses:
                await self._withdraw()
            elif self._info is None:
                await self._announce()
            elif is_new:
                await self._update()
        except WeftError as error:
            await self._withdraw()
            self._note("", error.message)
        else:
            self._note(self._shown_name(), "" if addresses else f"{NO_ADDRESS}; {OTHER_WAY}")

    async def _check_on(self) -> None:
        while True:
            await self._clock.sleep(CHECK_INTERVAL_SECONDS)
            await self.check()

    async def _announce(self) -> None:
        with multicast_errors():
            self._multicast = open_multicast(self._settings.interfaces)
            info = self._service(self._announcement.name)
            sending = await self._multicast.async_register_service(info, allow_name_change=True)
            self._sending = asyncio.ensure_future(sending)
        self._info = info

    async def _update(self) -> None:
        assert self._multicast is not None, "what is announced has sockets"
        info = self._service(self._shown_name())
        with multicast_errors():
            await self._sent()
            await self._multicast.async_update_interfaces()
            self._sending = asyncio.ensure_future(await self._multicast.async_update_service(info))
        self._info = info

    async def _withdraw(self) -> None:
        multicast, self._multicast, self._info = self._multicast, None, None
        if multicast is not None:
            with suppress(WeftError), multicast_errors():
                await self._sent()
                await multicast.async_close()

    async def _sent(self) -> None:
        """Waits for the last transmission, so that no old announcement is sent after a new one."""
        sending, self._sending = self._sending, None
        if sending is not None:
            await sending

    def _service(self, name: str) -> "AsyncServiceInfo":
        from zeroconf.asyncio import AsyncServiceInfo  # noqa: PLC0415 - most meshes are not announced

        said = self._announcement
        return AsyncServiceInfo(
            SERVICE_TYPE,
            f"{name}.{SERVICE_TYPE}",
            port=said.port,
            properties=said.properties,
            server=self._host,
            parsed_addresses=list(said.addresses),
        )

    def _shown_name(self) -> str:
        return "" if self._info is None else self._info.name.removesuffix(f".{SERVICE_TYPE}")

    def _note(self, name: str, why_not: str) -> None:
        state = replace(self.state, name=name, why_not=why_not)
        if state != self.state:
            log.info("announcement changed", name=name, why_not=why_not, addresses=self._announcement.addresses)
        self.state = state


def announcer_of(config: WeftConfig, relay: RelayEndpoint, clock: Clock) -> Announcer:
    """Returns the announcer of a mesh with this relay."""
    host, port = split_address(relay.url.removeprefix("https://"), "relay.listen")
    said = Announcement(
        name=config.announce.name or _machine_name(),
        port=port,
        addresses=(),
        fingerprint=relay.fingerprint,
        version=__version__,
    )
    return Announcer(said, config.announce, clock, partial(_addresses, config.announce.interfaces, relay, host))


def _addresses(interfaces: tuple[str, ...], relay: RelayEndpoint, host: str) -> tuple[str, ...]:
    found = this_machine().addresses
    if not relay.is_everywhere:
        return tuple(each for each in found if each == host)
    return tuple(each for each in found if not interfaces or each in interfaces)


def _machine_name() -> str:
    """Returns the machine's short name without characters that cannot be announced."""
    name = socket.gethostname().partition(".")[0].lower()
    return "".join(each for each in name if each.isascii() and (each.isalnum() or each in "-_"))[:40] or "weft"
