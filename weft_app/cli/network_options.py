"""The network options of `weft up` as values of the configuration."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.address import MAX_PORT, is_loopback
from weft_app.cli.options import as_command

if TYPE_CHECKING:
    from weft_app.config.document import Document

JOIN_PORT = 7443


class TlsChoice(StrEnum):
    """Source of the HTTP API's certificate besides configured files."""

    AUTO = "auto"
    """The mesh issues it."""


class EdgeChoice(StrEnum):
    """What accepts the connections of callers."""

    NONE = "none"
    """The gateway itself."""
    ENVOY = "envoy"
    """An Envoy in front of it."""


class Discover(StrEnum):
    """Whether `weft up` serves what it finds."""

    ASK = "ask"
    YES = "yes"
    NO = "no"


_OPTIONS = {
    "host": "--host",
    "port": "--port",
    "grpc_port": "--grpc-port",
    "gateway.insecure": "--insecure",
    "gateway.tls.self_signed": "--tls auto",
    "announce.enabled": "--announce",
    "edge.proxy": "--edge",
    "relay.listen": "--join-port",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """The given options; None: not given."""

    host: Annotated[
        str | None,
        typer.Option(
            help="Address of the HTTP API. 0.0.0.0: all networks of this machine, with HTTPS, API keys and a relay."
        ),
    ] = None
    port: Annotated[
        int | None,
        typer.Option("--port", "-p", min=0, max=MAX_PORT, help="HTTP port; 0 picks a free one. Default 8080."),
    ] = None
    tls: Annotated[
        TlsChoice | None,
        typer.Option(
            "--tls", help="auto: HTTPS with the mesh's own certificate, even on loopback. Default on other addresses."
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Plain HTTP on other addresses than loopback: the network can read keys, prompts and answers.",
        ),
    ] = False
    join_port: Annotated[
        int | None,
        typer.Option(
            "--join-port",
            min=0,
            max=MAX_PORT,
            help=f"Port where runners of other machines join. Default with --host: {JOIN_PORT}.",
        ),
    ] = None
    announce: Annotated[
        bool | None,
        typer.Option(
            "--announce/--no-announce",
            help="Announce the mesh on the local network, for weft runner join and weft models discover. Default: off.",
            show_default=False,
        ),
    ] = None
    edge: Annotated[
        EdgeChoice | None,
        typer.Option("--edge", help="envoy: run Envoy in front of the gateway. Default: none."),
    ] = None
    grpc_port: Annotated[
        int | None, typer.Option("--grpc-port", min=0, max=MAX_PORT, help="Also offer gRPC on this loopback port.")
    ] = None

    def overrides(self) -> "Document":
        """Returns the values that override those of the files. Raises INVALID_ARGUMENT naming two that conflict."""
        if self.insecure and self.tls is not None:
            raise invalid_field(
                "--insecure",
                f"cannot be combined with --tls {self.tls}: omit --insecure for HTTPS with the mesh's certificate, or "
                "--tls for plain HTTP",
            )
        given: Document = {}
        for path, value in self._given().items():
            *sections, name = path.split(".")
            inner: Any = given
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
        return given

    def _given(self) -> dict[str, Any]:
        """Returns the given values by their paths in the configuration."""
        found = {
            "host": self.host,
            "port": self.port,
            "grpc_port": self.grpc_port,
            "gateway.insecure": self.insecure or None,
            "gateway.tls.self_signed": self.tls and True,
            "announce.enabled": self.announce,
            "edge.proxy": self.edge and self.edge.value,
            "relay.listen": None if self.join_port is None else self._listen(self.host or "127.0.0.1", self.join_port),
        }
        return {path: value for path, value in found.items() if value is not None}

    def with_relay(self, document: "Document", below: "Callable[[Document], Document]") -> "Document":
        """Applies `below` and adds the relay that --host opens for other machines."""
        # `weft up` prints its first line before it imports the configuration.
        from weft_app.config.document import given_by, value_of  # noqa: PLC0415
        from weft_app.config.loader import COMMAND_LINE  # noqa: PLC0415

        document = below(document)
        relay: Any = value_of(document.get("relay")) or {}
        if self.host is None or is_loopback(self.host) or not isinstance(relay, dict) or value_of(relay.get("listen")):
            return document
        listen = given_by(COMMAND_LINE, self._listen(self.host, JOIN_PORT))
        return {**document, "relay": {**relay, "listen": listen}}

    def option_of(self, field: str) -> str:
        """Returns the name of a setting for errors: its option if it was given."""
        return _OPTIONS.get(field, field) if field in self._given() else field

    @staticmethod
    def _listen(host: str, port: int) -> str:
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_network_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the parameter `network` of a command by the network options."""
    options = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(NetworkOptions)
    ]
    own = signature(command).parameters.values()
    parameters = [each for own_one in own for each in (options if own_one.name == "network" else [own_one])]

    def run(**arguments: Any) -> None:
        given = {each.name: arguments.pop(each.name) for each in options}
        command(**arguments, network=NetworkOptions(**given))

    return as_command(run, parameters, command.__doc__)
