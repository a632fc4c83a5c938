"""What a configuration must be for a mesh to start with it: for `weft up` and `weft doctor` alike."""

import ipaddress
import socket

from gateway.http.tls import server_context
from weft.kernel.errors import invalid_field
from weft_app.compose.gateway import gateway_config
from weft_app.compose.home import WeftHome
from weft_app.compose.registry import registry_config
from weft_app.compose.router import router_config
from weft_app.config.config import WeftConfig


def require_startable(config: WeftConfig, home: WeftHome) -> None:
    """Raises INVALID_ARGUMENT naming the setting for which a start would be refused. Opens nothing, starts nothing."""
    gateway = gateway_config(config)
    exposure = gateway.exposure()
    server_context(exposure)
    if not _is_loopback(exposure.host):
        exposure.require_protection()
    router_config(config, home.address("weft"))
    registry_config(config, home)


def _is_loopback(host: str) -> bool:
    """By its resolved address, as the listener looks at it: a spelling says nothing."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        raise invalid_field("host", f"'{host}' is not an address of this machine") from None
    return ipaddress.ip_address(found[0][4][0]).is_loopback
