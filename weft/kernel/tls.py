"""TLS of a server: credentials that follow their files, without a restart."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.tls_check import TlsFiles, TlsMaterial, read_material

log = structlog.get_logger("weft.tls")

_Stamp = tuple[tuple[int, int, int], ...]
"""Of each file: its inode, size and time of change."""
_READS = 3
"""How often files are read that change while they are read."""


class TlsSource:
    """What the files hold, read anew when they have changed. Files that cannot be used leave the old content in use.

    Safe to share between threads: gRPC asks for a server's certificate on a thread of its own.
    """

    def __init__(
        self, files: TlsFiles, *, interval_seconds: float = 0.0, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`interval_seconds`: files are looked at this often at most. Raises INVALID_ARGUMENT naming a wrong file."""
        self._files = files
        self._interval_seconds = interval_seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._looked = monotonic()
        self._stamp = _stamp(files)
        self._material = read_material(files)
        self._version = 1

    @property
    def files(self) -> TlsFiles:
        """Where it is from."""
        return self._files

    def current(self) -> tuple[int, TlsMaterial]:
        """What is in use, and a number that grows with every change of it. Raises nothing."""
        now = self._monotonic()
        if self._files.paths and now - self._looked >= self._interval_seconds:
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
    """How a gRPC server shows who it is, and whom it lets in."""

    files: TlsFiles
    """With a certificate and its key."""
    requires_clients: bool = False
    """Whether callers need a certificate that the roots of `files` vouch for."""
    allowed_clients: tuple[str, ...] = ()
    """Patterns such as `weft://mesh/router-*` for the URIs in their certificates; empty: whoever has a certificate."""
    announced_host: str = ""
    """What others call this machine by, for a server that listens on all its addresses."""

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server; it follows the files. Raises INVALID_ARGUMENT naming what is missing or wrong."""
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
        """What gRPC asks for before each handshake; None: as before."""
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
