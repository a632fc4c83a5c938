"""TLS files: validation, hot reload, and server credentials."""

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

from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.tls")

MAX_FILE_BYTES = 1024 * 1024
"""Size limit of a PEM file, five times the size of the root certificates of browsers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. A certificate needs its key; roots may be given without them."""

    certificate_file: Path | None = None
    """The certificate chain, leaf first."""
    key_file: Path | None = None
    """The certificate's key, without a passphrase, readable only by its owner and group."""
    ca_file: Path | None = None
    """Trusted root certificates; None: the default ones."""
    section: str = "tls"
    """Prefix of setting names in error messages."""

    def field(self, name: str) -> str:
        """Returns the name of a setting for error messages."""
        return f"{self.section}.{name}"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are set."""
        return tuple(path for path in (self.certificate_file, self.key_file, self.ca_file) if path is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """The contents of the files, as PEM; empty for a file that is not set."""

    certificate: bytes = b""
    key: bytes = field(default=b"", repr=False)
    roots: bytes = b""


def read_material(files: TlsFiles, *, at_start: bool = False) -> TlsMaterial:
    """Reads and checks all files. Raises INVALID_ARGUMENT naming the invalid setting.

    Rejects a certificate without its key and vice versa, a key that is readable by others or writable by its group,
    content that is not PEM, a key that does not match, and a certificate that is not valid now. `at_start`: an expired
    one, or one that is not valid yet, is used with a warning, as by a process that has run since it was valid.
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
    if (fault := _validity_fault(certificate)) and not at_start:
        raise invalid_field(files.field("certificate_file"), fault)
    if fault:
        log.warning("a certificate that is not valid now is used", setting=files.field("certificate_file"), why=fault)
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
        # The group may read: Kubernetes gives a secret to a user other than root that way.
        raise invalid_field(
            files.field("key_file"),
            f"has mode {stat.S_IMODE(mode):04o}, so other users can access it; run chmod 600",
        )


def _require_pair(files: TlsFiles, certificate_file: Path, key_file: Path) -> None:
    try:
        # An empty passphrase prevents a prompt on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate_file, key_file, password="")
    except (ssl.SSLError, ValueError) as error:
        raise invalid_field(
            files.field("certificate_file"), "and key_file are not a PEM chain and its key without a passphrase"
        ) from error
    except OSError as error:
        raise _unreadable(files, "certificate_file", error) from error


def _validity(certificate: bytes) -> tuple[datetime, datetime] | None:
    from cryptography import x509  # noqa: PLC0415 - 6 MB that only a process with a certificate needs

    # Ignore certificates that `cryptography` cannot parse: only the dates matter here.
    with suppress(ValueError):
        found = x509.load_pem_x509_certificate(certificate)
        return found.not_valid_before_utc, found.not_valid_after_utc
    return None


def valid_until(certificate: bytes) -> datetime | None:
    """Returns the end of a PEM chain's first certificate; None: it cannot be read."""
    validity = _validity(certificate)
    return None if validity is None else validity[1]


def _validity_fault(certificate: bytes) -> str:
    """Returns why a certificate is not valid now; empty if it is."""
    begin, end = _validity(certificate) or (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))
    now = datetime.now(UTC)
    if now > end:
        return "certificate has expired"
    return "certificate is not valid yet" if now < begin else ""


def _unreadable(files: TlsFiles, name: str, error: OSError) -> FieldError:
    return invalid_field(files.field(name), f"cannot be read: {error.strerror}")


_Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and modification time of each file."""
_READS = 3
"""Attempts to read files that change meanwhile."""
RETRY_SECONDS = 1.0
"""Minimum time between two reads of files that cannot be used."""


class TlsSource:
    """The contents of the TLS files, reloaded when they change. If new files are invalid, the old content stays in use.

    Thread-safe, since gRPC requests a server's certificate on a separate thread.
    """

    def __init__(
        self, files: TlsFiles, *, interval_seconds: float = 0.0, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`interval_seconds` is the minimum time between checks. Raises INVALID_ARGUMENT naming an invalid file."""
        self._files = files
        self._has_files = bool(files.paths)
        self._interval_seconds = interval_seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._looked = monotonic()
        self._stamp = _stamp(files)
        self._material = read_material(files, at_start=True)
        self._version = 1
        self._refused: _Stamp = ()
        """The last files that could not be used."""
        self._retry_at = 0.0

    @property
    def files(self) -> TlsFiles:
        """The files that it reads."""
        return self._files

    def current(self) -> tuple[int, TlsMaterial]:
        """Returns a version number that grows with every change, and the content in use. Never raises."""
        if self._has_files and (now := self._monotonic()) - self._looked >= self._interval_seconds:
            with self._lock:
                self._looked = now
                self._look(now)
        return self._version, self._material

    def _look(self, now: float) -> None:
        for _ in range(_READS):
            stamp = _stamp(self._files)
            if stamp == self._stamp or (stamp == self._refused and now < self._retry_at):
                return
            try:
                material = read_material(self._files)
            except WeftError as error:
                # Log once per state of the files: a certificate is often replaced before its key.
                if stamp != self._refused:
                    log.error("new TLS files cannot be used, the old ones stay", why=error.message)  # noqa: TRY400
                # Read again even if they stay the same: a certificate becomes valid, a key gets another mode.
                self._refused, self._retry_at = stamp, now + RETRY_SECONDS
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
    """A gRPC server's certificate, and the clients that it accepts."""

    files: TlsFiles
    """Must include a certificate and its key."""
    requires_clients: bool = False
    """Whether clients need a certificate signed by the roots in `files`."""
    allowed_clients: tuple[str, ...] = ()
    """Patterns such as `weft://mesh/router-*` for the URIs in client certificates; empty: any certificate."""
    announced_host: str = ""
    """The host name by which others reach this machine, for a server that listens on all addresses."""

    def credentials(self) -> grpc.ServerCredentials:
        """Returns gRPC server credentials that follow the files. Raises INVALID_ARGUMENT naming an invalid setting."""
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
        """Returns the configuration for the next handshake; None if it is unchanged."""
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
