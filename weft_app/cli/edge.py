"""`weft config envoy`: configurations of an Envoy that others run, from weft's own."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from weft.kernel.errors import invalid_field
from weft_app.cli.background import arguments_of
from weft_app.cli.options import ConfigOption
from weft_app.cli.output import say
from weft_app.config.loader import load_config
from weft_app.edge.edge_document import edge_document
from weft_app.edge.plan import CertificateFiles, EdgePlan, endpoint_of
from weft_app.edge.relay_document import relay_document
from weft_app.edge.texts import EdgeKind, json_text, yaml_text

LISTEN, RELAY_LISTEN = "127.0.0.1:8443", "127.0.0.1:7444"
GATEWAY, RELAY = "127.0.0.1:8080", "127.0.0.1:7443"


def config(
    context: typer.Context,
    kind: Annotated[EdgeKind, typer.Argument(help="What Envoy is in front of.", show_default=False)],
    config: ConfigOption = None,
    *,
    listen: Annotated[
        str | None, typer.Option(help=f"Listen address. Default {LISTEN}; for a relay {RELAY_LISTEN}.")
    ] = None,
    gateway: Annotated[
        list[str] | None, typer.Option(help=f"Address of a gateway; repeatable. Default {GATEWAY}.")
    ] = None,
    relay: Annotated[str | None, typer.Option(help=f"Address of the relay. Default {RELAY}.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="Path of the PEM chain on Envoy's host. Default: plain HTTP.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Path of the PEM key on Envoy's host.")] = None,
    output: Annotated[Literal["yaml", "json"], typer.Option("--output", "-o", help="Output format.")] = "yaml",
) -> None:
    """Print an Envoy configuration: its limits are those of weft.yaml (`edge`, `gateway.connections`).

    Example: weft config envoy edge --gateway gateway-1:8080 --gateway gateway-2:8080 > edge.yaml
    """
    for option, is_given, fitting in (
        ("--gateway", bool(gateway), EdgeKind.EDGE),
        ("--certificate", certificate is not None, EdgeKind.EDGE),
        ("--key", key is not None, EdgeKind.EDGE),
        ("--relay", relay is not None, EdgeKind.RELAY),
    ):
        if is_given and kind is not fitting:
            raise invalid_field(option, f"is only for {fitting}")
    if (certificate is None) != (key is None):
        missing = "--key" if key is None else "--certificate"
        raise invalid_field(missing, "is missing: a certificate needs its key, and a key its certificate")
    loaded = load_config(config)
    if kind is EdgeKind.RELAY:
        relayed = endpoint_of(RELAY if relay is None else relay, "--relay")
        document = relay_document(endpoint_of(RELAY_LISTEN if listen is None else listen, "--listen"), relayed)
    else:
        document = edge_document(
            EdgePlan(
                listen=endpoint_of(LISTEN if listen is None else listen, "--listen"),
                gateways=tuple(endpoint_of(each, "--gateway") for each in gateway or (GATEWAY,)),
                limits=loaded.edge,
                certificate=CertificateFiles(certificate=str(certificate), key=str(key)) if certificate else None,
            )
        )
    if output == "json":
        say(json_text(document))
    else:
        words = arguments_of(context, without=frozenset({"kind", "config", "output"}))
        say(yaml_text(document, kind, f"weft config envoy {kind.value} {shlex.join(words)}".rstrip()))
