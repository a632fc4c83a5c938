"""How long the configured certificates are valid: for the start, health, metrics and `weft doctor`.

An expired certificate does not keep a mesh from starting: callers of this machine use the Unix socket, and clients see
the same certificate as before the restart.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from weft.kernel.channels.tls import valid_until
from weft.kernel.services.health import WELL, HealthCheck, Observation, degraded
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

    from weft.kernel.telemetry.metrics_page import MetricsPage

WARN_BEFORE_DAYS = 14
"""As the alert WeftCertificateExpires: a certificate of 90 days is usually renewed 30 days before its end."""

_Stamp = tuple[int, int]
"""Inode and modification time of a file."""


def certificate_files(config: WeftConfig) -> Mapping[str, Path]:
    """Returns the configured certificates by setting. Those that weft issues itself are renewed by weft."""
    named = {
        "gateway.tls.certificate_file": config.gateway.tls.certificate_file,
        "relay.certificate_file": config.relay.certificate_file,
        "tls.certificate_file": config.tls.certificate_file,
    }
    return {setting: path.expanduser() for setting, path in named.items() if path is not None}


class CertificateExpiry:
    """The ends of the configured certificates, read again when a file changes."""

    def __init__(self, config: WeftConfig) -> None:
        self._files = certificate_files(config)
        self._read: dict[Path, tuple[_Stamp, datetime | None]] = {}

    def ends(self) -> Iterator[tuple[str, datetime]]:
        """Yields the end of each certificate that can be read, with its setting."""
        for setting, path in self._files.items():
            if (end := self._end(path)) is not None:
                yield setting, end

    def warnings(self, now: datetime) -> list[str]:
        """Returns a sentence for each certificate that has expired or will do so within WARN_BEFORE_DAYS."""
        soon = [(setting, end) for setting, end in self.ends() if (end - now).days < WARN_BEFORE_DAYS]
        return [f"{setting}: the certificate {expiry_words(end, now)}; replace the file" for setting, end in soon]

    def health_checks(self) -> Iterator[HealthCheck]:
        """Yields the check of the component `certificates`, if a certificate is configured."""
        if self._files:
            yield HealthCheck(name="certificates", probe=self._probe, is_essential=False)

    def add_metrics(self, page: "MetricsPage") -> None:
        """Adds the gauge of each certificate's end."""

        def collect() -> "Iterable[Metric]":
            name, meaning = "weft_certificate_expiry_timestamp_seconds", "When a certificate expires, in Unix time."
            yield page.gauge(name, meaning, ("setting",), (((each,), end.timestamp()) for each, end in self.ends()))

        if self._files:
            page.add(collect)

    def _probe(self) -> Observation:
        found = self.warnings(datetime.now(UTC))
        return degraded("certificate_expires", "; ".join(found)) if found else WELL

    def _end(self, path: Path) -> datetime | None:
        try:
            stat = path.stat()
            stamp = stat.st_ino, stat.st_mtime_ns
            if (held := self._read.get(path)) is None or held[0] != stamp:
                held = self._read[path] = stamp, valid_until(path.read_bytes())
        except OSError:
            return None
        return held[1]


def expiry_words(end: datetime, now: datetime) -> str:
    """Returns how long a certificate is valid, such as `expires in 5 days (2026-12-04)`."""
    if end <= now:
        return f"expired on {end.date()}"
    days = (end - now).days
    when = f"in {days} days" if days > 1 else "within a day" if days == 0 else "tomorrow"
    return f"expires {when} ({end.date()})"
