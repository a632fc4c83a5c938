"""Listener of the router's relay, for dial-out runners: with TLS unless it is on loopback."""

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict, dataclass

import grpc
from typing_extensions import override

from router_svc.relay import RELAY_SERVICE, Relay, add_relay_to_server
from router_svc.router_config import MAX_LINKS
from weft.kernel.channels.rpc import connection_options
from weft.kernel.errors.error_tree import WeftError, invalid_field, renaming_fields
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.values.address import is_any_host, split_address
from weft.link.link import LINK_SERVER_OPTIONS
from weft_app.compose.certificate import ServerCertificate, certificate_from_files
from weft_app.compose.grpc_host import CLOSE_SECONDS, GrpcHost, is_loopback
from weft_app.compose.home import WeftHome
from weft_app.compose.machine import reachable_name
from weft_app.config.config import RelaySettings

MAX_CALLS_BESIDE_LINKS = 128
"""Concurrent calls in addition to links: runners being admitted or rejected, and health checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayEndpoint:
    """The address at which runners join."""

    url: str
    fingerprint: str = ""
    """Fingerprint of a self-signed certificate, as `sha256:<hex>`; empty for a public CA's or without TLS."""
    is_everywhere: bool = False
    """Whether it listens on all addresses of the machine."""


class RelayListener(Service):
    """The relay on a separate gRPC server, so that joining runners can reach nothing else."""

    def __init__(self, section: RelaySettings, home: WeftHome, relay: Relay) -> None:
        self._section = section
        self.has_private_address = False
        """Whether it also listens on a private address, for runners of this process. Set it before the start."""
        self._home = home
        self._relay = relay
        self._server: grpc.aio.Server | None = None
        self._host: GrpcHost | None = None
        self.endpoint = RelayEndpoint(url="")
        """The address at which runners join, once started."""
        self.private_address = ""
        """The gRPC target of the private address, once started; empty: none."""

    @override
    async def start(self) -> None:
        """Starts listening. Raises ALREADY_EXISTS if the address is taken, INVALID_ARGUMENT for invalid settings."""
        listen = self._section.listen or ""
        host, port = split_address(listen, "relay.listen")
        certificate = relay_certificate(self._section, self._home, host)
        most = MAX_LINKS + MAX_CALLS_BESIDE_LINKS
        options = (*LINK_SERVER_OPTIONS, *connection_options())
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=most)
        self._server, self._host = server, GrpcHost(server, is_public=True)
        with renaming_fields(lambda _: "relay.listen"):
            bound = self._host.bind(listen, None if certificate is None else certificate.credentials())
        port = int(bound.rpartition(":")[2]) or port
        self.endpoint = _endpoint(host, port, certificate)
        if self.has_private_address:
            self.private_address = self._host.bind(self._home.address("relay"))
        await self._host.start([_RelayService(self._relay)])
        try:
            replace_file(self._home.relay_file, f"{json.dumps(asdict(self.endpoint))}\n".encode())
        except OSError as error:
            raise WeftError(
                Reason.INVALID_ARGUMENT, f"{self._home.relay_file} cannot be written: {error.strerror}"
            ) from error

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Stops listening immediately, so that runners dial another router; the relay drains the existing links."""
        host, self._host = self._host, None
        if host is None or self._server is None:
            return
        self._home.relay_file.unlink(missing_ok=True)
        closing = asyncio.create_task(self._server.stop(grace_seconds + CLOSE_SECONDS))
        try:
            await host.stop(grace_seconds)
        finally:
            await closing


class _RelayService(Service):
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    @property
    @override
    def service_names(self) -> tuple[str, ...]:
        return (RELAY_SERVICE,)

    @override
    def register(self, server: grpc.aio.Server) -> None:
        add_relay_to_server(self._relay, server)

    @override
    async def start(self) -> None:
        """Does nothing: the router starts the relay."""

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Drains the relay."""
        await self._relay.stop(grace_seconds)


def known_endpoint(home: WeftHome) -> RelayEndpoint | None:
    """Returns the address at which runners join this home's mesh; None if no relay runs here."""
    with suppress(OSError, ValueError, TypeError):
        return RelayEndpoint(**json.loads(home.relay_file.read_text("utf-8")))
    return None


def relay_certificate(section: RelaySettings, home: WeftHome, host: str) -> ServerCertificate | None:
    """Returns the certificate of a listener at `host`; None on loopback if none is configured."""
    if (section.certificate_file is None) != (section.key_file is None):
        raise invalid_field("relay.certificate_file", "and relay.key_file must be set together")
    if section.certificate_file is not None and section.key_file is not None:
        return certificate_from_files(section.certificate_file.expanduser(), section.key_file.expanduser())
    if is_loopback(host):
        return None
    from weft_app.compose.authority import self_signed_certificate  # noqa: PLC0415 - see there

    return self_signed_certificate(home.state / "relay", [] if is_any_host(host) else [host])


def shown_host(host: str) -> str:
    """Returns the host for URLs: this machine's name if it listens on all addresses."""
    shown = reachable_name() if is_any_host(host) else host
    return f"[{shown}]" if ":" in shown else shown


def _endpoint(host: str, port: int, certificate: ServerCertificate | None) -> RelayEndpoint:
    shown = shown_host(host)
    if certificate is None:
        return RelayEndpoint(url=f"http://{shown}:{port}")
    fingerprint = certificate.fingerprint if certificate.is_self_signed else ""
    return RelayEndpoint(url=f"https://{shown}:{port}", fingerprint=fingerprint, is_everywhere=is_any_host(host))
