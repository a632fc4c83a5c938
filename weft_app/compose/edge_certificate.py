"""The certificate of the HTTP edge where the operator names none: of an authority that this home keeps for itself.

Clients trust the authority, whose fingerprint stays. The certificate is issued again before it expires, and when the
machine has got another name or address.
"""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from weft.kernel.address import is_any_host
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log import get_logger
from weft_app.compose.home import WeftHome
from weft_app.compose.machine import certifiable, this_machine
from weft_app.compose.security import is_on_loopback
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from weft_app.compose.authority import EdgeCertificate

RENEWAL_CHECK_SECONDS = 600
"""How often a running mesh checks whether its own certificate is due: before it expires, and when the machine has got
another name or address."""

log = get_logger("weft.tls")


def own_edge_certificate(config: WeftConfig, home: WeftHome) -> "EdgeCertificate | None":
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
    from weft_app.compose.authority import EdgeCertificate  # noqa: PLC0415 - see there

    return EdgeCertificate(folder=home.state / "edge")


def checked_edge_certificate(config: WeftConfig, home: WeftHome) -> "EdgeCertificate | None":
    """As `own_edge_certificate`, with a check of what is there already; makes nothing. Raises INVALID_ARGUMENT."""
    own = own_edge_certificate(config, home)
    if own is None:
        return None
    own.held_authority()
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
        gateway = replace(gateway, tls=own.files)
    return replace(config, gateway=gateway)


def prepare_edge_certificate(config: WeftConfig, own: "EdgeCertificate") -> None:
    """Issues the certificate where that is due. Raises INVALID_ARGUMENT when its files cannot be read or written."""
    named = () if is_on_loopback(config.host) else this_machine().all
    configured = () if is_any_host(config.host) else (config.host,)
    names = certifiable((*named, *configured, *sorted(config.gateway.allowed_hosts)))
    try:
        why = own.prepare(names, datetime.now(UTC))
    except OSError as error:
        raise own.damaged(error) from error
    if why:
        log.info("certificate of the HTTP edge issued", why=why)


async def renew_edge_certificate(config: WeftConfig, own: "EdgeCertificate", clock: Clock) -> None:
    """Renews the certificate of the HTTP edge while a mesh runs, until it is cancelled."""
    while True:
        await clock.sleep(RENEWAL_CHECK_SECONDS)
        try:
            await asyncio.to_thread(prepare_edge_certificate, config, own)
        except WeftError as error:
            # The certificate in use stays; the next check tries again.
            log.error("the certificate of the HTTP edge cannot be issued", why=error.message)  # noqa: TRY400 - words enough
