"""TLS from the configuration, for servers and clients."""

import os
from typing import Literal

from weft.kernel.errors import invalid_field
from weft.kernel.tls import ServerTls, read_material
from weft.kernel.tls_channel import ChannelSecurity
from weft_app.compose.auth import KeyCheck
from weft_app.compose.grpc_host import GrpcHost
from weft_app.config.config import WeftConfig

SERVICE_KEY_VARIABLE = "WEFT_SERVICE_KEY"
"""A key of the role `service`, for a service that has no certificate to show to the others."""


def channel_security(config: WeftConfig) -> ChannelSecurity:
    """The credentials and trust of this process as a client. Raises INVALID_ARGUMENT naming a file that is wrong."""
    section, files = config.tls, config.tls.files
    read_material(files)
    return ChannelSecurity(
        files=files,
        api_key=os.environ.get(SERVICE_KEY_VARIABLE, "").strip(),
        reload_interval_seconds=section.reload_interval_seconds,
    )


def server_tls(config: WeftConfig, service: Literal["registry", "router", "runner"]) -> ServerTls | None:
    """The certificate of a service and the clients that it admits; None without a certificate."""
    section = config.tls
    if section.certificate_file is None and section.key_file is None:
        return None
    if section.client_certificates == "required" and section.ca_file is None:
        raise invalid_field("tls.ca_file", "is missing: it vouches for the clients that are required")
    allowed: tuple[str, ...] = getattr(section.allowed_clients, service)
    requires_clients = section.ca_file is not None and section.client_certificates != "none"
    if allowed and not requires_clients:
        raise invalid_field(f"tls.allowed_clients.{service}", "needs tls.ca_file, and certificates that are required")
    return ServerTls(
        files=config.tls.files,
        requires_clients=requires_clients,
        allowed_clients=allowed,
        announced_host=section.announced_host or "",
    )


def new_host(
    config: WeftConfig, service: Literal["registry", "router", "runner"], keys: KeyCheck | None = None
) -> GrpcHost:
    """The gRPC server of a service, with TLS where the configuration has a certificate. `keys` admit its callers."""
    return GrpcHost(tls=server_tls(config, service), guard=None if keys is None else keys.interceptor())
