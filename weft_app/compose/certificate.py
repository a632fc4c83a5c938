"""Certificates that this machine makes for its listeners, and those of the operator: chain, key and fingerprint."""

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.file_replacement import replace_file
from weft.kernel.missing_package import missing_package
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

SELF_SIGNED_DAYS = 3650
CLOCK_SKEW_DAYS = 1
SELF_SIGNED_NAME = "weft-relay"
MAX_ALTERNATIVE_NAMES = 128
_PEM_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCertificate:
    """A certificate chain and its key, both PEM."""

    chain: bytes
    key: bytes = field(repr=False)
    is_self_signed: bool

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the server's own certificate, as `sha256:<hex>`."""
        return fingerprint_of_pem(self.chain)

    def credentials(self) -> grpc.ServerCredentials:
        """Returns them as credentials of a gRPC server."""
        return grpc.ssl_server_credentials([(self.key, self.chain)])


def fingerprint_of(der: bytes) -> str:
    """Returns the fingerprint of a certificate, as `sha256:<hex>`."""
    return f"sha256:{sha256(der).hexdigest()}"


def fingerprint_of_pem(chain: bytes) -> str:
    """Returns the fingerprint of the first certificate of a PEM chain, as `sha256:<hex>`."""
    text = chain.decode("ascii")
    first = text[: text.index(_PEM_END) + len(_PEM_END)]
    return fingerprint_of(ssl.PEM_cert_to_DER_cert(first[first.index("-----BEGIN") :]))


def certificate_from_files(certificate_file: Path, key_file: Path) -> ServerCertificate:
    """Returns the operator's certificate of the relay. Raises INVALID_ARGUMENT naming the invalid file."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate_file, key_file)
        return ServerCertificate(chain=certificate_file.read_bytes(), key=key_file.read_bytes(), is_self_signed=False)
    except ssl.SSLError as error:
        raise invalid_field("relay.certificate_file", "and relay.key_file are not a PEM chain and its key") from error
    except OSError as error:
        raise invalid_field("relay.certificate_file", f"or relay.key_file cannot be read: {error.strerror}") from error


def self_signed_certificate(folder: Path, names: Sequence[str], now: datetime | None = None) -> ServerCertificate:
    """Returns the relay's certificate in `folder`, made on first use; its fingerprint changes only with the folder.

    Raises INVALID_ARGUMENT when its files are damaged: a new one would lock out every runner that pins it.
    """
    certificate_file, key_file = folder / "cert.pem", folder / "key.pem"
    try:
        # The certificate is written last: a key without one is left over from a start that was interrupted.
        if not certificate_file.exists():
            require_cryptography("name relay.certificate_file and relay.key_file")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            issued = issue(
                SELF_SIGNED_NAME,
                [SELF_SIGNED_NAME, *names, socket.gethostname(), "localhost", "127.0.0.1", "::1"],
                valid_until=(now or datetime.now(UTC)) + timedelta(days=SELF_SIGNED_DAYS),
                now=now or datetime.now(UTC),
            )
            replace_file(key_file, issued.key_pem)
            replace_file(certificate_file, issued.certificate_pem)
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate_file, key_file)
        return ServerCertificate(chain=certificate_file.read_bytes(), key=key_file.read_bytes(), is_self_signed=True)
    except OSError as error:  # ssl.SSLError is one, too
        raise damaged_certificate("the relay's", certificate_file, key_file, error) from error


def damaged_certificate(whose: str, certificate_file: Path, key_file: Path, error: Exception) -> WeftError:
    """Returns the error for files that this machine made and that cannot be used any more."""
    why = "they are not a certificate and its key"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        why = str(error.strerror)
    return WeftError(
        Reason.INVALID_ARGUMENT,
        f"{whose} {certificate_file} and {key_file.name} cannot be used: {why}; restore both from a backup, or "
        "delete both for a new certificate, whose fingerprint every client then has to be given",
    )


def require_cryptography(alternative: str) -> None:
    """Checks that certificates can be made here. Raises INVALID_ARGUMENT with the remedy."""
    try:
        import cryptography  # noqa: F401, PLC0415 - an optional package
    except ImportError as error:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            missing_package("a certificate of its own needs", "cryptography") + f"; or {alternative}",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCertificate:
    """A certificate with its private key."""

    certificate: "x509.Certificate"
    key: "EllipticCurvePrivateKey" = field(repr=False)

    @property
    def certificate_pem(self) -> bytes:
        """The certificate as PEM."""
        from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415 - an optional package

        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The key as PEM, without a passphrase."""
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - an optional package

        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def issue(
    common_name: str,
    names: Sequence[str],
    *,
    now: datetime,
    valid_until: datetime,
    issuer: IssuedCertificate | None = None,
    key: "EllipticCurvePrivateKey | None" = None,
    is_authority: bool = False,
) -> IssuedCertificate:
    """Returns a certificate for names and addresses, of `issuer` or self-signed, and its key: `key` or a new one."""
    from cryptography import x509  # noqa: PLC0415 - an optional package
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=CLOCK_SKEW_DAYS))
        .not_valid_after(valid_until)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )
    if names:
        alternatives = [_alternative(x509, name) for name in list(dict.fromkeys(names))[:MAX_ALTERNATIVE_NAMES]]
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    if is_authority or issuer is not None:
        # Verifiers that follow RFC 5280 strictly, as Python 3.13 does, ask for these of an authority and its issues.
        builder = _with_key_identifiers(x509, builder, key, issuer)
    if is_authority:
        builder = builder.add_extension(_authority_usage(x509), critical=True)
    signer = key if issuer is None else issuer.key
    return IssuedCertificate(certificate=builder.sign(signer, hashes.SHA256()), key=key)


def _with_key_identifiers(x509: Any, builder: Any, key: Any, issuer: IssuedCertificate | None) -> Any:
    signer = key if issuer is None else issuer.key
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
    )


def _authority_usage(x509: Any) -> Any:
    return x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(x509: Any, name: str) -> Any:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
