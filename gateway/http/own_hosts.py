"""The names of a gateway: which Host headers are its own."""

from urllib.parse import urlsplit

from gateway.config import GatewayConfig
from weft.kernel.address import is_address, is_any_host

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def host_name(url: str) -> str | None:
    """Returns the host name of a URL; None: it has none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def is_own_host(name: str | None, config: GatewayConfig) -> bool:
    """Whether callers may reach this gateway by a host name."""
    if name is None:
        return False
    if name in LOOPBACK_NAMES or name == config.host or name in config.allowed_hosts:
        return True
    # DNS rebinding needs a name: a page that sends an address comes from there, and asks for it openly.
    return is_any_host(config.host) and is_address(name)
