"""HTTP client of pulls: it connects only to addresses that `weft.kernel.channels.outbound` allows."""

from collections.abc import Iterable, Mapping

import httpcore2
import httpx2
from typing_extensions import override

from weft.kernel.channels.outbound import ForbiddenAddressError, Outbound, public_refusal
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

SocketOptions = Iterable[httpcore2.SOCKET_OPTION]


class CheckedBackend(httpcore2.SyncBackend):
    """Resolves a name once, checks its addresses, and connects to them."""

    outbound: Outbound = Outbound()

    @override
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: SocketOptions | None = None,
    ) -> httpcore2.NetworkStream:
        try:
            found = self.outbound.resolve(host, port)
        except ForbiddenAddressError as refused:
            message = f"{host}:{port}: its address {refused}, which weft does not download from"
            raise WeftError(Reason.PERMISSION_DENIED, message) from None
        except OSError as error:
            raise httpcore2.ConnectError(str(error)) from error
        failure: Exception = httpcore2.ConnectError("it has no address")
        for info in found:
            try:
                return super().connect_tcp(str(info[4][0]), port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure


class _CheckedTransport(httpx2.HTTPTransport):
    """Opens a connection for each request, so that each is checked."""

    def __init__(self, backend: CheckedBackend) -> None:
        super().__init__()
        self._pool.close()
        self._pool = httpcore2.ConnectionPool(
            ssl_context=httpx2.create_ssl_context(), max_keepalive_connections=0, network_backend=backend
        )


class PullClient(httpx2.Client):
    """A client that checks each address to which it connects.

    Where the environment names a proxy, the proxy connects, and decides which addresses it allows.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        """Raises OSError if the certificates of this machine cannot be read."""
        self._backend = CheckedBackend()
        super().__init__(headers=headers)
        # For addresses without a proxy only; an argument `transport` would replace the proxies too.
        self._transport.close()
        self._transport = _CheckedTransport(self._backend)

    def restrict(self, response: httpx2.Response | None) -> None:
        """Permits only public addresses once a public server has redirected.

        `response`: a redirect that is followed next; None: a new request, which ends the restriction.
        """
        is_public_only = False
        if response is not None:
            stream = response.extensions.get("network_stream")
            server = None if stream is None else stream.get_extra_info("server_addr")
            is_public = server is not None and public_refusal(str(server[0])) is None
            is_public_only = is_public or self._backend.outbound.is_public_only
        self._backend.outbound = Outbound(is_public_only=is_public_only)
