"""The section of the configuration file about keys."""

from weft_app.config.config_section import Section


class AuthSection(Section):
    """Whether callers need keys; `weft keys create` makes them."""

    required: bool | None = None
    """Over HTTP, and over gRPC from anywhere but the sockets of this machine. Default: where `host` is no loopback
    address, or TLS ends in a proxy. Services of the mesh show a certificate instead, or a key of the role `service` in
    WEFT_SERVICE_KEY."""
