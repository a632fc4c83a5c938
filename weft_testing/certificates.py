"""A certificate authority for tests, which can also issue invalid certificates. Needs the package trustme."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from weft.kernel.channels.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its key, both in PEM."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, ca: "Authority | None" = None, *, name: str = "own") -> TlsFiles:
        """Writes both to files in `folder`, each replaced atomically, together with the root certificate of `ca`."""
        files = TlsFiles(
            certificate_file=folder / f"{name}.pem",
            key_file=folder / f"{name}.key",
            ca_file=None if ca is None else folder / f"{name}-ca.pem",
        )
        contents = (self.certificate, self.key, *(() if ca is None else (ca.root,)))
        for path, content in zip(files.paths, contents, strict=True):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(content)
            fresh.chmod(0o600)
            fresh.replace(path)
        return files


class Authority:
    """A certificate authority."""

    def __init__(self) -> None:
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)

    @property
    def root(self) -> bytes:
        """The root certificate as PEM."""
        return self._ca.cert_pem.bytes()

    def issue(self, *names: str, begins: timedelta = timedelta(days=-2), ends: timedelta = timedelta(days=1)) -> Pair:
        """Issues a certificate for host names, addresses and URIs; `begins` and `ends` are relative to now."""
        now = datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        root = x509.load_pem_x509_certificate(self.root)
        signer = load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(root.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=True)
            .sign(signer, hashes.SHA256())
        )
        pem, plain = Encoding.PEM, NoEncryption()
        return Pair(certificate=certificate.public_bytes(pem), key=key.private_bytes(pem, PrivateFormat.PKCS8, plain))

    def issue_expired(self, *names: str) -> Pair:
        """Issues a certificate that expired yesterday."""
        return self.issue(*names, ends=timedelta(days=-1))


def _alternative(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
