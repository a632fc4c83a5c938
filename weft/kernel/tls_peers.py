"""Which certificates a gRPC server takes calls from, by the URIs in them."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import grpc

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc_guard import RpcGuard

_TRANSPORT = "transport_security_type"
_IDENTITIES = "peer_uri"
"""Keys of gRPC's authentication context: `ssl` for TLS, and the URIs of the caller's certificate."""


def allowing_clients(patterns: Sequence[str]) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """What refuses calls of certificates without a URI that one of `patterns` matches; nothing without patterns."""
    return (PeerGate(patterns),) if patterns else ()


class PeerGate(RpcGuard):
    """Refuses calls over TLS with PERMISSION_DENIED; those without TLS are from this machine, and pass."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Shell patterns for URIs, such as `weft://mesh/router-*`."""
        super().__init__()
        self._patterns = tuple(patterns)

    def check(self, method: str, context: "grpc.aio.ServicerContext[Any, Any]") -> None:  # noqa: ARG002 - whichever
        """See RpcGuard.check: raises PERMISSION_DENIED for a caller that may not be here."""
        facts = context.auth_context()
        if b"ssl" not in facts.get(_TRANSPORT, ()):
            return
        found = [uri.decode("utf-8", "replace") for uri in facts.get(_IDENTITIES, ())]
        if not any(fnmatchcase(uri, pattern) for uri in found for pattern in self._patterns):
            raise WeftError(Reason.PERMISSION_DENIED, "the caller's certificate is not one that may call this service")
