"""Configuration of an Envoy in front of gateways: listener, limits, routes and clusters."""

from pathlib import Path

from gateway.config import HANDSHAKE_TIMEOUT_SECONDS, HEADER_TIMEOUT_SECONDS, MAX_HEADER_COUNT, ConnectionLimits
from weft_app.edge.fragments import (
    Document,
    duration,
    extension,
    file_source,
    http_options,
    socket_address,
    static_cluster,
)
from weft_app.edge.local_replies import local_replies
from weft_app.edge.plan import CertificateFiles, EdgePlan

_CONNECTIONS = ConnectionLimits()
BUFFER_BYTES = 1_048_576
"""Buffer per connection and direction; a slow reader holds back its gateway, not the proxy."""
HEALTH_INTERVAL_SECONDS = 1.0
"""Interval of requests for /readyz to each of several gateways."""
CONNECT_RETRIES = 2
"""Maximum retries of a request that reached no gateway. Others are never retried."""
CONNECT_TIMEOUT_SECONDS = 2.0
MAX_RETRIES = 16
"""Maximum number of concurrent retries."""
MAX_PENDING_REQUESTS = 1024
"""Maximum number of requests waiting for a connection to a gateway."""
MAX_CONCURRENT_STREAMS = 100
"""Maximum number of requests on one HTTP/2 connection."""
BURST = 2
"""Burst after a pause, as seconds of the request rate."""
GATEWAYS = "gateways"
LISTENER = "edge"
CERTIFICATE = "edge"
"""Name of the certificate in its file of secrets."""
GATEWAY_PICKS = 16
"""Attempts of a retry to select another gateway. The one that has just died has the fewest requests, and is selected
three times of four among two."""
MAX_CONCURRENT_WINDOW_BYTES = 65_536
"""Window of an HTTP/2 stream, and so the memory for a caller that does not read."""


def edge_document(plan: EdgePlan) -> Document:
    """Returns the whole configuration."""
    document: Document = {
        "static_resources": {"listeners": [_listener(plan)], "clusters": [_gateways(plan)]},
        "overload_manager": _connection_limit(plan),
    }
    if plan.admin_socket is not None:
        document = {
            "admin": {"address": {"pipe": {"path": str(plan.admin_socket), "mode": 0o600}}},
            # Required by file-based configuration sources.
            "node": {"id": "weft-edge", "cluster": "weft"},
            **document,
        }
    return document


def _listener(plan: EdgePlan) -> Document:
    chain: Document = {}
    if plan.certificate is not None:
        chain["transport_socket_connect_timeout"] = duration(HANDSHAKE_TIMEOUT_SECONDS)
        chain["transport_socket"] = _tls(plan.certificate)
    return {
        "name": LISTENER,
        "address": socket_address(plan.listen),
        # With port reuse, two programs could share the port instead of failing at the start.
        "enable_reuse_port": False,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "filter_chains": [{**chain, "filters": [_connection_manager(plan)]}],
    }


def _tls(certificate: CertificateFiles | Path) -> Document:
    if isinstance(certificate, CertificateFiles):
        files = {
            "certificate_chain": {"filename": certificate.certificate},
            "private_key": {"filename": certificate.key},
        }
        source: Document = {"tls_certificates": [files]}
    else:
        secret = {"name": CERTIFICATE, "sds_config": file_source(str(certificate))}
        source = {"tls_certificate_sds_secret_configs": [secret]}
    return extension(
        "envoy.transport_sockets.tls",
        "extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        common_tls_context={
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "alpn_protocols": ["h2", "http/1.1"],
            **source,
        },
    )


def _connection_limit(plan: EdgePlan) -> Document:
    monitor = extension(
        "envoy.resource_monitors.global_downstream_max_connections",
        "extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=plan.limits.max_connections,
    )
    return {"resource_monitors": [monitor]}


def _connection_manager(plan: EdgePlan) -> Document:
    return extension(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=LISTENER,
        use_remote_address=True,
        # The mesh generates request ids.
        generate_request_id=False,
        preserve_external_request_id=True,
        server_header_transformation="PASS_THROUGH",
        request_headers_timeout=duration(HEADER_TIMEOUT_SECONDS),
        stream_idle_timeout="0s",
        common_http_protocol_options={
            "idle_timeout": duration(_CONNECTIONS.idle_seconds),
            "max_headers_count": MAX_HEADER_COUNT,
            "headers_with_underscores_action": "REJECT_REQUEST",
        },
        http2_protocol_options={
            "max_concurrent_streams": MAX_CONCURRENT_STREAMS,
            "initial_stream_window_size": MAX_CONCURRENT_WINDOW_BYTES,
            "initial_connection_window_size": max(MAX_CONCURRENT_WINDOW_BYTES, BUFFER_BYTES),
        },
        max_request_headers_kb=_CONNECTIONS.max_header_bytes // 1024,
        normalize_path=True,
        local_reply_config=local_replies(),
        route_config={"virtual_hosts": [{"name": "mesh", "domains": ["*"], "routes": [_route()]}]},
        http_filters=[_rate_limit(plan), _router()],
    )


def _route() -> Document:
    previous = "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    return {
        "match": {"prefix": "/"},
        "route": {
            "cluster": GATEWAYS,
            "timeout": "0s",
            "retry_policy": {
                "retry_on": "connect-failure,refused-stream,reset-before-request",
                "num_retries": CONNECT_RETRIES,
                "retry_host_predicate": [extension("envoy.retry_host_predicates.previous_hosts", previous)],
                "host_selection_retry_max_attempts": GATEWAY_PICKS,
            },
        },
    }


def _rate_limit(plan: EdgePlan) -> Document:
    always = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
    limits = plan.limits
    return extension(
        "envoy.filters.http.local_ratelimit",
        "extensions.filters.http.local_ratelimit.v3.LocalRateLimit",
        stat_prefix=LISTENER,
        token_bucket={
            "max_tokens": BURST * limits.max_requests_per_second,
            "tokens_per_fill": limits.max_requests_per_second,
            "fill_interval": "1s",
        },
        filter_enabled=always,
        filter_enforced=always,
    )


def _router() -> Document:
    return extension(
        "envoy.filters.http.router", "extensions.filters.http.router.v3.Router", suppress_envoy_headers=True
    )


def _gateways(plan: EdgePlan) -> Document:
    limits = plan.limits
    checks: Document = {}
    if len(plan.gateways) > 1:
        checks["health_checks"] = [
            {
                "timeout": "2s",
                "interval": duration(HEALTH_INTERVAL_SECONDS),
                "no_traffic_interval": duration(HEALTH_INTERVAL_SECONDS),
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/readyz", "host": "localhost"},
            }
        ]
    return {
        "name": GATEWAYS,
        **static_cluster(GATEWAYS, plan.gateways),
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": duration(CONNECT_TIMEOUT_SECONDS),
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": limits.max_requests,
                    "max_pending_requests": MAX_PENDING_REQUESTS,
                    "max_requests": limits.max_requests,
                    "max_retries": MAX_RETRIES,
                }
            ]
        },
        **checks,
        "typed_extension_protocol_options": http_options(
            # Shorter than the gateway's timeout, so that no request uses a connection that the gateway is closing.
            common_http_protocol_options={"idle_timeout": duration(_CONNECTIONS.idle_seconds / 2)},
            explicit_http_config={"http_protocol_options": {}},
        ),
    }
