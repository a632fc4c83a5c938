"""Authentication and authorization of gRPC calls: the access each method needs, and the caller of the current call.

Interceptors check each call before the servicer runs. An API key in the metadata takes precedence, then the Unix
socket, which only this machine's user can reach, then a client certificate, which only services of the mesh have.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from importlib import import_module
from inspect import isasyncgenfunction
from typing import Any, cast
from urllib.parse import unquote

import grpc
from google.protobuf.descriptor import MethodDescriptor
from typing_extensions import override

from weft.api.common.v1 import access_pb2
from weft.kernel.access.peer_user import End, is_own_user
from weft.kernel.access.principal import (
    LOCAL,
    MESH_ACCESS,
    OTHER_USER,
    VIEW_TELEMETRY,
    Access,
    KeyRing,
    Principal,
    Resource,
    Role,
    authenticate,
    require_one_key,
    service_principal,
)
from weft.kernel.channels.rpc import answering
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock

_KINDS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""Handler factories by whether requests and responses are streamed."""

Context = grpc.aio.ServicerContext[Any, Any]


class RpcGuard(ABC, grpc.aio.ServerInterceptor):
    """An interceptor that rejects calls. An error of `check` becomes the call's status."""

    @abstractmethod
    def check(self, method: str, context: Context) -> None:
        """Checks a call of `/package.Service/Method`. Raises the WeftError that rejects it.

        It runs in the call's task, so that the servicer sees the context variables that it sets.
        """

    def is_open(self, method: str) -> bool:  # noqa: ARG002 - for those that leave methods open
        """Whether a method needs no check."""
        return False

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or self.is_open(method):
            return handler
        return self._guarded(handler, method)

    def _guarded(self, handler: Any, method: str) -> Any:
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        guarded = self._streaming(inner, method) if isasyncgenfunction(inner) else self._answering(inner, method)
        kind = _KINDS[handler.request_streaming, handler.response_streaming]
        return kind(guarded, handler.request_deserializer, handler.response_serializer)

    def _answering(self, inner: Any, method: str) -> Any:
        async def call(request: Any, context: Context) -> Any:
            try:
                self.check(method, context)
            except Exception:
                async with answering(context):
                    raise
            return await inner(request, context)

        return call

    def _streaming(self, inner: Any, method: str) -> Any:
        async def call(request: Any, context: Context) -> AsyncGenerator[Any]:
            async with answering(context):
                self.check(method, context)
            async with aclosing(inner(request, context)) as answers:
                async for answer in answers:
                    yield answer

        return call


_TRANSPORT = "transport_security_type"
_IDENTITIES = "peer_uri"
"""Keys of gRPC's auth context: the transport (`ssl` for TLS), and the URIs of the caller's certificate."""


def allowing_clients(patterns: Sequence[str]) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """Returns the interceptors that reject certificates matching no pattern; empty without patterns."""
    return (PeerGate(patterns),) if patterns else ()


class PeerGate(RpcGuard):
    """Rejects TLS callers with certificates that match no pattern. Calls without TLS are local and pass."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """`patterns` are shell patterns for URIs, such as `weft://mesh/router-*`."""
        self._patterns = tuple(patterns)

    def check(self, method: str, context: "grpc.aio.ServicerContext[Any, Any]") -> None:  # noqa: ARG002 - whichever
        """Raises PERMISSION_DENIED for a certificate that matches no pattern."""
        facts = context.auth_context()
        if b"ssl" not in facts.get(_TRANSPORT, ()):
            return
        found = [uri.decode("utf-8", "replace") for uri in facts.get(_IDENTITIES, ())]
        if not any(fnmatchcase(uri, pattern) for uri in found for pattern in self._patterns):
            raise WeftError(Reason.PERMISSION_DENIED, "the caller's certificate is not one that may call this service")


CallCheck = Callable[[str], None]
"""Checks the access of a call's caller to a method. Raises UNAUTHENTICATED or PERMISSION_DENIED."""
_CALLER: ContextVar[Principal] = ContextVar("weft_caller", default=LOCAL)
_CHECK: ContextVar[CallCheck] = ContextVar("weft_call_check", default=lambda _: None)


def caller() -> Principal:
    """Returns the principal of the current call; LOCAL on a server without authentication."""
    return _CALLER.get()


def call_check() -> CallCheck:
    """Returns a function that checks whether the current call's caller may call another method.

    It also makes that caller the one of the task that calls it.
    """
    return _CHECK.get()


@contextmanager
def as_caller(principal: Principal) -> Iterator[None]:
    """Sets the principal for a block, such as an in-process call to a servicer."""
    before = _CALLER.set(principal)
    try:
        yield
    finally:
        _CALLER.reset(before)


_OPEN = frozenset({"grpc.health.v1.Health"})
"""Services open to unauthenticated callers."""
_REFLECTION = frozenset({"grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection"})

_OURS = "weft.api."
_MAX_REMEMBERED = 512
"""Cache size in methods, several times the number in the contract."""


@lru_cache(maxsize=_MAX_REMEMBERED)
def access_of(method: str) -> Access | None:
    """Returns the access that a method such as `/package.Service/Method` needs; None: open to everyone.

    The rpc declares it as an option; see common/v1/access.proto.
    """
    service = method.removeprefix("/").partition("/")[0]
    if service in _OPEN:
        return None
    if service in _REFLECTION:
        return VIEW_TELEMETRY
    scope = _option(method, access_pb2.access) or ""
    resource, _, role = scope.partition(":")
    return Access(Resource(resource), Role(role)) if scope else MESH_ACCESS


@lru_cache(maxsize=_MAX_REMEMBERED)
def checks_kind(method: str) -> bool:
    """Whether the servicer itself checks access, which depends on the kind of resource in the request."""
    return bool(_option(method, access_pb2.access_by_kind))


@lru_cache(maxsize=_MAX_REMEMBERED)
def checks_names(method: str) -> bool:
    """Whether the servicer itself checks the names in a request, so that scopes limited to names suffice."""
    return bool(_option(method, access_pb2.access_by_name))


def _option(method: str, option: Any) -> Any:
    """Returns an option of an rpc; None: it is not in our contract."""
    service, _, name = method.removeprefix("/").partition("/")
    rpc = _rpcs_of(service).get(name)
    return None if rpc is None else rpc.GetOptions().Extensions[option]


def _rpcs_of(service: str) -> Mapping[str, MethodDescriptor]:
    """Returns the rpcs of a service by name; empty for a service outside our contract."""
    package, _, name = service.rpartition(".")
    # Each service has a separate file, named after it.
    file = re.sub(r"\B([A-Z])", r"_\1", name).lower()
    if not package.startswith(_OURS) or not file.isidentifier():
        return {}
    try:
        descriptor = import_module(f"{package}.{file}_pb2").DESCRIPTOR
    except ModuleNotFoundError:
        return {}
    found = descriptor.services_by_name.get(name)
    return {} if found is None else cast("Mapping[str, MethodDescriptor]", found.methods_by_name)


AUTHORIZATION = "authorization"
API_KEY = "x-api-key"
_BEARER = "bearer "
_NO_KEY = "-"
"""Stands for credentials of another kind; matches no key."""
_UNIX = "unix:"
_MAX_SERVICE_CHARS = 128


class AccessGuard(RpcGuard):
    """Rejects callers without the access that a method needs."""

    @override
    def is_open(self, method: str) -> bool:
        return access_of(method) is None

    def check(self, method: str, context: Context) -> None:
        """Raises UNAUTHENTICATED or PERMISSION_DENIED; sets the caller for the servicer."""
        principal, access = self._principal(context), access_of(method)
        if access is not None and not checks_kind(method):
            check = principal.require_some if checks_names(method) else principal.require
            check(access)
        # For the rest of this task, which handles one call.
        _CALLER.set(principal)
        _CHECK.set(partial(self.check, context=context))

    @abstractmethod
    def _principal(self, context: Context) -> Principal:
        """Returns the caller. Raises UNAUTHENTICATED."""


class UserGuard(AccessGuard):
    """Tells the user that runs a server without keys from other users of the machine, who may change nothing.

    It asks for each call: gRPC does not tell when a connection ends, after which another user may get its port.
    """

    def __init__(self) -> None:
        self._own_ends: list[End] = []

    def note_end(self, address: str, port: int) -> None:
        """Adds a TCP address at which the server listens."""
        self._own_ends.append((address, port))

    @override
    def _principal(self, context: Context) -> Principal:
        peer = context.peer() or ""
        # A port that other machines reach asks for certificates.
        if peer.startswith(_UNIX) or _certified_name(context) is not None:
            return LOCAL
        end = _tcp_end(peer)
        is_own = end is not None and any(is_own_user(end, own) for own in self._own_ends)
        return LOCAL if is_own else OTHER_USER


def _tcp_end(peer: str) -> End | None:
    """Returns the address and port of a peer such as `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`; None: neither."""
    family, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if family not in {"ipv4", "ipv6"} or not port.isdecimal():
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


class AuthInterceptor(AccessGuard):
    """Authenticates the calls of a server that requires keys."""

    def __init__(self, ring: Callable[[], KeyRing], clock: Clock) -> None:
        """`ring` returns the currently valid keys."""
        self._ring = ring
        self._clock = clock

    @override
    def _principal(self, context: Context) -> Principal:
        metadata = tuple(context.invocation_metadata() or ())
        shown = [key for key, _ in metadata if key in (AUTHORIZATION, API_KEY)]
        # Reject duplicate headers: a proxy may have checked the other one.
        presented = presented_key(dict(metadata)) if len(shown) == len(set(shown)) else _NO_KEY
        if presented is None:
            if (context.peer() or "").startswith(_UNIX):
                return LOCAL
            name = _certified_name(context)
            if name is not None:
                return service_principal(name)
        return authenticate(self._ring(), presented, self._clock.utc_now())


def presented_key(metadata: Mapping[str, str | bytes]) -> str | None:
    """Returns the key in a call's headers, or None. Credentials that are not a bearer token count as an unknown key.

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
    """Returns the name in a verified client certificate, or None."""
    about = context.auth_context() or {}
    for field in ("peer_uri", "x509_subject_alternative_name", "x509_common_name"):
        names = about.get(field)
        if names:
            return bytes(next(iter(names))).decode("utf-8", "replace")[:_MAX_SERVICE_CHARS]
    return None
