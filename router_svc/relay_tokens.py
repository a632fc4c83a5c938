"""Whether somebody may join: what the registry says of a token, asked with bounds."""

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

import grpc

from router_svc.policy.token_refusals import TokenRefusals
from weft.api.registry.v1 import join_token_service_pb2, join_token_service_pb2_grpc
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

if TYPE_CHECKING:
    from weft.api.registry.v1.join_token_service_pb2_grpc import JoinTokenServiceAsyncStub

CHECK_SECONDS = 5.0
MAX_CHECKS = 64
"""Tokens that are being checked at once."""
MAX_TOKEN_CHARS = 512
MAX_KNOWN_TOKENS = 4096


class TokenGate:
    """Checks tokens. One that was good before is always looked at, however many wrong ones come beside it."""

    def __init__(self, registry: grpc.aio.Channel, clock: Clock) -> None:
        self._tokens = cast("JoinTokenServiceAsyncStub", join_token_service_pb2_grpc.JoinTokenServiceStub(registry))
        self._clock = clock
        self._refusals = TokenRefusals()
        self._known: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of tokens that were good when they were last shown."""
        self._checking = 0

    async def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Return when the caller shows a good token.

        Raises UNAUTHENTICATED when it does not, RATE_LIMIT_EXCEEDED after too many wrong ones, SERVICE_UNAVAILABLE when
        there is nobody to ask.
        """
        token, peer = _token_of(context.invocation_metadata() or ()), context.peer().rpartition(":")[0]
        digest = sha256(token.encode()).digest()
        wait = 0.0 if digest in self._known else self._refusals.wait_seconds(peer, self._clock.monotonic())
        if wait > 0 or self._checking >= MAX_CHECKS:
            raise WeftError(
                Reason.RATE_LIMIT_EXCEEDED, "too many join tokens are being tried", retry_after_seconds=max(wait, 1.0)
            )
        self._checking += 1
        try:
            await self._ask(token)
        except WeftError as error:
            if error.reason is Reason.UNAUTHENTICATED:
                self._known.pop(digest, None)
                self._refusals.refused(peer, self._clock.monotonic())
            raise
        finally:
            self._checking -= 1
        self._remember(digest)

    async def _ask(self, token: str) -> None:
        try:
            request = join_token_service_pb2.CheckJoinTokenRequest(token=token)
            await self._tokens.CheckJoinToken(request, timeout=CHECK_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _check_error(error_from_call(error, Reason.SERVICE_UNAVAILABLE)) from None

    def _remember(self, digest: bytes) -> None:
        self._known[digest] = None
        self._known.move_to_end(digest)
        while len(self._known) > MAX_KNOWN_TOKENS:
            self._known.popitem(last=False)


def _token_of(metadata: Iterable[Any]) -> str:
    given = [value for key, value in metadata if key == "authorization"]
    scheme, _, token = str(given[0]).partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not 0 < len(token) <= MAX_TOKEN_CHARS:
        raise WeftError(Reason.UNAUTHENTICATED, "a join token is needed; make one with `weft runner token create`")
    return token


def _check_error(error: WeftError) -> WeftError:
    if error.reason is Reason.UNAUTHENTICATED:
        return WeftError(Reason.UNAUTHENTICATED, "the join token is not good; make another: weft runner token create")
    return WeftError(Reason.SERVICE_UNAVAILABLE, "the token cannot be checked now, because the registry is away")
