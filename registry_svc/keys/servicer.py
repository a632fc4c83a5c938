"""gRPC servicers of API keys and join tokens."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import grpc
from typing_extensions import override

from registry_svc.keys.api_keys import ApiKeys
from registry_svc.keys.join_tokens import JoinTokens
from registry_svc.keys.key_store import ApiKey, key_message, verifier_message
from registry_svc.mesh.domain import JoinToken
from registry_svc.mesh.records import converted
from weft.api.registry.v1 import join_token_service_pb2 as token_pb
from weft.api.registry.v1 import join_token_service_pb2_grpc, key_service_pb2_grpc
from weft.api.registry.v1 import key_service_pb2 as pb
from weft.kernel.errors import invalid_field
from weft.kernel.field_rules import check_message
from weft.kernel.principal import parse_scopes
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller
from weft.kernel.timestamps import optional_stamp, stamp_of

MAX_GRACE_SECONDS = 30 * 86_400.0
"""Maximum grace period of a rotation."""
Context = grpc.aio.ServicerContext[Any, Any]


async def snapshot_message(pepper: bytes, keys: Sequence[ApiKey]) -> pb.WatchKeysResponse:
    """Returns the first response of a watch. Lets other tasks run, since a large one takes long."""
    return pb.WatchKeysResponse(snapshot=pb.KeySnapshot(pepper=pepper, keys=await converted(keys, verifier_message)))


def token_message(token: JoinToken) -> token_pb.JoinToken:
    """Returns a token without its secret."""
    return token_pb.JoinToken(
        id=token.id,
        description=token.description,
        create_time=stamp_of(token.created_at),
        expire_time=optional_stamp(token.expires_at),
    )


def to_grace(request: pb.RotateKeyRequest) -> timedelta | None:
    """Returns the grace period of the old secret; None if the request has none. Raises INVALID_ARGUMENT."""
    if not request.HasField("grace"):
        return None
    seconds = request.grace.seconds + request.grace.nanos / 1e9
    if not 0 <= seconds <= MAX_GRACE_SECONDS:
        raise invalid_field("grace", f"must be 0 to {MAX_GRACE_SECONDS:.0f} seconds, or not set")
    return timedelta(seconds=seconds)


class KeyServicer(key_service_pb2_grpc.KeyServiceServicer):
    """See KeyService in the contract."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    @override
    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        async with answering(context):
            check_message(request)
            parse_scopes(request.scopes, "scopes")
            key, text = await self._keys.create(request, caller())
            return pb.CreateKeyResponse(key=key_message(key), text=text)

    @override
    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        del request
        async with answering(context):
            return pb.ListKeysResponse(keys=[key_message(key) for key in self._keys.newest_first()])

    @override
    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        async with answering(context):
            check_message(request)
            await self._keys.revoke(request.id, caller())
            return pb.RevokeKeyResponse()

    @override
    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.RotateKeyResponse:
        async with answering(context):
            check_message(request)
            key, text = await self._keys.rotate(request.id, to_grace(request), caller())
            until = optional_stamp(key.previous_expires_at or key.rotated_at)
            return pb.RotateKeyResponse(key=key_message(key), text=text, old_expire_time=until)

    # See RegistryServicer.Watch for why it is a coroutine.
    @override
    async def WatchKeys(  # type: ignore[override]
        self, request: pb.WatchKeysRequest, context: Context
    ) -> None:
        del request
        async with answering(context):
            pepper, keys, watcher = self._keys.watch()
            with watcher:
                await context.write(await snapshot_message(pepper, keys))
                async for change in watcher:
                    await context.write(change)


class JoinTokenServicer(join_token_service_pb2_grpc.JoinTokenServiceServicer):
    """See JoinTokenService in the contract."""

    def __init__(self, tokens: JoinTokens) -> None:
        self._tokens = tokens

    @override
    async def CreateJoinToken(
        self, request: token_pb.CreateJoinTokenRequest, context: Context
    ) -> token_pb.CreateJoinTokenResponse:
        async with answering(context):
            check_message(request)
            token, text = await self._tokens.create(request)
            return token_pb.CreateJoinTokenResponse(join_token=token_message(token), token=text)

    @override
    async def ListJoinTokens(
        self, request: token_pb.ListJoinTokensRequest, context: Context
    ) -> token_pb.ListJoinTokensResponse:
        del request
        async with answering(context):
            tokens = [token_message(token) for token in self._tokens.newest_first()]
            return token_pb.ListJoinTokensResponse(join_tokens=tokens)

    @override
    async def RevokeJoinToken(
        self, request: token_pb.RevokeJoinTokenRequest, context: Context
    ) -> token_pb.RevokeJoinTokenResponse:
        async with answering(context):
            check_message(request)
            await self._tokens.revoke(request.id)
            return token_pb.RevokeJoinTokenResponse()

    @override
    async def CheckJoinToken(
        self, request: token_pb.CheckJoinTokenRequest, context: Context
    ) -> token_pb.CheckJoinTokenResponse:
        async with answering(context):
            return token_pb.CheckJoinTokenResponse(join_token=token_message(self._tokens.check(request.token)))
