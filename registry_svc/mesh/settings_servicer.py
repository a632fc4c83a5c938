"""How operators change what holds for the whole mesh."""

# ruff: noqa: N802 - the methods are called as in the contract

from typing import Any

import grpc

from registry_svc.mesh.messages import settings_message
from registry_svc.mesh.settings import SettingsDesk
from weft.api.registry.v1 import settings_service_pb2, settings_service_pb2_grpc
from weft.kernel.rpc import answering

Context = grpc.aio.ServicerContext[Any, Any]


class SettingsServicer(settings_service_pb2_grpc.SettingsServiceServicer):
    """See SettingsService in the contract."""

    def __init__(self, settings: SettingsDesk) -> None:
        self._settings = settings

    async def GetSettings(
        self, request: settings_service_pb2.GetSettingsRequest, context: Context
    ) -> settings_service_pb2.GetSettingsResponse:
        """See the contract."""
        del request
        async with answering(context):
            return settings_service_pb2.GetSettingsResponse(settings=settings_message(self._settings.current()))

    async def UpdateSettings(
        self, request: settings_service_pb2.UpdateSettingsRequest, context: Context
    ) -> settings_service_pb2.UpdateSettingsResponse:
        """See the contract."""
        async with answering(context):
            wanted = request.allow_cloud_fallback if request.HasField("allow_cloud_fallback") else None
            changed = await self._settings.update(wanted)
            return settings_service_pb2.UpdateSettingsResponse(settings=settings_message(changed))
