"""HTTPS at the edge: a context that follows its files, and what an address needs before it is listened on."""

import ssl
from dataclasses import dataclass, field

from weft.kernel.errors import invalid_field
from weft.kernel.tls import TlsFiles, TlsSource


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTls:
    """The certificate of the edge."""

    files: TlsFiles
    """With a certificate and its key."""
    handshake_timeout_seconds: float = 10.0
    """How long a client may take to set TLS up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Where an HTTP surface listens, and what protects it there."""

    host: str
    port: int
    tls: EdgeTls | None = field(default=None)
    """None: plain HTTP."""
    has_keys: bool = False
    """Whether every caller needs a key."""
    tls_terminated_elsewhere: bool = False
    """Whether the operator says that a proxy in front speaks TLS with the callers."""

    def require_protection(self) -> None:
        """For an address that is not loopback. Raises INVALID_ARGUMENT naming every setting that is missing."""
        missing = []
        if not self.has_keys:
            missing.append("keys (auth.required: true)")
        if self.tls is None and not self.tls_terminated_elsewhere:
            missing.append(
                "TLS (gateway.tls.certificate_file and gateway.tls.key_file, or gateway.tls_terminated_elsewhere: true "
                "where a proxy in front speaks it)"
            )
        if missing:
            raise invalid_field("host", f"'{self.host}' is not a loopback address, which needs {' and '.join(missing)}")

    def context(self) -> ssl.SSLContext | None:
        """For the listener; None for plain HTTP. Raises INVALID_ARGUMENT naming a file that is wrong."""
        return None if self.tls is None else following_context(TlsSource(self.tls.files))


def following_context(source: TlsSource) -> ssl.SSLContext:
    """A context of a server whose every new handshake is with the files as they are by then."""
    if source.files.certificate_file is None:
        raise invalid_field(source.files.field("certificate_file"), "is missing")
    version, _ = source.current()
    newest = _context(source)

    def choose(connection: ssl.SSLObject, _name: str | None, _context_of: ssl.SSLContext) -> None:
        """Called at the first word of each client, whether it names a host or not."""
        nonlocal version, newest
        current, _ = source.current()
        if current != version:
            try:
                newest = _context(source)
            except (OSError, ValueError):
                # They changed again since they were checked; the next handshake finds what they have become.
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
    # A client that offers HTTP/2 alone is refused in the handshake rather than by a parser.
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(files.certificate_file, files.key_file)
    return context
