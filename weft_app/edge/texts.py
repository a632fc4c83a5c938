"""Envoy's configuration as text: JSON, or YAML with comments for changes."""

import json
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import yaml

from weft_app.edge.fragments import Document


class EdgeKind(StrEnum):
    """What an Envoy is in front of."""

    EDGE = "edge"
    """Gateways: every request goes to one of them."""
    RELAY = "relay"
    """The relay of a router, where runners join."""


_IN_FRONT_OF_GATEWAYS = """\
  stream_idle_timeout 0s, timeout 0s       an answer may wait in a queue for minutes, and stream for as long; the
                                           gateway has the limits of requests and keeps silent streams alive
  no compression, no buffer filter         events of a stream leave as they come
  retry only connect-failure,              such a request has reached no gateway; any other must not be sent twice
    refused-stream, reset-before-request
  per_connection_buffer_limit_bytes        memory of one connection; a slow reader holds back its gateway, not this
                                           proxy
  max_connections, max_requests            what is over them is refused immediately
  health check of /readyz (several         a gateway that drains or has no router gets nothing new; running streams go
    gateways)                              on. If most are unready, all are asked: their 503 names the reason
  idle_timeout of the cluster              shorter than the gateway's, or a request meets a connection that just closes
  local_reply_config                       what this proxy answers itself has the mesh's error envelope

Gateways behind it have gateway.tls_terminated_elsewhere: true, and the names of callers in gateway.allowed_hosts. The
way from here to them is plain HTTP: it must be a private network."""

_COMMENTS = MappingProxyType(
    {
        EdgeKind.EDGE: f"""\
The edge of a mesh: TLS, limits, and the gateways behind it.

{_IN_FRONT_OF_GATEWAYS}""",
        EdgeKind.RELAY: """\
Runners join through this Envoy: HTTP/2 in, HTTP/2 out to the relay of a router.

A link is one gRPC stream that lasts for days. What matters here:
  timeout: 0s, stream_idle_timeout: 0s   a route's usual 15 s, or 5 min of silence, would cut the link
  no retry policy                        a stream cannot be sent twice; runners dial again automatically
  http2_protocol_options on both sides   gRPC needs HTTP/2 all the way
  idle_timeout: 0s upstream              the connection to the relay stays while its links do
  connection_keepalive 10s               a peer that is gone without a word is noticed within 20 s; more often than
                                         every 3.3 s, the relay ends the connection with too_many_pings
In front of the internet add TLS to the listener (a transport_socket with DownstreamTlsContext, alpn_protocols: [h2]);
runners then join with https:// and check that certificate. The relay itself may stay on loopback, without TLS.""",
    }
)


class _Dumper(yaml.SafeDumper):
    """Writes YAML without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Returns True."""
        del data
        return True


def yaml_text(document: Document, kind: EdgeKind, made_by: str) -> str:
    """Returns YAML with comments that name the command that made it and explain its settings."""
    lines = [f"Made by: {made_by}", *_COMMENTS[kind].splitlines()]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return comment + yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


def json_text(document: Document) -> str:
    """Returns JSON, which Envoy reads as well."""
    return json.dumps(document, indent=2) + "\n"
