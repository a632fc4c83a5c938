"""Configuration of an Envoy in front of a router's relay: HTTP/2 on both sides, and nothing that ends a link."""

from weft_app.edge.fragments import Document, extension, http_options, socket_address, static_cluster
from weft_app.edge.plan import Endpoint

RELAY = "relay"
SERVICE = "weft.api.router.v1.RelayService"
_KEEPALIVE = {"interval": "10s", "timeout": "10s"}
"""Detects a lost peer within 20 s. The relay closes connections with pings more often than every 3.3 s
(too_many_pings)."""


def relay_document(listen: Endpoint, relay: Endpoint) -> Document:
    """Returns the configuration of an Envoy at `listen`."""
    manager = extension(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=RELAY,
        codec_type="HTTP2",
        stream_idle_timeout="0s",
        common_http_protocol_options={"idle_timeout": "0s"},
        http2_protocol_options={"connection_keepalive": {**_KEEPALIVE}},
        route_config={"virtual_hosts": [{"name": RELAY, "domains": ["*"], "routes": [_route()]}]},
        http_filters=[extension("envoy.filters.http.router", "extensions.filters.http.router.v3.Router")],
    )
    listener = {
        "name": RELAY,
        "address": socket_address(listen),
        "filter_chains": [{"filters": [manager]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": [_cluster(relay)]}}


def _route() -> Document:
    return {"match": {"path": f"/{SERVICE}/Attach"}, "route": {"cluster": RELAY, "timeout": "0s"}}


def _cluster(relay: Endpoint) -> Document:
    return {
        "name": RELAY,
        **static_cluster(RELAY, (relay,)),
        "connect_timeout": "5s",
        # Whether the relay accepts runners. Existing links stay when it does not.
        "health_checks": [
            {
                "timeout": "2s",
                "interval": "5s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": SERVICE},
            }
        ],
        "typed_extension_protocol_options": http_options(
            common_http_protocol_options={"idle_timeout": "0s"},
            explicit_http_config={"http2_protocol_options": {"connection_keepalive": {**_KEEPALIVE}}},
        ),
    }
