"""Certificates that this machine issues: a self-signed one for its relay, and one by the home's CA for its HTTP edge.

Import this module only to create or read certificates: `cryptography` needs 6 MB of memory.
"""

import socket
import ssl
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.gateway_config import EdgeTls
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.machine.file_replacement import lock_file, replace_file
from weft_app.compose.certificate import ServerCertificate, damaged_certificate, fingerprint_of_pem
from weft_app.compose.machine import certifiable, this_machine

SELF_SIGNED_DAYS = 3650
SELF_SIGNED_NAME = "weft-relay"
CLOCK_SKEW_DAYS = 1
MAX_ALTERNATIVE_NAMES = 128
AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 397
"""Maximum that browsers accept."""
RENEW_BEFORE_DAYS = 30
LOCK_NAME = "lock"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCertificate:
    """A certificate with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def certificate_pem(self) -> bytes:
        """The certificate as PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        """The key without a passphrase."""
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def names(self) -> frozenset[str]:
        """DNS names and IP addresses of the certificate."""
        try:
            found = self.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return frozenset()
        return frozenset(str(each.value) for each in found)

    def why_due(self, names: Collection[str], now: datetime) -> str:
        """Returns why the certificate must be replaced; empty if it can stay. Surplus names are no reason."""
        if now >= self.certificate.not_valid_after_utc - timedelta(days=RENEW_BEFORE_DAYS):
            return "it expires soon"
        if now < self.certificate.not_valid_before_utc:
            return "it is not valid yet"
        missing = sorted(set(names) - self.names)
        return f"this machine is now also called {', '.join(missing)}" if missing else ""


def issue(
    common_name: str,
    names: Sequence[str],
    *,
    now: datetime,
    valid_until: datetime,
    issuer: IssuedCertificate | None = None,
    key: ec.EllipticCurvePrivateKey | None = None,
    is_authority: bool = False,
) -> IssuedCertificate:
    """Issues a certificate for names and addresses, signed by `issuer` or itself. `key` defaults to a new one."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    signer = key if issuer is None else issuer.key
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
        alternatives = [_alternative(name) for name in list(dict.fromkeys(names))[:MAX_ALTERNATIVE_NAMES]]
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    if is_authority or issuer is not None:
        # Strict RFC 5280 verifiers, such as Python 3.13, require both key identifiers.
        own, above = x509.SubjectKeyIdentifier, x509.AuthorityKeyIdentifier
        builder = builder.add_extension(own.from_public_key(key.public_key()), critical=False)
        builder = builder.add_extension(above.from_issuer_public_key(signer.public_key()), critical=False)
    if is_authority:
        builder = builder.add_extension(_AUTHORITY_USAGE, critical=True)
    return IssuedCertificate(certificate=builder.sign(signer, hashes.SHA256()), key=key)


_AUTHORITY_USAGE = x509.KeyUsage(
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


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def read_issued(certificate_file: Path, key_file: Path) -> IssuedCertificate:
    """Reads a certificate and its key. Raises OSError, ValueError or TypeError for invalid files."""
    certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ValueError("the key is another one's")
    return IssuedCertificate(certificate=certificate, key=key)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Creates and locks a folder: several processes of a home may issue a certificate in it. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("w") as lock:
        lock_file(lock, waits=True)
        yield


def self_signed_certificate(folder: Path, names: Sequence[str], now: datetime | None = None) -> ServerCertificate:
    """Returns the relay's certificate in `folder`, issued on first use, so that its fingerprint stays the same.

    Raises INVALID_ARGUMENT for damaged files: a new certificate would lock out every runner that pins the old one.
    """
    certificate_file, key_file = folder / "cert.pem", folder / "key.pem"
    try:
        # The certificate is written last: a key without one is left over from an interrupted start.
        if not certificate_file.exists():
            with _alone_in(folder):
                _issue_self_signed(certificate_file, key_file, names, now or datetime.now(UTC))
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate_file, key_file)
        return ServerCertificate(chain=certificate_file.read_bytes(), key=key_file.read_bytes(), is_self_signed=True)
    except OSError as error:  # ssl.SSLError is one, too
        raise damaged_certificate("the relay's", certificate_file, key_file, error) from error


def _issue_self_signed(certificate_file: Path, key_file: Path, names: Sequence[str], now: datetime) -> None:
    if certificate_file.exists():
        return
    issued = issue(
        SELF_SIGNED_NAME,
        certifiable((SELF_SIGNED_NAME, *names, socket.gethostname(), *LOCAL_NAMES)),
        valid_until=now + timedelta(days=SELF_SIGNED_DAYS),
        now=now,
    )
    replace_file(key_file, issued.key_pem)
    replace_file(certificate_file, issued.certificate_pem)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCertificate:
    """Files of the HTTP edge's certificate and its authority, all under the home."""

    folder: Path

    @property
    def authority_file(self) -> Path:
        """PEM certificate of the authority, for clients to trust."""
        return self.folder / "ca.pem"

    @property
    def files(self) -> EdgeTls:
        """The settings that name the certificate and its key."""
        return EdgeTls(
            certificate_file=self._certificate_file, key_file=self._key_file, authority_file=self.authority_file
        )

    @property
    def _certificate_file(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def _key_file(self) -> Path:
        return self.folder / "key.pem"

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the authority, as `sha256:<hex>`."""
        return fingerprint_of_pem(self.authority_file.read_bytes())

    def prepare(self, names: Sequence[str], now: datetime) -> str:
        """Issues what is missing or due, and returns why; empty if nothing was. Raises INVALID_ARGUMENT for damage."""
        names = tuple(dict.fromkeys((*LOCAL_NAMES, *names)))
        with _alone_in(self.folder):
            authority = self._authority(now)
            held = self._held(authority)
            why = "there is none yet" if held is None else held.why_due(names, now)
            if why:
                self._issue(authority, names, now, held)
        return why

    def held_authority(self) -> IssuedCertificate | None:
        """Returns the authority; None if there is none yet. Raises INVALID_ARGUMENT for damaged files."""
        try:
            # The certificate is written last: a key without one is left over from an interrupted start.
            exists = self.authority_file.exists()
            return read_issued(self.authority_file, self.folder / "ca.key") if exists else None
        except (OSError, ValueError, TypeError) as error:
            raise self.damaged(error) from error

    def damaged(self, error: Exception) -> WeftError:
        """Returns the error for damaged files of the authority."""
        return damaged_certificate("the mesh's", self.authority_file, self.folder / "ca.key", error)

    def _authority(self, now: datetime) -> IssuedCertificate:
        held = self.held_authority()
        if held is not None and now < held.certificate.not_valid_after_utc - timedelta(days=RENEW_BEFORE_DAYS):
            return held
        name = f"weft of {(*this_machine().names, 'this machine')[0]}"[:64]
        until = now + timedelta(days=AUTHORITY_DAYS)
        made = issue(name, (), now=now, valid_until=until, is_authority=True)
        replace_file(self.folder / "ca.key", made.key_pem)
        replace_file(self.authority_file, made.certificate_pem)
        return made

    def _held(self, authority: IssuedCertificate) -> IssuedCertificate | None:
        """Returns the certificate in use; None if this authority has issued none that can be read."""
        try:
            held = read_issued(self._certificate_file, self._key_file)
            held.certificate.verify_directly_issued_by(authority.certificate)
        except (OSError, ValueError, TypeError, InvalidSignature):
            # Any damage is harmless: clients trust the authority, so a new certificate can replace this one.
            return None
        return held

    def _issue(
        self, authority: IssuedCertificate, names: Sequence[str], now: datetime, held: IssuedCertificate | None
    ) -> None:
        until = min(now + timedelta(days=CERTIFICATE_DAYS), authority.certificate.not_valid_after_utc)
        key = None if held is None else held.key
        made = issue("weft", names, now=now, valid_until=until, issuer=authority, key=key)
        if key is None:
            replace_file(self._key_file, made.key_pem)
        # A renewal keeps the key, so that certificate and key always match.
        replace_file(self._certificate_file, made.certificate_pem + authority.certificate_pem)
