"""Admits gRPC calls: who calls is found out once, before any servicer sees the call.

A key in the metadata counts first; then the socket, which only this machine's user can reach; then a client
certificate, which only services of the mesh have.
"""

from collections.abc import Callable, Mapping
from typing import Any

import grpc

from weft.kernel.caller import set_caller
from weft.kernel.clock import Clock
from weft.kernel.principal import LOCAL, KeyRing, Principal, authenticate, require_one_key, service_principal
from weft.kernel.rpc_access import access_of
from weft.kernel.rpc_guard import RpcGuard

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"
_BEARER = "bearer "
_NO_KEY = "-"
"""Stands for credentials of another kind: a key that nobody has."""
_UNIX = "unix:"
_MAX_SERVICE_CHARS = 128

Context = grpc.aio.ServicerContext[Any, Any]


class AuthInterceptor(RpcGuard):
    """Guards every method of a server. Where nobody needs a key, there is none."""

    def __init__(self, ring: Callable[[], KeyRing], clock: Clock) -> None:
        """`ring` gives the keys that are good now."""
        super().__init__()
        self._ring = ring
        self._clock = clock

    def is_open(self, method: str) -> bool:
        """See RpcGuard.is_open."""
        return access_of(method) is None

    def check(self, method: str, context: Context) -> None:
        """See RpcGuard.check: raises UNAUTHENTICATED or PERMISSION_DENIED; the servicer learns who calls."""
        principal, access = self._principal(context), access_of(method)
        if access is not None:
            principal.require(access)
        set_caller(principal)

    def _principal(self, context: Context) -> Principal:
        metadata = tuple(context.invocation_metadata() or ())
        shown = [key for key, _ in metadata if key in (AUTHORIZATION, API_KEY)]
        # Of two of one name, whoever stands between may have looked at the other one.
        presented = presented_key(dict(metadata)) if len(shown) == len(set(shown)) else _NO_KEY
        if presented is None:
            if (context.peer() or "").startswith(_UNIX):
                return LOCAL
            name = _certified_name(context)
            if name is not None:
                return service_principal(name)
        return authenticate(self._ring(), presented, self._clock.utc_now())


def presented_key(metadata: Mapping[str, str | bytes]) -> str | None:
    """The key that a caller shows, in either place; None: none. What is no text is a key that nobody has.

    Raises UNAUTHENTICATED for two different keys.
    """
    shown = []
    given = metadata.get(AUTHORIZATION)
    if isinstance(given, str):
        shown.append(given[len(_BEARER) :].strip() if given[: len(_BEARER)].lower() == _BEARER else _NO_KEY)
    given = metadata.get(API_KEY)
    if given is not None:
        shown.append(str(given))
    require_one_key(shown)
    return shown[0] if shown else None


def _certified_name(context: Context) -> str | None:
    """The name in the certificate of a caller whom the server's roots vouch for; None: there is none."""
    about = context.auth_context() or {}
    for field in ("peer_uri", "x509_subject_alternative_name", "x509_common_name"):
        names = about.get(field)
        if names:
            return bytes(next(iter(names))).decode("utf-8", "replace")[:_MAX_SERVICE_CHARS]
    return None
