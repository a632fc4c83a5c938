"""gRPC servicer of router sessions."""

from typing import Any

import grpc
from typing_extensions import override

from registry_svc.config import RegistryConfig
from registry_svc.routers.router_sessions import RouterSessions
from weft.api.registry.v1 import router_session_service_pb2 as pb
from weft.api.registry.v1 import router_session_service_pb2_grpc
from weft.kernel.field_rules import check_message
from weft.kernel.rpc import answering
from weft.kernel.timestamps import duration_of

Context = grpc.aio.ServicerContext[Any, Any]


class RouterSessionServicer(router_session_service_pb2_grpc.RouterSessionServiceServicer):
    """See RouterSessionService in the contract."""

    def __init__(self, sessions: RouterSessions, config: RegistryConfig) -> None:
        self._sessions = sessions
        self._config = config

    @override
    async def RegisterRouter(self, request: pb.RegisterRouterRequest, context: Context) -> pb.RegisterRouterResponse:
        async with answering(context):
            check_message(request)
            await self._sessions.register(request)
            return pb.RegisterRouterResponse(
                beat_interval=duration_of(self._config.router_beat_interval_seconds),
                session_lifetime=duration_of(self._config.router_session_seconds),
            )

    @override
    async def BeatRouter(self, request: pb.BeatRouterRequest, context: Context) -> pb.BeatRouterResponse:
        async with answering(context):
            check_message(request)
            await self._sessions.beat(request)
            return pb.BeatRouterResponse()

    @override
    async def UnregisterRouter(
        self, request: pb.UnregisterRouterRequest, context: Context
    ) -> pb.UnregisterRouterResponse:
        async with answering(context):
            await self._sessions.unregister(request.name, request.incarnation)
            return pb.UnregisterRouterResponse()
