"""Fragments of Envoy's configuration: typed extensions, addresses, durations, endpoints."""

from collections.abc import Iterable
from typing import Any

from weft.kernel.address import is_address
from weft_app.edge.plan import Endpoint

Document = dict[str, Any]
"""A message of Envoy's configuration as JSON."""
_TYPES = "type.googleapis.com/envoy."


def message(kind: str, **fields: Any) -> Document:
    """Returns a message of type `Any`; `kind` is its full name after `envoy.`."""
    return {"@type": f"{_TYPES}{kind}", **fields}


def extension(name: str, kind: str, **fields: Any) -> Document:
    """Returns an extension with its typed configuration."""
    return {"name": name, "typed_config": message(kind, **fields)}


def duration(seconds: float) -> str:
    """Returns a duration in protobuf's JSON format."""
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def socket_address(endpoint: Endpoint) -> Document:
    """Returns a TCP address."""
    return {"socket_address": {"address": endpoint.host, "port_value": endpoint.port}}


def load_assignment(cluster: str, endpoints: Iterable[Endpoint]) -> Document:
    """Returns the endpoints of a cluster."""
    each = [{"endpoint": {"address": socket_address(endpoint)}} for endpoint in endpoints]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": each}]}


def static_cluster(name: str, endpoints: Iterable[Endpoint]) -> Document:
    """Returns the fields of a cluster of endpoints. Names are resolved repeatedly, addresses are not."""
    known = tuple(endpoints)
    kind = "STATIC" if all(is_address(each.host) for each in known) else "STRICT_DNS"
    return {"type": kind, "load_assignment": load_assignment(name, known)}


def file_source(path: str) -> Document:
    """Returns a configuration source: a file that Envoy reloads when another is moved into its place."""
    return {"resource_api_version": "V3", "path_config_source": {"path": path}}


def http_options(**protocol: Any) -> Document:
    """Returns the HTTP options of a cluster."""
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {name: message(name.removeprefix("envoy."), **protocol)}
