"""Input of Envoy's configuration: addresses, limits and certificates. Values only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.address import MAX_PORT
from weft_app.config.config import EdgeSettings

Document = dict[str, Any]
"""A message of Envoy's configuration as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A TCP address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def endpoint_of(text: str, field: str) -> Endpoint:
    """Parses text such as `gateway-1:8080` or `[::1]:8080`. Raises INVALID_ARGUMENT."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (separator and host and port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        raise invalid_field(field, f"{text[:64]!r} is no address such as gateway-1:8080")
    return Endpoint(host=host, port=int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFiles:
    """The listener's certificate as PEM files, which Envoy reads at its start."""

    certificate: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgePlan:
    """An Envoy in front of gateways."""

    listen: Endpoint
    """Port 0 selects a free one."""
    gateways: tuple[Endpoint, ...]
    limits: EdgeSettings
    certificate: CertificateFiles | Path | None = None
    """A path is a file of secrets that Envoy reloads when it is replaced. None: plain HTTP."""
    admin_socket: Path | None = None
    """Unix socket of Envoy's admin API, accessible only to this user; None: no admin API."""
