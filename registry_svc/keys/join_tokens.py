"""Join tokens of dial-out runners. Only a hash of each secret is stored."""

import hmac
import secrets
import string
from dataclasses import replace
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

import grpc
from typing_extensions import override

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.domain import JoinToken
from registry_svc.mesh.policy.limits import require_room
from weft.api.registry.v1 import join_token_service_pb2 as token_pb
from weft.api.registry.v1 import join_token_service_pb2_grpc
from weft.api.registry.v1.join_token_service_pb2 import CreateJoinTokenRequest
from weft.kernel.clock import seconds_ahead
from weft.kernel.errors import WeftError
from weft.kernel.field_rules import check_message
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.rpc import AnsweringServicer
from weft.kernel.timestamps import optional_stamp, seconds_of, stamp_of

log = get_logger("weft.registry")

ID_CHARS = 12
SECRET_BYTES = 32
MAX_TOKEN_CHARS = 256

_PREFIX = "wjt"
_ID_ALPHABET = string.ascii_lowercase + string.digits
# Compared if the id is unknown, so that a wrong id takes as long as a wrong secret.
_NO_HASH = "0" * 64


class JoinTokens:
    """Creates, lists, revokes and checks join tokens."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    async def create(self, request: CreateJoinTokenRequest) -> tuple[JoinToken, str]:
        """Creates a token from a valid request. Returns it and its full text, which is shown only once.

        Raises TOO_MANY_RESOURCES.
        """
        return await self._core.write(lambda: self._create(request))

    def newest_first(self) -> list[JoinToken]:
        """Returns all tokens, including expired ones."""
        self._core.require_open()
        return sorted(self._core.join_tokens.values(), key=lambda token: (token.created_at, token.id), reverse=True)

    async def revoke(self, token_id: str) -> None:
        """Deletes a token. Raises NOT_FOUND."""
        await self._core.write(lambda: self._revoke(token_id))

    def check(self, text: str) -> JoinToken:
        """Returns the token for `text`. Raises UNAUTHENTICATED, without a reason."""
        self._core.require_open()
        token_id, secret = _parsed(text)
        token = self._core.join_tokens.get(token_id)
        same = hmac.compare_digest(_hash(secret), _NO_HASH if token is None else token.secret_sha256)
        if token is None or not same or _is_expired(token, self._core.clock.utc_now()):
            raise WeftError(
                Reason.UNAUTHENTICATED, "the join token is invalid; request a new one from an operator of the mesh"
            )
        return token

    async def sweep(self) -> None:
        """Corrects times that are in the future because the clock was set back."""
        self._core.require_open()
        if self._ahead():
            await self._core.writer.run(self._bring_back)

    async def _bring_back(self) -> None:
        for token in self._ahead():
            await self._core.store.save_join_token(token)
            self._core.join_tokens[token.id] = token
            log.warning("a join token has a creation time in the future: the clock was set back", id=token.id)

    def _ahead(self) -> list[JoinToken]:
        """Returns corrected copies of tokens with times in the future."""
        now = self._core.clock.utc_now()
        found: list[JoinToken] = []
        for token in self._core.join_tokens.values():
            ahead = seconds_ahead(token.created_at, now)
            if ahead:
                expires_at = None if token.expires_at is None else token.expires_at - ahead
                found.append(replace(token, created_at=now, expires_at=expires_at))
        return found

    async def _create(self, request: CreateJoinTokenRequest) -> tuple[JoinToken, str]:
        now, limit = self._core.clock.utc_now(), self._core.config.max_join_tokens
        if len(self._core.join_tokens) >= limit:
            await self._forget_expired(now)
        require_room("join tokens", len(self._core.join_tokens), 1, limit)
        token_id, secret = _new_token_id(), secrets.token_hex(SECRET_BYTES)
        token = JoinToken(
            id=token_id,
            description=request.description,
            secret_sha256=_hash(secret),
            created_at=now,
            expires_at=now + timedelta(seconds=seconds_of(request.lifetime)) if request.HasField("lifetime") else None,
        )
        await self._core.store.save_join_token(token)
        self._core.join_tokens[token_id] = token
        log.info("join token made", id=token_id)
        return token, f"{_PREFIX}_{token_id}_{secret}"

    async def _revoke(self, token_id: str) -> None:
        if token_id not in self._core.join_tokens:
            raise WeftError(Reason.NOT_FOUND, "there is no join token with this id")
        await self._delete(token_id)
        log.info("join token revoked", id=token_id)

    async def _forget_expired(self, now: datetime) -> None:
        for token in [token for token in self._core.join_tokens.values() if _is_expired(token, now)]:
            await self._delete(token.id)

    async def _delete(self, token_id: str) -> None:
        await self._core.store.delete_join_token(token_id)
        del self._core.join_tokens[token_id]


def _new_token_id() -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_CHARS))


def _parsed(text: str) -> tuple[str, str]:
    """Returns id and secret; for an invalid text, an id that no token has."""
    parts = text.split("_") if len(text) <= MAX_TOKEN_CHARS else []
    if len(parts) != 3 or parts[0] != _PREFIX:
        return "", ""
    return parts[1], parts[2]


def _hash(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


def _is_expired(token: JoinToken, now: datetime) -> bool:
    return token.expires_at is not None and now >= token.expires_at


Context = grpc.aio.ServicerContext[Any, Any]


def token_message(token: JoinToken) -> token_pb.JoinToken:
    """Returns a token without its secret."""
    return token_pb.JoinToken(
        id=token.id,
        description=token.description,
        create_time=stamp_of(token.created_at),
        expire_time=optional_stamp(token.expires_at),
    )


class JoinTokenServicer(AnsweringServicer, join_token_service_pb2_grpc.JoinTokenServiceServicer):
    """See JoinTokenService in the contract."""

    def __init__(self, tokens: JoinTokens) -> None:
        self._tokens = tokens

    @override
    async def CreateJoinToken(
        self, request: token_pb.CreateJoinTokenRequest, context: Context
    ) -> token_pb.CreateJoinTokenResponse:
        check_message(request)
        token, text = await self._tokens.create(request)
        return token_pb.CreateJoinTokenResponse(join_token=token_message(token), token=text)

    @override
    async def ListJoinTokens(
        self, request: token_pb.ListJoinTokensRequest, context: Context
    ) -> token_pb.ListJoinTokensResponse:
        del request
        tokens = [token_message(token) for token in self._tokens.newest_first()]
        return token_pb.ListJoinTokensResponse(join_tokens=tokens)

    @override
    async def RevokeJoinToken(
        self, request: token_pb.RevokeJoinTokenRequest, context: Context
    ) -> token_pb.RevokeJoinTokenResponse:
        check_message(request)
        await self._tokens.revoke(request.id)
        return token_pb.RevokeJoinTokenResponse()

    @override
    async def CheckJoinToken(
        self, request: token_pb.CheckJoinTokenRequest, context: Context
    ) -> token_pb.CheckJoinTokenResponse:
        return token_pb.CheckJoinTokenResponse(join_token=token_message(self._tokens.check(request.token)))
