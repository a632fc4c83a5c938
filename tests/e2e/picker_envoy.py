"""A real Envoy that asks an endpoint picker, and endpoints that say which of them served."""

import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from envoy_process import running_config

from weft.kernel.lane_names import DESTINATION, DESTINATION_NAMESPACE, DESTINATION_SERVED
from weft_testing.free_port import free_port

ENDPOINT_HEADER, DIGEST_HEADER = "x-endpoint", "x-body-digest"
TOKENS = 60
_HTTP = "type.googleapis.com/envoy.extensions"


class EnvoyMode(StrEnum):
    """How Envoy sends bodies to the picker."""

    BOTH = "both bodies in full duplex"
    """As the gateways of the Gateway API do."""
    REQUEST = "the request in full duplex, no response"
    """As weft configures it."""


@dataclass(slots=True)
class Endpoint:
    """An endpoint under test."""

    address: str
    requests: list[dict[str, str]] = field(default_factory=list)
    """Headers of the requests that it got."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answers with what it got; a stream of TOKENS events where that is asked for."""
        self.requests.append(dict(request.headers))
        body = await request.read()
        headers = {ENDPOINT_HEADER: self.address, DIGEST_HEADER: hashlib.sha256(body).hexdigest()}
        if b'"stream": true' not in body:
            return web.json_response({"bytes": len(body)}, headers=headers)
        response = web.StreamResponse(headers=headers | {"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(TOKENS):
            await response.write(f"data: {number}\n\n".encode())
        await response.write_eof()
        return response


@asynccontextmanager
async def running_endpoints(count: int) -> AsyncIterator[list[Endpoint]]:
    """Yields endpoints on ports of their own."""
    endpoints, runners = [], []
    try:
        for _ in range(count):
            endpoint = Endpoint(f"127.0.0.1:{free_port()}")
            app = web.Application(client_max_size=8 * 2**20)
            app.router.add_route("*", "/{path:.*}", endpoint.serve)
            runner = web.AppRunner(app)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", int(endpoint.address.rpartition(":")[2])).start()
            endpoints.append(endpoint)
        yield endpoints
    finally:
        for runner in runners:
            await runner.cleanup()


@contextmanager
def running_gateway(folder: Path, picker_port: int, endpoints: list[str], mode: EnvoyMode) -> Iterator[str]:
    """Yields the URL of an Envoy in front of endpoints, which asks the picker."""
    port = free_port()
    with running_config(folder, yaml.safe_dump(_config(port, picker_port, endpoints, mode)), port):
        yield f"http://127.0.0.1:{port}"


def _config(port: int, picker_port: int, endpoints: list[str], mode: EnvoyMode) -> dict[str, Any]:
    both = mode is EnvoyMode.BOTH
    processor = {
        "@type": f"{_HTTP}.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND" if both else "SKIP",
            "response_body_mode": "FULL_DUPLEX_STREAMED" if both else "NONE",
            "response_trailer_mode": "SEND" if both else "SKIP",
        },
        "message_timeout": "300s",
        "metadata_options": {
            "forwarding_namespaces": {"untyped": [DESTINATION_NAMESPACE]},
            "receiving_namespaces": {"untyped": [DESTINATION_NAMESPACE]},
        },
    }
    manager = {
        "@type": f"{_HTTP}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": _route()}],
                }
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": processor},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_HTTP}.filters.http.router.v3.Router"},
            },
        ],
    }
    listener = {
        "name": "gateway",
        "address": _address("127.0.0.1", port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    clusters = [_pool(endpoints), _picker(picker_port)]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _route() -> dict[str, Any]:
    predicate = "envoy.retry_host_predicates.previous_hosts"
    kind = f"{_HTTP}.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    return {
        "cluster": "pool",
        "timeout": "0s",
        "retry_policy": {
            "retry_on": "connect-failure",
            "num_retries": 2,
            "retry_host_predicate": [{"name": predicate, "typed_config": {"@type": kind}}],
        },
    }


def _pool(endpoints: list[str]) -> dict[str, Any]:
    override = {
        "@type": f"{_HTTP}.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": DESTINATION_NAMESPACE, "path": [{"key": DESTINATION}]}},
            {"header": DESTINATION},
        ],
        "selected_host_key": {"key": DESTINATION_NAMESPACE, "path": [{"key": DESTINATION_SERVED}]},
        "fallback_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.round_robin",
                        "typed_config": {"@type": f"{_HTTP}.load_balancing_policies.round_robin.v3.RoundRobin"},
                    }
                }
            ]
        },
    }
    name = "envoy.load_balancing_policies.override_host"
    return {
        "name": "pool",
        "connect_timeout": "1s",
        "load_balancing_policy": {"policies": [{"typed_extension_config": {"name": name, "typed_config": override}}]},
        "load_assignment": _assignment("pool", endpoints),
    }


def _picker(port: int) -> dict[str, Any]:
    options = {
        "@type": f"{_HTTP}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": "picker",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        "load_assignment": _assignment("picker", [f"127.0.0.1:{port}"]),
    }


def _assignment(name: str, endpoints: list[str]) -> dict[str, Any]:
    places = [each.rpartition(":") for each in endpoints]
    found = [{"endpoint": {"address": _address(host, int(port))}} for host, _, port in places]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": found}]}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
