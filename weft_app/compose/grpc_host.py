"""A gRPC server with services and health; with reflection unless unauthenticated callers can reach it."""

import errno
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc

from weft.client._home import is_served
from weft.kernel.access.rpc_auth import RpcGuard, UserGuard, allowing_clients
from weft.kernel.channels.rpc import new_server
from weft.kernel.channels.tls import ServerTls
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.health import HealthReport
from weft.kernel.services.health_monitor import HealthMonitor
from weft.kernel.services.service_lifecycle import Health, Service
from weft.kernel.time.clock import Clock, SystemClock
from weft.kernel.values.address import TLS_PREFIX, is_any_host, is_local, is_loopback, needs_tls, without_tls
from weft_app.compose.machine import reachable_name

__all__ = ["GrpcHost", "is_local", "is_loopback"]

_UNIX = "unix:"
_FIELD = "--listen"
"""The option with an address, for errors. Callers that take it from a setting rename the field."""
CLOSE_SECONDS = 1.0
"""Grace for remaining calls after the services have drained."""


class GrpcHost:
    """A gRPC server that binds before its services are built, so that they know its address."""

    def __init__(
        self,
        server: grpc.aio.Server | None = None,
        *,
        is_public: bool = False,
        tls: ServerTls | None = None,
        has_keys: bool = False,
        guard: RpcGuard | None = None,
        first_guard: RpcGuard | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`server` defaults to one with the mesh's options. `is_public`: unauthenticated callers can only query health.

        `tls` is for addresses with TLS. `has_keys`: every call needs a key, whatever its certificate.
        `guard` checks the keys of calls, after `first_guard`. Without it, `UserGuard` checks the users of this machine.
        """
        # Without keys the port is on loopback, where other users of this machine can call.
        self._users = UserGuard() if guard is None and not is_public else None
        guards = tuple(each for each in (first_guard, guard or self._users) if each is not None)
        self._server = server or new_server((*allowing_clients(() if tls is None else tls.allowed_clients), *guards))
        self._clock = clock or SystemClock()
        self._is_public = is_public
        self._tls = tls
        self._has_keys = has_keys or guard is not None
        self._health = Health()
        self._services: Sequence[Service] = ()
        self._monitor: HealthMonitor | None = None
        self._serving = False

    def bind(self, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
        """Listens at an address, with or without `tls:`, and returns the address for other processes.

        `credentials` replace those of `tls`. Raises ALREADY_EXISTS if the address is taken, INVALID_ARGUMENT if this
        machine does not have it, or if it needs TLS or authenticated callers and neither is configured.
        """
        if credentials is None and needs_tls(address):
            credentials = self._credentials(address)
        bare = without_tls(address)
        # gRPC would replace the socket of a running server.
        if bare.startswith(_UNIX) and is_served(Path(bare.removeprefix(_UNIX))):
            raise _in_use(address)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(bare)
            else:
                port = self._server.add_secure_port(bare, credentials)
        except RuntimeError as error:
            raise _bind_error(address) from error
        if bare.startswith(_UNIX):
            Path(bare.removeprefix(_UNIX)).chmod(0o600)
            return address
        if self._users is not None:
            for loopback in _addresses_of(bare):
                self._users.note_end(loopback, port)
        return f"{self._announced(address)}:{port}"

    def _credentials(self, address: str) -> grpc.ServerCredentials:
        missing = []
        if self._tls is None:
            missing.append("a certificate (tls.certificate_file and tls.key_file)")
        if not self._has_keys and not (self._tls is not None and self._tls.requires_clients):
            missing.append("callers that are known: by certificates (tls.ca_file) or by keys (auth.required)")
        if missing and not (self._tls is not None and is_local(address)):
            where = "asks for TLS" if is_local(address) else "is not on this machine"
            raise invalid_field("address", f"{address} {where}, which needs {' and '.join(missing)}")
        assert self._tls is not None, "reported as missing above"
        return self._tls.credentials()

    def _announced(self, address: str) -> str:
        """Returns the host to announce: the configured name if the server listens on all addresses."""
        host = without_tls(address).rpartition(":")[0]
        if is_any_host(host) and self._tls is not None:
            host = self._tls.announced_host or reachable_name()
            host = f"[{host}]" if ":" in host else host
        # A name that looks local needs the prefix; otherwise clients would not use TLS.
        is_explicit = address.startswith(TLS_PREFIX) or (needs_tls(address) and not needs_tls(f"{host}:0"))
        return f"{TLS_PREFIX}{host}" if is_explicit else host

    async def start(self, services: Sequence[Service], monitor: HealthMonitor | None = None) -> None:
        """Starts the services, then admits calls.

        `monitor` checks their dependencies until the stop; without it they are healthy while the server runs.
        """
        self._services, self._monitor = services, monitor
        names = self._names()
        for service in services:
            service.register(self._server)
        if self._is_public:
            self._health.register_check(self._server)
        else:
            self._health.register(self._server, names)
        self._health.set_serving(names, serving=False)
        # Services may depend on each other: their connections are retried until the server admits calls.
        for service in services:
            await service.start()
        await self._server.start()
        self._serving = True
        if monitor is None:
            self._health.set_serving(names, serving=True)
        else:
            monitor.subscribe(self._tell_watchers)
            await monitor.start()
            self._health.follow(names, monitor)

    async def _tell_watchers(self, _: HealthReport) -> None:
        self._health.tell()

    def _names(self) -> list[str]:
        return [name for service in self._services for name in service.service_names]

    async def stop(self, grace_seconds: float) -> None:
        """Reports not ready, drains the services in reverse order, then closes the server. Idempotent.

        The services share the grace: each gets what the others have left.
        """
        deadline = self._clock.monotonic() + grace_seconds
        if self._serving:
            if self._monitor is not None:
                await self._monitor.note_stopping()
            self._serving = False
            self._health.set_serving(self._names(), serving=False)
        services, self._services = self._services, ()
        # A service that fails to stop, such as one with a dead background task, must not prevent others from stopping.
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self._server.stop, CLOSE_SECONDS)
            if self._monitor is not None:
                ends.push_async_callback(self._monitor.stop)
            for service in services:
                ends.push_async_callback(self._stop_service, service, deadline)

    async def _stop_service(self, service: Service, deadline: float) -> None:
        await service.stop(max(0.0, deadline - self._clock.monotonic()))


def _addresses_of(bare: str) -> set[str]:
    """Returns the numeric addresses of `host:port`, as gRPC resolves it."""
    host = bare.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return {str(each[4][0]) for each in socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM)}


def _bind_error(address: str) -> WeftError:
    """Returns why an address cannot be bound, by binding a socket: gRPC only logs the reason."""
    bare = without_tls(address)
    in_use = _in_use(address)
    if bare.startswith(_UNIX):
        return in_use
    host, _, port = bare.rpartition(":")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.bind(where)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return invalid_field(_FIELD, f"cannot listen on {address}: {error.strerror}")
    return FieldError(_FIELD, f"{in_use.message}; choose another", in_use.reason)


def _in_use(address: str) -> WeftError:
    return WeftError(Reason.ALREADY_EXISTS, f"cannot listen on {address}: it is in use")
