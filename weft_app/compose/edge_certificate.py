"""The certificate of the HTTP edge where the operator names none: of an authority that this home keeps for itself.

Clients trust the authority, whose fingerprint stays. The certificate is issued anew before it expires, and when the
machine has got another name or address.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.config import EdgeTls
from weft.kernel.address import is_any_host
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.file_replacement import replace_file
from weft.kernel.log import get_logger
from weft.kernel.service import start_task, stop_tasks
from weft_app.compose.certificate import (
    IssuedCertificate,
    damaged_certificate,
    fingerprint_of_pem,
    issue,
    require_cryptography,
)
from weft_app.compose.home import WeftHome
from weft_app.compose.machine import certifiable, this_machine
from weft_app.compose.security import is_on_loopback
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from cryptography import x509

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 397
"""The most that browsers accept."""
RENEW_BEFORE_DAYS = 30
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_ALTERNATIVE = "name gateway.tls.certificate_file and gateway.tls.key_file"

log = get_logger("weft.tls")


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateFacts:
    """The facts that decide whether a certificate is replaced."""

    names: frozenset[str]
    valid_from: datetime
    valid_until: datetime


def why_due(facts: CertificateFacts | None, names: Collection[str], now: datetime) -> str:
    """Returns why a certificate has to be replaced; empty: it can stay. A name that is gone is no reason."""
    if facts is None:
        return "there is none yet"
    if now >= facts.valid_until - timedelta(days=RENEW_BEFORE_DAYS):
        return "it expires soon"
    if now < facts.valid_from:
        return "it is not valid yet"
    missing = sorted(set(names) - facts.names)
    return f"this machine is now also called {', '.join(missing)}" if missing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCertificate:
    """Files of the certificate of the HTTP edge, all under the home."""

    folder: Path

    @property
    def authority_file(self) -> Path:
        """PEM of the authority, for clients to trust."""
        return self.folder / "ca.pem"

    @property
    def files(self) -> EdgeTls:
        """The settings that name the certificate and its key."""
        return EdgeTls(
            certificate_file=self.folder / "cert.pem",
            key_file=self.folder / "key.pem",
            authority_file=self.authority_file,
        )

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the authority, as `sha256:<hex>`."""
        return fingerprint_of_pem(self.authority_file.read_bytes())

    def prepare(self, names: Sequence[str], now: datetime) -> str:
        """Makes what is missing or due, and returns why; empty: nothing was. Raises INVALID_ARGUMENT for damage."""
        require_cryptography(_ALTERNATIVE)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = tuple(dict.fromkeys((*_LOCAL_NAMES, *names)))
        authority = self._authority(now)
        held = self._held(authority)
        why = why_due(None if held is None else _facts(held.certificate), names, now)
        if why:
            self._issue(authority, names, now, held)
        return why

    def _authority(self, now: datetime) -> IssuedCertificate:
        certificate_file, key_file = self.authority_file, self.folder / "ca.key"
        try:
            # The certificate is written last: a key without one is left over from a start that was interrupted.
            held = _read(certificate_file, key_file) if certificate_file.exists() else None
        except (OSError, ValueError, TypeError) as error:
            raise damaged_certificate("the mesh's", certificate_file, key_file, error) from error
        if held is not None and now < held.certificate.not_valid_after_utc - timedelta(days=RENEW_BEFORE_DAYS):
            return held
        name = f"weft of {(*this_machine().names, 'this machine')[0]}"[:64]
        until = now + timedelta(days=AUTHORITY_DAYS)
        made = issue(name, (), now=now, valid_until=until, is_authority=True)
        replace_file(key_file, made.key_pem)
        replace_file(certificate_file, made.certificate_pem)
        return made

    def _held(self, authority: IssuedCertificate) -> IssuedCertificate | None:
        """Returns the certificate in use; None where there is none of this authority that can be used."""
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an optional package

        tls = self.files
        assert tls.certificate_file is not None
        assert tls.key_file is not None
        try:
            held = _read(tls.certificate_file, tls.key_file)
            held.certificate.verify_directly_issued_by(authority.certificate)
        except (OSError, ValueError, TypeError, InvalidSignature):
            # Clients know the authority alone, so this one can be replaced whatever is wrong with it.
            return None
        return held

    def _issue(
        self, authority: IssuedCertificate, names: Sequence[str], now: datetime, held: IssuedCertificate | None
    ) -> None:
        tls = self.files
        assert tls.certificate_file is not None
        assert tls.key_file is not None
        until = min(now + timedelta(days=CERTIFICATE_DAYS), authority.certificate.not_valid_after_utc)
        key = None if held is None else held.key
        made = issue("weft", names, now=now, valid_until=until, issuer=authority, key=key)
        if key is None:
            replace_file(tls.key_file, made.key_pem)
        # The key stays with a renewal, so that both files fit each other at every moment.
        replace_file(tls.certificate_file, made.certificate_pem + authority.certificate_pem)


def _read(certificate_file: Path, key_file: Path) -> IssuedCertificate:
    """Raises OSError, ValueError or TypeError for files that are no certificate and its key."""
    from cryptography import x509  # noqa: PLC0415 - an optional package
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    key = load_pem_private_key(key_file.read_bytes(), password=None)
    if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ValueError("the key is another one's")
    return IssuedCertificate(certificate=certificate, key=key)


def _facts(certificate: "x509.Certificate") -> CertificateFacts:
    from cryptography import x509  # noqa: PLC0415 - an optional package

    names: frozenset[str] = frozenset()
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = frozenset(str(each.value) for each in found)
    except x509.ExtensionNotFound:
        pass
    return CertificateFacts(
        names=names, valid_from=certificate.not_valid_before_utc, valid_until=certificate.not_valid_after_utc
    )


def own_edge_certificate(config: WeftConfig, home: WeftHome) -> EdgeCertificate | None:
    """Returns the certificate that the HTTP edge makes for itself; None: it has another, or speaks plain HTTP.

    Raises INVALID_ARGUMENT for settings that exclude each other.
    """
    tls, gateway = config.gateway.tls, config.gateway
    if gateway.insecure and (tls.is_set or tls.self_signed):
        raise invalid_field("gateway.insecure", "excludes a certificate in gateway.tls: take one of them out")
    if tls.self_signed and tls.is_set:
        raise invalid_field("gateway.tls.self_signed", "excludes gateway.tls.certificate_file and key_file")
    if tls.is_set or gateway.insecure or gateway.tls_terminated_elsewhere or tls.self_signed is False:
        return None
    if tls.self_signed is None and is_on_loopback(config.host):
        return None
    return EdgeCertificate(folder=home.state / "edge")


def checked_edge_certificate(config: WeftConfig, home: WeftHome) -> EdgeCertificate | None:
    """As `own_edge_certificate`, with a check of what is there already; makes nothing. Raises INVALID_ARGUMENT."""
    own = own_edge_certificate(config, home)
    if own is None:
        return None
    require_cryptography(_ALTERNATIVE)
    if own.authority_file.exists():
        key_file = own.folder / "ca.key"
        try:
            _read(own.authority_file, key_file)
        except (OSError, ValueError, TypeError) as error:
            raise damaged_certificate("the mesh's", own.authority_file, key_file, error) from error
    return own


def with_edge_certificate(config: WeftConfig, home: WeftHome) -> WeftConfig:
    """Returns the configuration with what the HTTP edge finds out for itself beyond loopback.

    That is its own certificate, where none is configured, and the names of this machine among `allowed_hosts`.
    """
    gateway = config.gateway
    if not is_on_loopback(config.host):
        gateway = replace(gateway, allowed_hosts=gateway.allowed_hosts | {*this_machine().names})
    own = own_edge_certificate(config, home)
    if own is not None:
        prepare_edge_certificate(config, own)
        timeout = gateway.tls.handshake_timeout_seconds
        gateway = replace(gateway, tls=replace(own.files, handshake_timeout_seconds=timeout))
    return replace(config, gateway=gateway)


def prepare_edge_certificate(config: WeftConfig, own: EdgeCertificate) -> None:
    """Issues the certificate where that is due. Raises INVALID_ARGUMENT when its files cannot be read or written."""
    named = () if is_on_loopback(config.host) else this_machine().all
    configured = () if is_any_host(config.host) else (config.host,)
    names = certifiable((*named, *configured, *sorted(config.gateway.allowed_hosts)))
    try:
        why = own.prepare(names, datetime.now(UTC))
    except OSError as error:
        raise damaged_certificate("the mesh's", own.authority_file, own.folder / "ca.key", error) from error
    if why:
        log.info("certificate of the HTTP edge issued", why=why)


class EdgeRenewal:
    """Renews the certificate of the HTTP edge while a mesh runs. Life cycle: start, stop."""

    def __init__(self, prepare: Callable[[], None], clock: Clock, interval_seconds: float) -> None:
        self._prepare = prepare
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins; the first check comes after one interval."""
        self._task = start_task(self._run(), name="edge-renewal")

    async def stop(self) -> None:
        """Ends the checks. Idempotent."""
        if self._task is not None:
            task, self._task = self._task, None
            await stop_tasks([task])

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_seconds)
            try:
                await asyncio.to_thread(self._prepare)
            except WeftError as error:
                # The certificate in use stays; the next check tries again.
                log.error("the certificate of the HTTP edge cannot be issued", why=error.message)  # noqa: TRY400 - words enough
