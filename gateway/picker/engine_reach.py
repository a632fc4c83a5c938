"""Which engines a proxy reaches: one that listens on loopback is reached from its own machine alone."""

from functools import lru_cache
from urllib.parse import unquote

from gateway.picker.endpoint_addresses import EndpointAddresses
from weft.dispatch.fleet import RunnerView
from weft.kernel.address import is_address, is_loopback, without_tls
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger

log = get_logger("weft.picker")

MAX_TOLD = 1_024
"""Models of runners about which the log has said that a proxy does not reach their engines."""


@lru_cache(maxsize=256)
def proxy_of(peer: str) -> str:
    """Returns the IP address of a proxy by its gRPC peer; empty: it is on this machine.

    All requests of a connection have one peer.
    """
    kind, _, rest = peer.partition(":")
    host = unquote(rest).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""
    return host if is_address(host) and not is_loopback(host) else ""


class EngineReach:
    """Knows where the picker runs; remembers what it has said."""

    def __init__(self, host: str, addresses: EndpointAddresses) -> None:
        """`host`: the name of this machine as runners report theirs; empty: engines are taken for reachable."""
        self._host = host
        self._addresses = addresses
        self._told: set[tuple[str, str]] = set()

    async def reaches(self, proxy: str, runner: RunnerView, model: str) -> bool:
        """Whether the proxy of a request reaches the engine of a model itself; logs once where it does not."""
        if not self._host or not is_local_engine(runner, model):
            return True
        is_same = proxy == await self._address_of(runner) if proxy else runner.host == self._host
        if not is_same and (runner.name, model) not in self._told:
            if len(self._told) >= MAX_TOLD:
                self._told.clear()
            self._told.add((runner.name, model))
            log.warning(
                "the proxy does not reach an engine",
                model=model,
                runner=runner.name,
                why=f"`lane: engine` is on the loopback of {runner.host}, and the proxy is on another machine",
                instead="the runner's HTTP port" if runner.lane_url else "nothing: the runner has no http_port",
                proxy=proxy or self._host,
            )
        return is_same

    async def _address_of(self, runner: RunnerView) -> str:
        host = without_tls(runner.address).rpartition(":")[0].strip("[]")
        url = runner.lane_url or (f"http://{f'[{host}]' if ':' in host else host}:1" if host else "")
        try:
            endpoint = await self._addresses.of(url) if url else ""
        except WeftError:
            return ""
        return endpoint.rpartition(":")[0].strip("[]")


def is_local_engine(runner: RunnerView, model: str) -> bool:
    """Whether proxies call the engine of a model itself, and it listens on loopback."""
    instance = runner.instances.get(model)
    return instance is not None and instance.engine_lane and instance.engine_lane_is_local


def needs_its_machine(runner: RunnerView, model: str, host: str) -> bool:
    """Whether only a proxy of another machine than `host` reaches a model: no HTTP port of its runner does instead."""
    return bool(host) and not runner.lane_url and runner.host != host and is_local_engine(runner, model)
