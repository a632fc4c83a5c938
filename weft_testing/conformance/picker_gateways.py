"""Gateways as endpoint pickers see them: how each sends a request, and what it does with the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from weft.api.envoy.v1.external_processor_pb2 import BodySendMode

FULL_DUPLEX: Final = BodySendMode.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
NONE: Final = BodySendMode.BODY_SEND_MODE_UNSPECIFIED

MAX_CHUNK_BYTES: Final = 65_535
"""A chunk of a body that a picker returns is smaller than 64 KiB, which is where Envoy's limit is."""


class GatewayName(StrEnum):
    """A gateway that the suite can play."""

    LLM_D = "llm-d"
    ISTIO = "istio"
    ENVOY_AI_GATEWAY = "envoy-ai-gateway"
    AGENTGATEWAY = "agentgateway"
    WEFT = "weft"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayProfile:
    """What one gateway does on its streams to a picker."""

    name: GatewayName
    summary: str
    response_body_mode: BodySendMode.ValueType = FULL_DUPLEX
    """UNSPECIFIED: responses never come to the picker, not even their headers, and the stream ends with the request."""
    sends_protocol_config: bool = True
    chunk_bytes: int = 16_384
    """The largest chunk of a body that it sends."""
    ends_with_empty_chunk: bool = False
    """The end of a body is a chunk of its own; else it is marked in the last chunk with bytes."""
    forwards_metadata: bool = True
    """It sends `metadata_context`, empty where there is nothing to say."""
    headers: tuple[tuple[str, str], ...] = ()
    """Headers that it adds to those of the caller."""
    attributes: tuple[tuple[str, str], ...] = ()
    max_destinations: int | None = None
    """The most endpoints that its parser takes in a destination; None: any number."""
    writes_log: bool = False
    """It writes the end of each request into an access log of the picker."""
    shed_status: int = 429
    """Status of a request that is dropped: 429 by the protocol; weft's own Envoy passes on what weft's gateway says."""
    reports_served: bool = True
    """It names the endpoint that served, in the metadata of the response."""

    @property
    def sees_responses(self) -> bool:
        """Whether responses go through the picker."""
        return self.response_body_mode != NONE


_ENVOY_HEADERS = (
    ("x-forwarded-proto", "http"),
    ("x-request-id", "6b1ea8a5-8f3a-4a8e-9d0e-5f1e2d3c4b5a"),
)

LLM_D = GatewayProfile(
    name=GatewayName.LLM_D,
    summary="Envoy beside the picker, both bodies in full duplex, trailers, destination by header",
    headers=_ENVOY_HEADERS,
)
ISTIO = GatewayProfile(
    name=GatewayName.ISTIO,
    summary="Envoy of Istio, both bodies in full duplex, destination by override host",
    headers=(*_ENVOY_HEADERS, ("x-envoy-decorator-operation", "pool-ip-1.default.svc.cluster.local:54321/*")),
    attributes=(("xds.route_name", "default.route.0"),),
)
ENVOY_AI_GATEWAY = GatewayProfile(
    name=GatewayName.ENVOY_AI_GATEWAY,
    summary="Envoy with a filter of its own before the picker, which adds headers; both bodies in full duplex",
    headers=(*_ENVOY_HEADERS, ("x-ai-eg-model", "any"), ("x-envoy-original-path", "/v1/chat/completions")),
    attributes=(("xds.route_name", "httproute/default/route/rule/0"), ("xds.cluster_name", "pool")),
)
AGENTGATEWAY = GatewayProfile(
    name=GatewayName.AGENTGATEWAY,
    summary="a gateway of its own in Rust, both bodies in full duplex; it takes one destination only",
    chunk_bytes=8_192,
    ends_with_empty_chunk=True,
    forwards_metadata=False,
    max_destinations=1,
)
WEFT = GatewayProfile(
    name=GatewayName.WEFT,
    summary="Envoy as weft configures it: the request in full duplex, no response",
    response_body_mode=NONE,
    headers=_ENVOY_HEADERS,
    writes_log=True,
    shed_status=503,
    reports_served=False,
)

GATEWAYS: Mapping[GatewayName, GatewayProfile] = MappingProxyType(
    {each.name: each for each in (LLM_D, ISTIO, ENVOY_AI_GATEWAY, AGENTGATEWAY, WEFT)}
)
"""All profiles by name."""
