"""TLS of a server: credentials that follow their files, without a restart."""

import ssl
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.log import get_logger

MAX_FILE_BYTES = 1024 * 1024
"""Size limit of one PEM file: the roots of browsers take a fifth of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. A certificate and its key come together; roots may be there without them."""

    certificate_file: Path | None = None
    """The chain, its own certificate first."""
    key_file: Path | None = None
    """The key of the certificate, without a passphrase, readable by its owner and at most by its group."""
    ca_file: Path | None = None
    """Roots that vouch for others; None: the usual ones."""
    section: str = "tls"
    """What the names in error messages begin with."""

    def field(self, name: str) -> str:
        """The name of a setting in error messages."""
        return f"{self.section}.{name}"

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those that are set."""
        return tuple(path for path in (self.certificate_file, self.key_file, self.ca_file) if path is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """What the files hold, as PEM; empty where there is no such file."""

    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    roots: bytes = b""


def read_material(files: TlsFiles) -> TlsMaterial:
    """Read and check all files. Raises INVALID_ARGUMENT naming the setting that is wrong.

    Refused are a certificate without its key and the other way round, a key that others than its owner and group may
    read or its group may write, what is not PEM, a key of another certificate, and a certificate that is not valid now.
    """
    if (files.certificate_file is None) != (files.key_file is None):
        missing = "key_file" if files.key_file is None else "certificate_file"
        raise invalid_field(files.field(missing), "is missing: a certificate and its key come together")
    roots = b"" if files.ca_file is None else _read_roots(files, files.ca_file)
    if files.certificate_file is None or files.key_file is None:
        return TlsMaterial(roots=roots)
    _require_private(files, files.key_file)
    certificate = _read(files, "certificate_file", files.certificate_file)
    key = _read(files, "key_file", files.key_file)
    _require_pair(files, files.certificate_file, files.key_file)
    _require_valid_now(files, certificate)
    return TlsMaterial(certificate=certificate, key=key, roots=roots)


def _read(files: TlsFiles, name: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable(files, name, error) from error
    if len(content) > MAX_FILE_BYTES:
        raise invalid_field(files.field(name), f"has more than {MAX_FILE_BYTES} bytes")
    return content


def _read_roots(files: TlsFiles, path: Path) -> bytes:
    roots = _read(files, "ca_file", path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=roots.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise invalid_field(files.field("ca_file"), "holds no PEM certificates") from error
    return roots


def _require_private(files: TlsFiles, path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _unreadable(files, "key_file", error) from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        # Reading is left to the group: that is how a cluster hands a secret to a user who is not root.
        raise invalid_field(
            files.field("key_file"),
            f"has mode {stat.S_IMODE(mode):04o}, so others may read or change it; use chmod 600",
        )


def _require_pair(files: TlsFiles, certificate_file: Path, key_file: Path) -> None:
    try:
        # A passphrase would be prompted for on the terminal; an empty one is passed instead.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate_file, key_file, password="")
    except (ssl.SSLError, ValueError) as error:
        raise invalid_field(
            files.field("certificate_file"), "and key_file are not a PEM chain and its key without a passphrase"
        ) from error
    except OSError as error:
        raise _unreadable(files, "certificate_file", error) from error


def _require_valid_now(files: TlsFiles, certificate: bytes) -> None:
    from cryptography import x509  # noqa: PLC0415 - 6 MB that only a process with a certificate needs

    # What else a verifier might dislike about it is no matter of time.
    with suppress(ValueError):
        found, now = x509.load_pem_x509_certificate(certificate), datetime.now(UTC)
        if now > found.not_valid_after_utc:
            raise invalid_field(files.field("certificate_file"), "certificate has expired")
        if now < found.not_valid_before_utc:
            raise invalid_field(files.field("certificate_file"), "certificate is not valid yet")


def _unreadable(files: TlsFiles, name: str, error: OSError) -> FieldError:
    return invalid_field(files.field(name), f"cannot be read: {error.strerror}")


log = get_logger("weft.tls")

_Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and modification time of each file."""
_READS = 3
"""Attempts to read files that change while they are read."""


class TlsSource:
    """The contents of the TLS files, reloaded when they change. Unusable files leave the old content in use.

    Safe to share between threads: gRPC requests a server's certificate on a thread of its own.
    """

    def __init__(
        self, files: TlsFiles, *, interval_seconds: float = 0.0, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`interval_seconds`: minimum time between checks of the files. Raises INVALID_ARGUMENT naming a wrong file."""
        self._files = files
        self._has_files = bool(files.paths)
        self._interval_seconds = interval_seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._looked = monotonic()
        self._stamp = _stamp(files)
        self._material = read_material(files)
        self._version = 1

    @property
    def files(self) -> TlsFiles:
        """The files it reads."""
        return self._files

    def current(self) -> tuple[int, TlsMaterial]:
        """The content in use, and a number that grows with every change of it. Raises nothing."""
        if self._has_files and (now := self._monotonic()) - self._looked >= self._interval_seconds:
            with self._lock:
                self._looked = now
                self._look()
        return self._version, self._material

    def _look(self) -> None:
        for _ in range(_READS):
            stamp = _stamp(self._files)
            if stamp == self._stamp:
                return
            try:
                material = read_material(self._files)
            except WeftError as error:
                # Once for each state of the files: a certificate that was replaced before its key is such a state.
                self._stamp = stamp
                log.error("new TLS files cannot be used, the old ones stay", why=error.message)  # noqa: TRY400 - words enough
                return
            if _stamp(self._files) == stamp:
                self._take(stamp, material)
                return

    def _take(self, stamp: _Stamp, material: TlsMaterial) -> None:
        self._stamp = stamp
        if material != self._material:
            self._material = material
            self._version += 1
            log.info("new TLS files are in use", section=self._files.section)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """A gRPC server's certificate, and which clients it admits."""

    files: TlsFiles
    """With a certificate and its key."""
    requires_clients: bool = False
    """Whether callers need a certificate that the roots of `files` have signed."""
    allowed_clients: tuple[str, ...] = ()
    """Patterns such as `weft://mesh/router-*` for the URIs in client certificates; empty: any certificate."""
    announced_host: str = ""
    """The host name that others use for this machine, for a server that listens on all its addresses."""

    def credentials(self) -> grpc.ServerCredentials:
        """Returns credentials of a gRPC server that follow the files. Raises INVALID_ARGUMENT naming a setting."""
        if self.files.certificate_file is None:
            raise invalid_field(self.files.field("certificate_file"), "is missing")
        if self.requires_clients and self.files.ca_file is None:
            raise invalid_field(self.files.field("ca_file"), "is missing: it vouches for the clients that are required")
        source = TlsSource(self.files)
        return _following(source, requires_clients=self.requires_clients)


def _following(source: TlsSource, *, requires_clients: bool) -> grpc.ServerCredentials:
    def configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
        roots = material.roots if requires_clients else None
        return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], roots)

    shown, first = source.current()

    def latest() -> Any:
        """Returns the configuration for the next handshake; None: unchanged."""
        nonlocal shown
        version, material = source.current()
        if version == shown:
            return None
        shown = version
        return configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        configuration(first), latest, require_client_authentication=requires_clients
    )


def _stamp(files: TlsFiles) -> _Stamp:
    return tuple(_facts_of(path) for path in files.paths)


def _facts_of(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)
