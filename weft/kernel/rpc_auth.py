"""Authentication and authorization of gRPC calls: the access each method needs, and the caller of the current call.

The interceptors here check each call of a gRPC server before a servicer runs. An API key in the metadata counts first;
then the unix socket, which only this machine's user can reach; then a client certificate, which only services of the
mesh have.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from fnmatch import fnmatchcase
from inspect import isasyncgenfunction
from typing import Any

import grpc
from typing_extensions import override

from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.principal import (
    LOCAL,
    MESH_ACCESS,
    Access,
    KeyRing,
    Principal,
    Resource,
    Role,
    authenticate,
    require_one_key,
    service_principal,
)
from weft.kernel.reasons import Reason
from weft.kernel.rpc import answering

_KINDS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""Handler factories by whether requests and whether responses are streamed."""

Context = grpc.aio.ServicerContext[Any, Any]


class RpcGuard(ABC, grpc.aio.ServerInterceptor):
    """An interceptor that rejects calls. An error of `check` becomes the call's status."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Any]] = {}
        """A method's handler and the guarded one, created once per method of the server."""

    @abstractmethod
    def check(self, method: str, context: Context) -> None:
        """Checks a call of `/package.Service/Method`. Raises the WeftError that rejects it.

        It runs in the call's own task: what it sets in context variables, the servicer reads.
        """

    def is_open(self, method: str) -> bool:  # noqa: ARG002 - for those that leave methods open
        """Whether calls of a method are not checked."""
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
        made = self._made.get(method)
        if made is None or made[0] is not handler:
            made = self._made[method] = handler, self._guarded(handler, method)
        return made[1]

    def _guarded(self, handler: Any, method: str) -> Any:
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        guarded = self._streaming(inner, method) if isasyncgenfunction(inner) else self._answering(inner, method)
        kind = _KINDS[handler.request_streaming, handler.response_streaming]
        return kind(guarded, handler.request_deserializer, handler.response_serializer)

    def _answering(self, inner: Any, method: str) -> Any:
        async def call(request: Any, context: Context) -> Any:
            async with answering(context):
                self.check(method, context)
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
"""Keys of gRPC's authentication context: `ssl` for TLS, and the URIs of the caller's certificate."""


def allowing_clients(patterns: Sequence[str]) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """Returns interceptors that reject certificates without a URI that matches a pattern; none without patterns."""
    return (PeerGate(patterns),) if patterns else ()


class PeerGate(RpcGuard):
    """Rejects TLS callers with other certificates; calls without TLS are from this machine, and pass."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Shell patterns for URIs, such as `weft://mesh/router-*`."""
        super().__init__()
        self._patterns = tuple(patterns)

    def check(self, method: str, context: "grpc.aio.ServicerContext[Any, Any]") -> None:  # noqa: ARG002 - whichever
        """Raises PERMISSION_DENIED for a certificate that matches no pattern."""
        facts = context.auth_context()
        if b"ssl" not in facts.get(_TRANSPORT, ()):
            return
        found = [uri.decode("utf-8", "replace") for uri in facts.get(_IDENTITIES, ())]
        if not any(fnmatchcase(uri, pattern) for uri in found for pattern in self._patterns):
            raise WeftError(Reason.PERMISSION_DENIED, "the caller's certificate is not one that may call this service")


_CALLER: ContextVar[Principal] = ContextVar("weft_caller", default=LOCAL)


def caller() -> Principal:
    """The principal of the current call; LOCAL on a server that admits everyone."""
    return _CALLER.get()


def set_caller(principal: Principal) -> None:
    """Sets the principal for the rest of this task, which serves one call."""
    _CALLER.set(principal)


_OPEN = frozenset({"grpc.health.v1.Health"})
"""Services open to unauthenticated callers."""
_REFLECTION = frozenset({"grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection"})

_INFERENCE = Access(Resource.INFERENCE, Role.CREATE)
_REGISTRY, _ROUTER, _RUNNER = "weft.api.registry.v1", "weft.api.router.v1", "weft.api.runner.v1"


def _reads(resource: Resource, *methods: str) -> dict[str, Access]:
    return dict.fromkeys(methods, Access(resource, Role.VIEW))


def _creates(resource: Resource, *methods: str) -> dict[str, Access]:
    return dict.fromkeys(methods, Access(resource, Role.CREATE))


def _edits(resource: Resource, *methods: str) -> dict[str, Access]:
    return dict.fromkeys(methods, Access(resource, Role.EDIT))


def _mesh(*methods: str) -> dict[str, Access]:
    return dict.fromkeys(methods, MESH_ACCESS)


_SERVICES: dict[str, dict[str, Access]] = {
    f"{_ROUTER}.InferenceService": dict.fromkeys(
        ("Chat", "Complete", "Embed", "Rerank", "Tokenize", "GenerateImages", "Transcribe", "Speak"), _INFERENCE
    ),
    f"{_ROUTER}.PlacementService": _mesh("Place") | _reads(Resource.TELEMETRY, "ListQueues"),
    f"{_ROUTER}.RequestService": _reads(Resource.INFERENCE, "GetRequest", "ListRequests")
    | _reads(Resource.TELEMETRY, "ListClients"),
    f"{_ROUTER}.StoredResponseService": _mesh("SaveResponse", "GetResponse", "ListChain", "DeleteResponse"),
    f"{_ROUTER}.TaskService": _reads(Resource.INFERENCE, "GetTask", "ListTasks", "WatchTask")
    | _creates(Resource.INFERENCE, "SubmitTask")
    | _edits(Resource.INFERENCE, "CancelTask", "DeleteTask"),
    f"{_ROUTER}.FileService": _reads(Resource.INFERENCE, "GetFile", "ListFiles", "ReadFile")
    | _creates(Resource.INFERENCE, "UploadFile")
    | _edits(Resource.INFERENCE, "DeleteFile"),
    f"{_ROUTER}.BatchService": _reads(Resource.INFERENCE, "GetBatch", "ListBatches", "ReadBatchResults")
    | _creates(Resource.INFERENCE, "CreateBatch")
    | _edits(Resource.INFERENCE, "CancelBatch")
    | _mesh("FinishBatch"),
    f"{_ROUTER}.RelayService": _mesh("Attach"),
    f"{_RUNNER}.GenerationService": _mesh("Generate"),
    f"{_RUNNER}.EmbeddingService": _mesh("Embed"),
    f"{_RUNNER}.ModelCallService": _mesh("Rerank", "Tokenize", "GenerateImages", "Transcribe", "Speak"),
    f"{_RUNNER}.RunnerService": _reads(Resource.RUNNERS, "Describe", "GetRequest", "TailLogs")
    | _mesh("Wake", "Load", "Unload", "YieldMemory", "FlushCache"),
    f"{_REGISTRY}.RegistryService": _reads(
        Resource.MODELS,
        *("ListModels", "GetModel", "GetModelMembers", "ListPools", "GetPool", "ListAgents", "GetAgent"),
        *("ListRoutes", "GetRoute", "Watch"),
    )
    | _reads(Resource.RUNNERS, "ListRunners", "GetRunner")
    | _reads(Resource.TELEMETRY, "ListEvents", "WatchEvents"),
    f"{_REGISTRY}.DeclarationService": _edits(Resource.MODELS, "Apply", "Delete"),
    f"{_REGISTRY}.SettingsService": _reads(Resource.SETTINGS, "GetSettings")
    | _edits(Resource.SETTINGS, "UpdateSettings"),
    f"{_REGISTRY}.RunnerSessionService": _mesh("OpenSession", "Heartbeat", "CloseSession", "RetireSession"),
    f"{_REGISTRY}.LeaseService": _reads(Resource.RUNNERS, "ListHostMemory")
    | _creates(Resource.RUNNERS, "AcquireLease", "RenewLeases", "ReleaseLease")
    | _mesh("ReleaseEarlierLives"),
    f"{_REGISTRY}.JoinTokenService": _reads(Resource.RUNNERS, "ListJoinTokens")
    | _creates(Resource.RUNNERS, "CreateJoinToken")
    | _edits(Resource.RUNNERS, "RevokeJoinToken")
    | _mesh("CheckJoinToken"),
    f"{_REGISTRY}.KeyService": _reads(Resource.KEYS, "ListKeys")
    | _creates(Resource.KEYS, "CreateKey")
    | _edits(Resource.KEYS, "RevokeKey", "RotateKey")
    | _mesh("WatchKeys"),
    "weft.api.operations.v1.OperationService": _reads(
        Resource.OPERATIONS, "GetOperation", "ListOperations", "WatchOperation", "GetGovernance", "ListAuditEntries"
    )
    | _creates(Resource.OPERATIONS, "CreateOperation")
    | _edits(Resource.OPERATIONS, "CancelOperation"),
    **dict.fromkeys(_REFLECTION, _reads(Resource.TELEMETRY, "ServerReflectionInfo")),
}


def access_of(method: str) -> Access | None:
    """Returns the access that a method such as `/package.Service/Method` needs; None: open to everyone."""
    service, _, name = method.removeprefix("/").partition("/")
    if service in _OPEN:
        return None
    return _SERVICES.get(service, {}).get(name, MESH_ACCESS)


AUTHORIZATION = "authorization"
API_KEY = "x-api-key"
_BEARER = "bearer "
_NO_KEY = "-"
"""Stands for credentials of another kind: a key that matches none."""
_UNIX = "unix:"
_MAX_SERVICE_CHARS = 128


class AuthInterceptor(RpcGuard):
    """Authenticates every method of a server, where keys are required."""

    def __init__(self, ring: Callable[[], KeyRing], clock: Clock) -> None:
        """`ring` returns the currently valid keys."""
        super().__init__()
        self._ring = ring
        self._clock = clock

    @override
    def is_open(self, method: str) -> bool:
        return access_of(method) is None

    def check(self, method: str, context: Context) -> None:
        """Raises UNAUTHENTICATED or PERMISSION_DENIED; sets the caller for the servicer."""
        principal, access = self._principal(context), access_of(method)
        if access is not None:
            principal.require(access)
        set_caller(principal)

    def _principal(self, context: Context) -> Principal:
        metadata = tuple(context.invocation_metadata() or ())
        shown = [key for key, _ in metadata if key in (AUTHORIZATION, API_KEY)]
        # Of two headers with one name, a proxy may have checked the other one.
        presented = presented_key(dict(metadata)) if len(shown) == len(set(shown)) else _NO_KEY
        if presented is None:
            if (context.peer() or "").startswith(_UNIX):
                return LOCAL
            name = _certified_name(context)
            if name is not None:
                return service_principal(name)
        return authenticate(self._ring(), presented, self._clock.utc_now())


def presented_key(metadata: Mapping[str, str | bytes]) -> str | None:
    """Returns the key of a call, from either header; None: none. Non-text credentials count as an unknown key.

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
    """Returns the name in a verified client certificate; None: there is none."""
    about = context.auth_context() or {}
    for field in ("peer_uri", "x509_subject_alternative_name", "x509_common_name"):
        names = about.get(field)
        if names:
            return bytes(next(iter(names))).decode("utf-8", "replace")[:_MAX_SERVICE_CHARS]
    return None
