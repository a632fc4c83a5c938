"""Join tokens of dial-out runners, and the machines that joined with them. Only a hash of each secret is stored.

A machine makes its own credential, and presents it with the token. At the first time the credential gets the rights of
the token, which ends unless it is reusable.
"""

import hmac
import re
import secrets
import string
from dataclasses import replace
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

import grpc
from typing_extensions import override

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.events import events_for
from registry_svc.mesh.policy.joining import check_name_pattern
from registry_svc.mesh.policy.limits import require_room
from registry_svc.mesh.states import JoinToken
from weft.api.registry.v1 import join_token_service_pb2 as token_pb
from weft.api.registry.v1 import join_token_service_pb2_grpc
from weft.api.registry.v1.event_pb2 import EVENT_REASON_WITHDRAWN
from weft.api.registry.v1.join_token_service_pb2 import CreateJoinTokenRequest
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import seconds_ahead
from weft.kernel.time.timestamps import optional_stamp, seconds_of, stamp_of

log = get_logger("weft.registry")

ID_CHARS = 12
SECRET_BYTES = 32
MIN_SECRET_CHARS = 32
MAX_TOKEN_CHARS = 256
MAX_SHOWN_NAMES = 100

DEFAULT_LIFETIME = timedelta(days=7)

_PREFIX = "wjt"
_MACHINE_PREFIX = "wjm"
_ID_ALPHABET = string.ascii_lowercase + string.digits
_MACHINE_ID = re.compile(f"[a-z0-9]{{{ID_CHARS}}}")
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
        """Returns all tokens and machines, including expired tokens."""
        self._core.require_open()
        return sorted(self._core.join_tokens.values(), key=lambda token: (token.created_at, token.id), reverse=True)

    async def revoke(self, token_id: str) -> None:
        """Deletes a token or machine, and the runners that joined with it. Raises NOT_FOUND."""
        await self._core.write(lambda: self._revoke(token_id))

    async def admit(self, text: str, machine: str) -> JoinToken:
        """Returns the machine of a credential, or the token for `text`, which a new machine uses up unless reusable.

        Raises UNAUTHENTICATED, without a reason for a wrong token.
        """
        self._core.require_open()
        known, token = self._find(machine, _MACHINE_PREFIX), self._find(text, _PREFIX)
        if token is None or token.reusable:
            if found := known or token:
                return found
            raise WeftError(
                Reason.UNAUTHENTICATED, "the join token is invalid; request a new one from an operator of the mesh"
            )
        machine_id, secret = _parsed(machine, _MACHINE_PREFIX)
        if _MACHINE_ID.fullmatch(machine_id) is None or len(secret) < MIN_SECRET_CHARS:
            raise WeftError(
                Reason.UNAUTHENTICATED, "this join token requires the credential of a machine; update weft there"
            )
        return await self._core.write(lambda: self._exchange(token, machine_id, _hash(secret)))

    def _find(self, text: str, prefix: str) -> JoinToken | None:
        """Returns the valid token or machine for a credential with this prefix."""
        token_id, secret = _parsed(text, prefix)
        token = self._core.join_tokens.get(token_id)
        same = hmac.compare_digest(_hash(secret), _NO_HASH if token is None else token.secret_sha256)
        if token is None or not same or token.machine != (prefix == _MACHINE_PREFIX):
            return None
        return None if _is_expired(token, self._core.clock.utc_now()) else token

    async def _exchange(self, token: JoinToken, machine_id: str, secret_sha256: str) -> JoinToken:
        """Replaces a token by a machine with its rights."""
        earlier = self._core.join_tokens.get(machine_id)
        is_used = token.id not in self._core.join_tokens
        if is_used or (earlier and not (earlier.machine and hmac.compare_digest(earlier.secret_sha256, secret_sha256))):
            raise WeftError(Reason.UNAUTHENTICATED, "the join token was used already; request a new one")
        machine = replace(
            token,
            id=machine_id,
            secret_sha256=secret_sha256,
            created_at=self._core.clock.utc_now(),
            expires_at=None,
            machine=True,
            names="" if earlier is None else earlier.names,
        )
        await self._core.store.exchange_join_token(token.id, machine)
        del self._core.join_tokens[token.id]
        self._core.join_tokens[machine_id] = machine
        log.info("machine joined", id=machine_id, token=token.id)
        return machine

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
        require_room("join tokens and machines", len(self._core.join_tokens), 1, limit)
        token_id, secret = _new_token_id(), secrets.token_hex(SECRET_BYTES)
        has_lifetime = request.HasField("lifetime")
        token = JoinToken(
            id=token_id,
            description=request.description,
            secret_sha256=_hash(secret),
            created_at=now,
            expires_at=now + (timedelta(seconds=seconds_of(request.lifetime)) if has_lifetime else DEFAULT_LIFETIME),
            name_pattern=request.name_pattern,
            pool=request.pool,
            reusable=request.reusable,
        )
        await self._core.store.save_join_token(token)
        self._core.join_tokens[token_id] = token
        log.info("join token made", id=token_id)
        return token, f"{_PREFIX}_{token_id}_{secret}"

    async def _revoke(self, token_id: str) -> None:
        if token_id not in self._core.join_tokens:
            raise WeftError(Reason.NOT_FOUND, "there is no join token with this id")
        members = [state for state in self._core.mesh if state.profile.joined_by == token_id]
        if members:
            await self._core.store.delete_sessions([state.session.id for state in members])
            gone = [row for state in members for row in state.rows() if not self._core.mesh.is_declared(*row)]
            why = "the machine of its runner was revoked"
            self._core.publish(self._core.mesh.forget(members), events_for(gone, EVENT_REASON_WITHDRAWN, why))
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


def _parsed(text: str, prefix: str) -> tuple[str, str]:
    """Returns id and secret; for an invalid text, an id that no token has."""
    parts = text.split("_") if len(text) <= MAX_TOKEN_CHARS else []
    if len(parts) != 3 or parts[0] != prefix:
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
        name_pattern=token.name_pattern,
        pool=token.pool,
        reusable=token.reusable,
        machine=token.machine,
        names=token.names.split()[:MAX_SHOWN_NAMES],
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
        check_name_pattern(request.name_pattern)
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
        admitted = await self._tokens.admit(request.token, request.machine)
        return token_pb.CheckJoinTokenResponse(join_token=token_message(admitted))
