"""The HTTP edge's certificate if none is configured, issued by an authority of this home.

Clients trust the authority, which does not change. The certificate is renewed before it expires and when the
machine gets another name or address.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.values.address import is_any_host
from weft_app.compose.home import WeftHome
from weft_app.compose.machine import certifiable, this_machine
from weft_app.compose.security import is_on_loopback
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from weft_app.compose.authority import EdgeCertificate

RENEWAL_CHECK_SECONDS = 600

log = get_logger("weft.tls")


def own_edge_certificate(config: WeftConfig, home: WeftHome) -> "EdgeCertificate | None":
    """Returns the certificate that the HTTP edge issues; None: it has another one or uses plain HTTP.

    Raises INVALID_ARGUMENT for settings that exclude each other.
    """
    tls, gateway = config.gateway.tls, config.gateway
    if gateway.insecure and (tls.is_set or tls.self_signed):
        raise invalid_field(
            "gateway.insecure", "cannot be combined with a certificate in gateway.tls: remove one of them"
        )
    if tls.self_signed and tls.is_set:
        raise invalid_field(
            "gateway.tls.self_signed", "cannot be combined with gateway.tls.certificate_file and key_file"
        )
    if tls.is_set or gateway.insecure or gateway.tls_terminated_elsewhere or tls.self_signed is False:
        return None
    if tls.self_signed is None and is_on_loopback(config.host):
        return None
    from weft_app.compose.authority import EdgeCertificate  # noqa: PLC0415 - see there

    return EdgeCertificate(folder=home.state / "edge")


def checked_edge_certificate(config: WeftConfig, home: WeftHome) -> "EdgeCertificate | None":
    """As `own_edge_certificate`, but checks existing files. Issues nothing. Raises INVALID_ARGUMENT."""
    own = own_edge_certificate(config, home)
    if own is None:
        return None
    own.held_authority()
    return own


def with_edge_certificate(config: WeftConfig, home: WeftHome) -> WeftConfig:
    """Returns the configuration with defaults for an HTTP edge beyond loopback.

    They are its own certificate, if none is configured, and this machine's names among `allowed_hosts`.
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
    """Issues the certificate if it is due. Raises INVALID_ARGUMENT if its files cannot be read or written."""
    named = () if is_on_loopback(config.host) else this_machine().all
    configured = () if is_any_host(config.host) else (config.host,)
    names = certifiable((*named, *configured, *sorted(config.gateway.allowed_hosts)))
    try:
        why = own.prepare(names, datetime.now(UTC))
    except OSError as error:
        raise own.damaged(error) from error
    if why:
        log.info("certificate of the HTTP edge issued", why=why)


async def renew_edge_certificate(config: Callable[[], WeftConfig], own: "EdgeCertificate", clock: Clock) -> None:
    """Renews the HTTP edge's certificate for the configuration in force, until cancelled."""
    while True:
        await clock.sleep(RENEWAL_CHECK_SECONDS)
        try:
            await asyncio.to_thread(prepare_edge_certificate, config(), own)
        except WeftError as error:
            # The certificate in use is kept; the next check tries again.
            log.error("the certificate of the HTTP edge cannot be issued", why=error.message)  # noqa: TRY400 - no traceback needed
