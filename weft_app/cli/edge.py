"""`weft edge`: configurations of an Envoy that others run, from weft's own."""

import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.kernel.errors import invalid_field
from weft_app.cli.options import ConfigOption, reporting
from weft_app.cli.output import say
from weft_app.config.config import WeftConfig
from weft_app.config.loader import load_config
from weft_app.edge.edge_document import edge_document
from weft_app.edge.fragments import Document
from weft_app.edge.plan import CertificateFiles, EdgePlan, Endpoint, endpoint_of
from weft_app.edge.relay_document import relay_document
from weft_app.edge.texts import EdgeKind, json_text, yaml_text

app = typer.Typer(
    help="Print the configuration of an Envoy in front of gateways or a relay.",
    epilog="Example: weft edge config edge --gateway gateway-1:8080 > edge.yaml",
    no_args_is_help=True,
)

LISTEN, RELAY_LISTEN = "127.0.0.1:8443", "127.0.0.1:7444"
GATEWAY, RELAY = "127.0.0.1:8080", "127.0.0.1:7443"


@app.callback()
def edge() -> None:
    """Print the configuration of an Envoy in front of gateways or a relay."""


class EdgeFormat(StrEnum):
    """Formats that Envoy reads."""

    YAML = "yaml"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The options, as they were given."""

    listen: str | None
    gateways: tuple[str, ...]
    relay: str | None
    certificate: Path | None
    key: Path | None

    def words(self) -> str:
        """Returns them as words of a command line."""
        pairs: list[tuple[str, object]] = [
            ("--listen", self.listen),
            *(("--gateway", each) for each in self.gateways),
            ("--relay", self.relay),
            ("--certificate", self.certificate),
            ("--key", self.key),
        ]
        return shlex.join(word for option, value in pairs if value is not None for word in (option, str(value)))

    def require_fitting(self, kind: EdgeKind) -> None:
        """Raises INVALID_ARGUMENT for an option that this kind has no use for."""
        uses = {
            "--gateway": (bool(self.gateways), EdgeKind.EDGE),
            "--certificate": (self.certificate is not None, EdgeKind.EDGE),
            "--key": (self.key is not None, EdgeKind.EDGE),
            "--relay": (self.relay is not None, EdgeKind.RELAY),
        }
        for option, (is_given, its_kind) in uses.items():
            if is_given and kind is not its_kind:
                raise invalid_field(option, f"goes with {its_kind} only")
        if (self.certificate is None) != (self.key is None):
            missing = "--key" if self.key is None else "--certificate"
            raise invalid_field(missing, "is missing: a certificate and its key come together")


@app.command("config")
def config(
    kind: Annotated[EdgeKind, typer.Argument(help="What the Envoy is in front of.", show_default=False)],
    config: ConfigOption = None,
    *,
    listen: Annotated[
        str | None,
        typer.Option("--listen", help=f"Where it listens. Default {LISTEN}, of a relay {RELAY_LISTEN}."),
    ] = None,
    gateway: Annotated[
        list[str] | None,
        typer.Option("--gateway", help=f"Address of a gateway; may be repeated. Default {GATEWAY}."),
    ] = None,
    relay: Annotated[str | None, typer.Option("--relay", help=f"Address of the relay. Default {RELAY}.")] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="PEM chain, as Envoy finds it. Default: plain HTTP.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="PEM key of the certificate, as Envoy finds it.")] = None,
    output: Annotated[EdgeFormat, typer.Option("--output", "-o", help="Output format.")] = EdgeFormat.YAML,
) -> None:
    """Print an Envoy configuration: its limits are those of weft.yaml (`edge`, `gateway.connections`).

    Example: weft edge config edge --gateway gateway-1:8080 --gateway gateway-2:8080 > edge.yaml
    """
    given = _Given(
        listen=listen,
        gateways=tuple(gateway or ()),
        relay=relay,
        certificate=certificate,
        key=key,
    )
    with reporting():
        given.require_fitting(kind)
        document = _document(kind, given, load_config(config))
        if output is EdgeFormat.JSON:
            say(json_text(document))
        else:
            made_by = f"weft edge config {kind.value} {given.words()}".rstrip()
            say(yaml_text(document, kind, made_by))


def _document(kind: EdgeKind, given: _Given, config: WeftConfig) -> Document:
    if kind is EdgeKind.RELAY:
        listen = _endpoint(given.listen, RELAY_LISTEN, "--listen")
        return relay_document(listen, _endpoint(given.relay, RELAY, "--relay"))
    files = None
    if given.certificate is not None and given.key is not None:
        files = CertificateFiles(certificate=str(given.certificate), key=str(given.key))
    plan = EdgePlan(
        listen=_endpoint(given.listen, LISTEN, "--listen"),
        gateways=tuple(_endpoint(each, each, "--gateway") for each in given.gateways or (GATEWAY,)),
        limits=config.edge,
        certificate=files,
    )
    return edge_document(plan)


def _endpoint(text: str | None, default: str, option: str) -> Endpoint:
    return endpoint_of(default if text is None else text, option)
