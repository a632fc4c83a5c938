"""The endpoint of a runner as gateways take it: an IP address and a port, never a name."""

import asyncio
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from weft.dispatch.fleet import RunnerView
from weft.kernel.address import is_address
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason

log = get_logger("weft.picker")

KEPT_SECONDS = 15.0
"""How long the address of a name is used before it is asked for again."""
RESOLVE_SECONDS = 2.0
MAX_NAMES = 4_096


class EndpointAddresses:
    """Resolves names, and remembers their addresses for a moment."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, tuple[str, float]] = {}
        """Address and time until which it is used, by name."""

    async def of(self, url: str) -> str:
        """Returns the endpoint of a base URL, `ip:port`. Raises CONNECT_FAILED where its name has no address."""
        host, port, is_number = _place_in(url)
        found = host if is_number else await self._address(host)
        return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"

    async def of_runners(self, runners: Iterable[RunnerView]) -> dict[str, frozenset[str]]:
        """Returns the endpoints of each runner that has one, by name: its HTTP port, and engines that proxies call.

        Those without an address are left out.
        """
        having = [(runner.name, url) for runner in runners for url in _urls_of(runner)]
        found = await asyncio.gather(*(self.of(url) for _, url in having), return_exceptions=True)
        endpoints: dict[str, frozenset[str]] = {}
        for (runner, _), endpoint in zip(having, found, strict=True):
            if isinstance(endpoint, str):
                endpoints[runner] = endpoints.get(runner, frozenset()) | {endpoint}
        return endpoints

    async def _address(self, host: str) -> str:
        now = self._clock.monotonic()
        known = self._known.get(host)
        if known is not None and now < known[1]:
            return known[0]
        loop = asyncio.get_running_loop()
        try:
            resolving = loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = await asyncio.wait_for(resolving, RESOLVE_SECONDS)
        except (OSError, TimeoutError) as error:
            raise WeftError(Reason.CONNECT_FAILED, f"the name {host} of a runner has no address: {error}") from None
        address = str(found[0][4][0])
        if len(self._known) >= MAX_NAMES:
            self._known.clear()
        self._known[host] = (address, now + KEPT_SECONDS)
        return address


def _urls_of(runner: RunnerView) -> list[str]:
    engines = (each.engine_lane_url for each in runner.instances.values())
    return [url for url in (runner.lane_url, *engines) if url]


@lru_cache(maxsize=MAX_NAMES)
def _place_in(url: str) -> tuple[str, int, bool]:
    """Returns host and port of a base URL, and whether the host is an address. Runners keep theirs."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return host, parts.port or (443 if parts.scheme == "https" else 80), is_address(host)
