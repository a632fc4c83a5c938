"""API keys."""

# ruff: noqa: N802 - the methods are called as in the contract

from typing import Any

import grpc

from registry_svc.config import KeysConfig
from registry_svc.keys.api_keys import ApiKeys
from registry_svc.keys.messages import change_message, key_message, snapshot_message
from registry_svc.keys.requests import to_grace, to_wish
from registry_svc.mesh.messages import timestamp
from weft.api.registry.v1 import key_service_pb2 as pb
from weft.api.registry.v1 import key_service_pb2_grpc
from weft.kernel.names import require_name
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller

Context = grpc.aio.ServicerContext[Any, Any]


class KeyServicer(key_service_pb2_grpc.KeyServiceServicer):
    """See KeyService in the contract."""

    def __init__(self, keys: ApiKeys, config: KeysConfig) -> None:
        self._keys = keys
        self._config = config

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        """See the contract."""
        async with answering(context):
            key, text = await self._keys.create(to_wish(request), caller())
            return pb.CreateKeyResponse(key=key_message(key), text=text)

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        """See the contract."""
        del request
        async with answering(context):
            return pb.ListKeysResponse(keys=[key_message(key) for key in self._keys.newest_first()])

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        """See the contract."""
        async with answering(context):
            await self._keys.revoke(require_name(request.id, "id"), caller())
            return pb.RevokeKeyResponse()

    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.RotateKeyResponse:
        """See the contract."""
        async with answering(context):
            grace = to_grace(request, self._config)
            key, text = await self._keys.rotate(require_name(request.id, "id"), grace, caller())
            until = timestamp(key.previous_expires_at or key.rotated_at)
            return pb.RotateKeyResponse(key=key_message(key), text=text, old_expire_time=until)

    # See RegistryServicer.Watch for why it is a coroutine.
    async def WatchKeys(  # type: ignore[override]
        self, request: pb.WatchKeysRequest, context: Context
    ) -> None:
        """See the contract."""
        del request
        async with answering(context):
            pepper, keys, watcher = self._keys.watch()
            with watcher:
                await context.write(await snapshot_message(pepper, keys))
                async for change in watcher:
                    await context.write(change_message(change))
