"""The tokens with which dial-out runners join."""

# ruff: noqa: N802 - the methods are called as in the contract

from typing import Any

import grpc

from registry_svc.keys.join_tokens import JoinTokens
from registry_svc.mesh.declaration_messages import token_message
from registry_svc.mesh.declaration_requests import to_token_wish
from weft.api.registry.v1 import join_token_service_pb2, join_token_service_pb2_grpc
from weft.kernel.names import require_name
from weft.kernel.rpc import answering

Context = grpc.aio.ServicerContext[Any, Any]


class JoinTokenServicer(join_token_service_pb2_grpc.JoinTokenServiceServicer):
    """See JoinTokenService in the contract."""

    def __init__(self, tokens: JoinTokens) -> None:
        self._tokens = tokens

    async def CreateJoinToken(
        self, request: join_token_service_pb2.CreateJoinTokenRequest, context: Context
    ) -> join_token_service_pb2.CreateJoinTokenResponse:
        """See the contract."""
        async with answering(context):
            token, text = await self._tokens.create(*to_token_wish(request))
            return join_token_service_pb2.CreateJoinTokenResponse(join_token=token_message(token), token=text)

    async def ListJoinTokens(
        self, request: join_token_service_pb2.ListJoinTokensRequest, context: Context
    ) -> join_token_service_pb2.ListJoinTokensResponse:
        """See the contract."""
        del request
        async with answering(context):
            tokens = [token_message(token) for token in self._tokens.newest_first()]
            return join_token_service_pb2.ListJoinTokensResponse(join_tokens=tokens)

    async def RevokeJoinToken(
        self, request: join_token_service_pb2.RevokeJoinTokenRequest, context: Context
    ) -> join_token_service_pb2.RevokeJoinTokenResponse:
        """See the contract."""
        async with answering(context):
            await self._tokens.revoke(require_name(request.id, "id"))
            return join_token_service_pb2.RevokeJoinTokenResponse()

    async def CheckJoinToken(
        self, request: join_token_service_pb2.CheckJoinTokenRequest, context: Context
    ) -> join_token_service_pb2.CheckJoinTokenResponse:
        """See the contract."""
        async with answering(context):
            return join_token_service_pb2.CheckJoinTokenResponse(
                join_token=token_message(self._tokens.check(request.token))
            )
