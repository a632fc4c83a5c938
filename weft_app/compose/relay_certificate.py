"""The relay's certificate: the operator's, or a self-signed one that runners pin by its fingerprint."""

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.file_replacement import replace_file
from weft.kernel.reasons import Reason

SELF_SIGNED_DAYS = 3650
CLOCK_SKEW_DAYS = 1
SELF_SIGNED_NAME = "weft-relay"
_PEM_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayCertificate:
    """A certificate chain and its key, both PEM."""

    chain: bytes
    key: bytes = field(repr=False)
    is_self_signed: bool

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the server's own certificate, as `sha256:<hex>`."""
        text = self.chain.decode("ascii")
        first = text[: text.index(_PEM_END) + len(_PEM_END)]
        return fingerprint_of(ssl.PEM_cert_to_DER_cert(first[first.index("-----BEGIN") :]))

    def credentials(self) -> grpc.ServerCredentials:
        """Returns them as credentials of a gRPC server."""
        return grpc.ssl_server_credentials([(self.key, self.chain)])


def fingerprint_of(der: bytes) -> str:
    """Returns the fingerprint of a certificate, as `sha256:<hex>`."""
    return f"sha256:{sha256(der).hexdigest()}"


def certificate_from_files(certificate_file: Path, key_file: Path) -> RelayCertificate:
    """Returns the operator's certificate. Raises INVALID_ARGUMENT naming the invalid file."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate_file, key_file)
        return RelayCertificate(chain=certificate_file.read_bytes(), key=key_file.read_bytes(), is_self_signed=False)
    except ssl.SSLError as error:
        raise invalid_field("relay.certificate_file", "and relay.key_file are not a PEM chain and its key") from error
    except OSError as error:
        raise invalid_field("relay.certificate_file", f"or relay.key_file cannot be read: {error.strerror}") from error


def self_signed_certificate(folder: Path, names: Sequence[str]) -> RelayCertificate:
    """Returns the certificate in `folder`, made on first use; its fingerprint changes only when the folder is lost.

    Raises INVALID_ARGUMENT when its files are damaged: a new one would lock out every runner that pins it.
    """
    certificate_file, key_file = folder / "cert.pem", folder / "key.pem"
    try:
        # The certificate is written last: a key without one is left over from a start that was interrupted.
        if not certificate_file.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            chain, key = _make_self_signed(names)
            replace_file(key_file, key)
            replace_file(certificate_file, chain)
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate_file, key_file)
        return RelayCertificate(chain=certificate_file.read_bytes(), key=key_file.read_bytes(), is_self_signed=True)
    except OSError as error:  # ssl.SSLError is one, too
        why = "they are not a certificate and its key" if isinstance(error, ssl.SSLError) else error.strerror
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"the relay's {certificate_file} and {key_file.name} cannot be used: {why}; restore both from a backup, or "
            "delete both for a new certificate, whose fingerprint every runner then has to join with",
        ) from error


def _make_self_signed(names: Sequence[str]) -> tuple[bytes, bytes]:
    """Returns a certificate and its key, both PEM."""
    try:
        from cryptography import x509  # noqa: PLC0415 - an optional package
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    except ImportError as error:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            "a self-signed certificate needs the package cryptography; install weft[relay], "
            "or name relay.certificate_file and relay.key_file",
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, SELF_SIGNED_NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=CLOCK_SKEW_DAYS))
        .not_valid_after(now + timedelta(days=SELF_SIGNED_DAYS))
        .add_extension(
            x509.SubjectAlternativeName([_alternative(x509, name) for name in _all_names(names)]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    return certificate.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)


def _all_names(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([SELF_SIGNED_NAME, *names, socket.gethostname(), "localhost", "127.0.0.1", "::1"]))


def _alternative(x509: Any, name: str) -> Any:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
