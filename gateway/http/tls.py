"""TLS of the HTTP server: a context that reloads its certificate when the files change."""

import ssl

from gateway.gateway_config import Exposure
from weft.kernel.channels.tls import TlsSource
from weft.kernel.errors.error_tree import invalid_field


def server_context(exposure: Exposure) -> ssl.SSLContext | None:
    """Returns the TLS context of a listener, None for plain HTTP. Raises INVALID_ARGUMENT naming a wrong file."""
    if exposure.tls is None or exposure.tls_context is not None:
        return exposure.tls_context
    return following_context(TlsSource(exposure.tls.files))


def following_context(source: TlsSource) -> ssl.SSLContext:
    """Returns a server context that uses the current certificate files for each new handshake."""
    if source.files.certificate_file is None:
        raise invalid_field(source.files.field("certificate_file"), "is missing")
    version, _ = source.current()
    newest = _context(source)

    def choose(connection: ssl.SSLObject, _name: str | None, _context_of: ssl.SSLContext) -> None:
        """Called at each ClientHello, with or without a server name."""
        nonlocal version, newest
        current, _ = source.current()
        if current != version:
            try:
                newest = _context(source)
            except (OSError, ValueError):
                # The files changed again after the check; the next handshake retries.
                pass
            else:
                version = current
        connection.context = newest

    newest.sni_callback = choose
    return newest


def _context(source: TlsSource) -> ssl.SSLContext:
    files = source.files
    assert files.certificate_file is not None, "checked by its reader"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Clients that offer only HTTP/2 are refused in the handshake, not by a parser.
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.certificate_file, files.key_file)
    return context
