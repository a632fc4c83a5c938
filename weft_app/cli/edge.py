"""`weft config envoy`: the configuration of an Envoy that others run, from weft's own."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from weft.kernel.errors.error_tree import invalid_field
from weft_app.cli.background import arguments_of
from weft_app.cli.options import ConfigOption
from weft_app.cli.terminal import say
from weft_app.config.loader import load_config
from weft_app.edge.edge_document import edge_document, yaml_text
from weft_app.edge.plan import CertificateFiles, EdgePlan, endpoint_of

EDGE, RELAY = "edge", "relay"
LISTEN, GATEWAY = "127.0.0.1:8443", "127.0.0.1:8080"


def config(
    context: typer.Context,
    kind: Annotated[str, typer.Argument(metavar=EDGE, help="What Envoy is in front of: gateways.")] = EDGE,
    config: ConfigOption = None,
    *,
    listen: Annotated[str, typer.Option(help="Listen address.")] = LISTEN,
    gateway: Annotated[
        list[str] | None, typer.Option(help=f"Address of a gateway; repeatable. Default {GATEWAY}.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Path of the PEM chain on Envoy's host. Default: plain HTTP.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Path of the PEM key on Envoy's host.")] = None,
) -> None:
    """Print an Envoy configuration: its limits are those of weft.yaml (`edge`, `gateway.connections`).

    Example: weft config envoy edge --gateway gateway-1:8080 --gateway gateway-2:8080 > edge.yaml
    """
    if kind == RELAY:
        raise invalid_field("KIND", "relay was removed; use a copy of the file deploy/envoy/relay.yaml")
    if kind != EDGE:
        raise invalid_field("KIND", f"must be {EDGE}")
    if (certificate is None) != (key is None):
        missing = "--key" if key is None else "--certificate"
        raise invalid_field(missing, "is missing: a certificate needs its key, and a key its certificate")
    document = edge_document(
        EdgePlan(
            listen=endpoint_of(listen, "--listen"),
            gateways=tuple(endpoint_of(each, "--gateway") for each in gateway or (GATEWAY,)),
            limits=load_config(config).edge,
            certificate=CertificateFiles(certificate=str(certificate), key=str(key)) if certificate else None,
        )
    )
    words = arguments_of(context, without=frozenset({"kind", "config"}))
    say(yaml_text(document, f"weft config envoy {EDGE} {shlex.join(words)}".rstrip()))
