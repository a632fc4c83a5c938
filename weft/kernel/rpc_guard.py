"""Interceptors that check each call of a gRPC server before a servicer runs; one checks peer certificates."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from fnmatch import fnmatchcase
from inspect import isasyncgenfunction
from typing import Any

import grpc

from weft.kernel.errors import WeftError
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
    """An interceptor that refuses calls. What `check` raises becomes the call's status."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Any, Any]] = {}
        """A method's handler and the guarded one, made once: there are as many as the server has methods."""

    @abstractmethod
    def check(self, method: str, context: Context) -> None:
        """One look at a call of `/package.Service/Method`. Raises the WeftError to refuse it with.

        It runs in the call's own task: what it sets in context variables, the servicer reads.
        """

    def is_open(self, method: str) -> bool:  # noqa: ARG002 - for those that leave methods open
        """Whether calls of a method need no look."""
        return False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
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
