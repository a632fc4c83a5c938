"""A gRPC server with services and health on it, and reflection unless strangers reach it."""

from collections.abc import Sequence
from ipaddress import ip_address

import grpc

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.rpc import new_server
from weft.kernel.service import Health, Service

CLOSE_SECONDS = 1.0
"""What is left of calls after the services have drained."""


def is_local(address: str) -> bool:
    """Whether only this machine can connect to a gRPC address."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return address.startswith("unix:") or is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine and nothing else."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class GrpcHost:
    """Binds first, so that a service may know its own address before it is built; then carries services."""

    def __init__(self, server: grpc.aio.Server | None = None, *, is_public: bool = False) -> None:
        """`server` has options of its own; None: those of the mesh. A public one tells strangers its health alone."""
        self._server = server or new_server()
        self._is_public = is_public
        self._health = Health()
        self._services: Sequence[Service] = ()
        self._serving = False

    def bind(self, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
        """Listen at a gRPC address and return the target others use. Without TLS loopback and Unix sockets only.

        Raises ALREADY_EXISTS when the address is taken, INVALID_ARGUMENT when it is not loopback and needs TLS.
        """
        if credentials is None and not is_local(address):
            raise invalid_field(
                "address",
                f"{address} is not on this machine; binding elsewhere needs keys and TLS, which are not there yet",
            )
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise WeftError(Reason.ALREADY_EXISTS, f"cannot listen on {address}: it is in use") from error
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    async def start(self, services: Sequence[Service]) -> None:
        """Start the services, then take calls for them."""
        self._services = services
        names = [name for service in services for name in service.service_names]
        for service in services:
            service.register(self._server)
        if self._is_public:
            self._health.register_check(self._server)
        else:
            self._health.register(self._server, names)
        await self._health.set_live()
        # A service that depends on another one finds it: connections are retried until the server takes calls.
        for service in services:
            await service.start()
        await self._server.start()
        self._serving = True
        await self._health.set_serving(names, serving=True)

    async def stop(self, grace_seconds: float) -> None:
        """Report not ready, drain the services in reverse order, then end. Idempotent."""
        if self._serving:
            self._serving = False
            names = [name for service in self._services for name in service.service_names]
            await self._health.set_serving(names, serving=False)
        for service in reversed(self._services):
            await service.stop(grace_seconds)
        self._services = ()
        await self._server.stop(CLOSE_SECONDS)
