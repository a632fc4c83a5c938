"""What Envoy's configuration is made from: addresses, limits and certificates. Values only."""

from dataclasses import dataclass
from pathlib import Path

from weft.kernel.address import MAX_PORT
from weft.kernel.errors import invalid_field
from weft_app.config.config import EdgeSettings


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
class EdgePlan:
    """An Envoy in front of gateways."""

    listen: Endpoint
    """Port 0: any free one."""
    gateways: tuple[Endpoint, ...]
    limits: EdgeSettings
    certificate: CertificateFiles | Path | None = None
    """A path: a file of secrets that Envoy reads again when it is replaced. None: plain HTTP."""
    admin_socket: Path | None = None
    """Unix socket of Envoy's administration, which only this user reaches; None: no administration."""
