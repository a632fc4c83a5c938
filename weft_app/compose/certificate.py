"""TLS certificates of listeners, issued by this machine or the operator: chain, key and fingerprint."""

import ssl
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import grpc

from weft.kernel.channels.tls import ServerTls, TlsFiles, read_material
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

_PEM_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCertificate:
    """A certificate chain and its key, both PEM."""

    chain: bytes
    key: bytes = field(repr=False)
    is_self_signed: bool
    files: TlsFiles | None = None
    """The operator's files, which are reloaded when they change; None: this machine has issued the certificate."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the first certificate of the chain, as `sha256:<hex>`."""
        return fingerprint_of_pem(self.chain)

    def credentials(self) -> grpc.ServerCredentials:
        """Returns the credentials of a gRPC server. Raises INVALID_ARGUMENT naming an invalid file."""
        if self.files is not None:
            return ServerTls(files=self.files).credentials()
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
    files = TlsFiles(certificate_file=certificate_file, key_file=key_file, section="relay")
    read = read_material(files, at_start=True)
    return ServerCertificate(chain=read.certificate, key=read.key, is_self_signed=False, files=files)


def damaged_certificate(whose: str, certificate_file: Path, key_file: Path, error: Exception) -> WeftError:
    """Returns the error for damaged files that this machine has issued."""
    why = "they are not a certificate and its key"
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        why = str(error.strerror)
    return WeftError(
        Reason.INVALID_ARGUMENT,
        f"{whose} {certificate_file} and {key_file.name} cannot be used: {why}; restore both from a backup, or "
        "delete both for a new certificate, whose fingerprint every client then has to be given",
    )
