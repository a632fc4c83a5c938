"""What Envoy's configuration is made from: addresses, limits and certificates. Values only."""

from dataclasses import dataclass
from pathlib import Path

from weft.kernel.address import MAX_PORT
from weft.kernel.errors import invalid_field
from weft_app.config.config import WeftConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A TCP address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def endpoint_of(text: str, field: str) -> Endpoint:
    """Returns the endpoint that a text such as `gateway-1:8080` or `[::1]:8080` names. Raises INVALID_ARGUMENT."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (separator and host and port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        raise invalid_field(field, f"{text[:64]!r} is no address such as gateway-1:8080")
    return Endpoint(host=host, port=int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """The certificate of the listener: PEM files, which Envoy reads at its start."""

    certificate: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedCertificate:
    """The certificate of the listener: a file of secrets that Envoy reads again when it is replaced."""

    file: Path


ServerCertificate = CertificateFiles | FollowedCertificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Admin:
    """Where Envoy's administration listens: a Unix socket that only this user reaches."""

    socket: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLimits:
    """Limits of the listener and of the ways behind it; defaults and meanings are those of the settings."""

    max_connections: int
    max_requests_per_second: int
    max_requests: int


def limits_of(config: WeftConfig) -> EdgeLimits:
    """Returns the limits that a configuration sets."""
    edge = config.edge
    return EdgeLimits(
        max_connections=edge.max_connections,
        max_requests_per_second=edge.max_requests_per_second,
        max_requests=edge.max_requests,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgePlan:
    """An Envoy in front of gateways."""

    listen: Endpoint
    """Port 0: any free one."""
    gateways: tuple[Endpoint, ...]
    limits: EdgeLimits
    certificate: ServerCertificate | None = None
    """None: plain HTTP."""
    admin: Admin | None = None
    """None: no administration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlan:
    """An Envoy in front of a router's relay."""

    listen: Endpoint
    relay: Endpoint
