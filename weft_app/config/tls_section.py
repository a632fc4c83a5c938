"""TLS in the configuration file: between services, and at the HTTP edge."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from weft_app.config.config_section import Seconds, Section

PemFile = Annotated[Path, Field(strict=False)]
"""A PEM file; `~` is the home of the user."""
UriPattern = Annotated[str, Field(min_length=1, max_length=2048)]


class AllowedClients(Section):
    """Who may call a service: patterns for the URIs in their certificates, such as `weft://mesh/router-*`."""

    registry: tuple[UriPattern, ...] = Field(default=(), max_length=256, strict=False)
    """Who may call the registry. Default: whoever has a certificate."""
    router: tuple[UriPattern, ...] = Field(default=(), max_length=256, strict=False)
    """Who may call a router. Default: whoever has a certificate."""
    runner: tuple[UriPattern, ...] = Field(default=(), max_length=256, strict=False)
    """Who may call a runner. Default: whoever has a certificate."""


class TlsSection(Section):
    """TLS between services: for all gRPC that is not a Unix socket or loopback, and for `tls:` addresses."""

    certificate_file: PemFile | None = None
    """PEM chain that this process shows, to those who call it and to those it calls. It is read again when it changes,
    as all files here are."""
    key_file: PemFile | None = None
    """PEM key of the certificate, without a passphrase; nobody but its owner and group may read it."""
    ca_file: PemFile | None = None
    """PEM roots that vouch for other services. Default: the usual ones, and callers show no certificate."""
    client_certificates: Literal["required", "none"] | None = None
    """Whether callers must show a certificate that `ca_file` vouches for. Default: required where `ca_file` is set."""
    allowed_clients: AllowedClients = AllowedClients()
    """Which certificates may call which service."""
    reload_interval_seconds: Seconds = 5.0
    """How often a caller looks whether its files have changed. Servers look at every new connection."""
    announced_host: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """By what name or address others reach a service that listens on all addresses of this machine. It must be in its
    certificate. Default: the name of the machine."""


class EdgeTlsSection(Section):
    """HTTPS, TLS 1.2 and newer. Without a certificate the edge speaks plain HTTP, which it does on loopback only."""

    certificate_file: PemFile | None = None
    """PEM chain. It is read again when it changes, as its key is."""
    key_file: PemFile | None = None
    """PEM key of the certificate, without a passphrase; nobody but its owner and group may read it."""
    handshake_timeout_seconds: Seconds = 10.0
    """How long a client may take to set TLS up."""
