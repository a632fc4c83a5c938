"""Authentication from the configuration: who may call this process, and its own credentials as a client."""

import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Literal

import grpc
from typing_extensions import override

from weft.kernel.access.principal import KeyRing
from weft.kernel.access.rpc_auth import AuthInterceptor, RpcGuard
from weft.kernel.channels.rpc import open_channel
from weft.kernel.channels.tls import ServerTls, read_material
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.time.clock import Clock
from weft.kernel.values.address import is_loopback
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.key_ring import KeyRingWatcher
from weft_app.config.config import WeftConfig


def keys_required(config: WeftConfig) -> bool:
    """Whether callers need keys, by default if other machines can reach the HTTP API."""
    if config.auth.required is not None:
        return config.auth.required
    return config.gateway.tls_terminated_elsewhere or not is_loopback(config.host)


def is_on_loopback(host: str) -> bool:
    """Whether a host resolves to loopback addresses alone; the listener uses all of them. Raises INVALID_ARGUMENT."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise invalid_field("host", f"'{host}' is not an address of this machine") from None
    return all(ipaddress.ip_address(each[4][0]).is_loopback for each in found)


class KeyCheck:
    """A process's key ring, for its gRPC server and HTTP edge. Rejects every key until it is loaded."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._source: Callable[[], KeyRing] | None = None
        self._watcher: KeyRingWatcher | None = None

    @property
    def ring(self) -> KeyRing:
        """See `gateway.auth.authentication.KeyRingSource`."""
        if self._watcher is not None:
            return self._watcher.ring
        return KeyRing() if self._source is None else self._source()

    @property
    def is_ready(self) -> bool:
        """See `gateway.auth.authentication.KeyRingSource`."""
        return self._source is not None if self._watcher is None else self._watcher.is_ready

    def interceptor(self) -> AuthInterceptor:
        """Returns the interceptor that checks the keys of calls; SERVICE_UNAVAILABLE until they are loaded."""
        return AuthInterceptor(self.known_ring, self._clock)

    def known_ring(self) -> KeyRing:
        """Returns the keys. Raises SERVICE_UNAVAILABLE until they are loaded."""
        if not self.is_ready:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the API keys are not loaded yet", retry_after_seconds=1)
        return self.ring

    def use(self, source: Callable[[], KeyRing]) -> None:
        """Uses the key store of this process."""
        self._source = source

    async def follow(self, registry: grpc.aio.Channel) -> None:
        """Follows the keys of a registry in another process. Returns immediately."""
        self._watcher = KeyRingWatcher(registry, self._clock)
        await self._watcher.start()

    async def wait_ready(self) -> None:
        """Waits for the first keys of the followed registry."""
        if self._watcher is not None:
            await self._watcher.wait_ready()

    async def stop(self) -> None:
        """Stops following. Idempotent."""
        if self._watcher is not None:
            await self._watcher.stop()


def key_check(config: WeftConfig, clock: Clock) -> KeyCheck | None:
    """Returns this process's key check; None if keys are not required."""
    return KeyCheck(clock) if keys_required(config) else None


class KeyFollower(Service):
    """Follows the keys of a registry in another process."""

    def __init__(self, keys: KeyCheck, registry_address: str, security: ChannelSecurity) -> None:
        self._keys = keys
        self._address = registry_address
        self._security = security
        self._channel: grpc.aio.Channel | None = None

    @override
    async def start(self) -> None:
        self._channel = open_channel(self._address, self._security)
        await self._keys.follow(self._channel)

    @override
    async def stop(self, grace_seconds: float) -> None:
        await self._keys.stop()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(grace=None)


def key_followers(keys: KeyCheck | None, registry_address: str, security: ChannelSecurity) -> tuple[KeyFollower, ...]:
    """Returns the companion services that keep the keys current; empty if keys are not required."""
    return () if keys is None else (KeyFollower(keys, registry_address, security),)


SERVICE_KEY_VARIABLE = "WEFT_SERVICE_KEY"
"""Environment variable with a key of the role `service`, for services without a client certificate."""


def channel_security(config: WeftConfig) -> ChannelSecurity:
    """Returns this process's credentials and trust as a client. Raises INVALID_ARGUMENT naming an invalid file."""
    files = config.tls.files
    read_material(files, at_start=True)
    return ChannelSecurity(files=files, api_key=os.environ.get(SERVICE_KEY_VARIABLE, "").strip())


def server_tls(config: WeftConfig, service: Literal["registry", "router", "runner"]) -> ServerTls | None:
    """Returns a service's certificate and admitted clients; None without a certificate."""
    section = config.tls
    if section.certificate_file is None and section.key_file is None:
        return None
    if section.client_certificates == "required" and section.ca_file is None:
        raise invalid_field("tls.ca_file", "is missing: it vouches for the clients that are required")
    allowed: tuple[str, ...] = getattr(section.allowed_clients, service)
    requires_clients = section.ca_file is not None and section.client_certificates != "none"
    if allowed and not requires_clients:
        raise invalid_field(f"tls.allowed_clients.{service}", "needs tls.ca_file, and certificates that are required")
    return ServerTls(
        files=config.tls.files,
        requires_clients=requires_clients,
        allowed_clients=allowed,
        announced_host=section.announced_host or "",
    )


def new_host(
    config: WeftConfig,
    service: Literal["registry", "router", "runner"],
    keys: KeyCheck | None = None,
    first_guard: RpcGuard | None = None,
) -> GrpcHost:
    """Returns a service's gRPC server, with TLS if a certificate is configured. `keys` admit its callers.

    `first_guard` checks calls before their keys.
    """
    guard = None if keys is None else keys.interceptor()
    return GrpcHost(tls=server_tls(config, service), guard=guard, first_guard=first_guard)
