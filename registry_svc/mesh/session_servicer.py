"""How runners make themselves known and stay known."""

# ruff: noqa: N802 - the methods are called as in the contract

from typing import Any

import grpc

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.messages import opened, timestamp
from registry_svc.mesh.requests import to_heartbeat, to_opening
from registry_svc.mesh.retirements import Retirements
from registry_svc.mesh.sessions import Roster
from weft.api.registry.v1 import runner_session_service_pb2, runner_session_service_pb2_grpc
from weft.kernel.rpc import answering

Context = grpc.aio.ServicerContext[Any, Any]


class RunnerSessionServicer(runner_session_service_pb2_grpc.RunnerSessionServiceServicer):
    """See RunnerSessionService in the contract."""

    def __init__(self, roster: Roster, retirements: Retirements, core: RegistryCore) -> None:
        self._roster = roster
        self._retirements = retirements
        self._config = core.config
        self._clock = core.clock
        self._mesh_clock = core.mesh_clock

    async def OpenSession(
        self, request: runner_session_service_pb2.OpenSessionRequest, context: Context
    ) -> runner_session_service_pb2.OpenSessionResponse:
        """See the contract."""
        async with answering(context):
            session = await self._roster.open_session(to_opening(request, self._config))
            return opened(
                session,
                self._config,
                mesh_time=self._mesh_clock.utc_now(),
                registry_time=self._clock.utc_now(),
                dial_out=request.runner.dial_out,
            )

    async def Heartbeat(
        self, request: runner_session_service_pb2.HeartbeatRequest, context: Context
    ) -> runner_session_service_pb2.HeartbeatResponse:
        """See the contract."""
        async with answering(context):
            await self._roster.hear(to_heartbeat(request, self._config))
            return runner_session_service_pb2.HeartbeatResponse(
                mesh_time=timestamp(self._mesh_clock.utc_now()), registry_time=timestamp(self._clock.utc_now())
            )

    async def CloseSession(
        self, request: runner_session_service_pb2.CloseSessionRequest, context: Context
    ) -> runner_session_service_pb2.CloseSessionResponse:
        """See the contract."""
        async with answering(context):
            await self._roster.close_session(request.session_id, request.incarnation)
            return runner_session_service_pb2.CloseSessionResponse()

    async def RetireSession(
        self, request: runner_session_service_pb2.RetireSessionRequest, context: Context
    ) -> runner_session_service_pb2.RetireSessionResponse:
        """See the contract."""
        async with answering(context):
            retired = await self._retirements.retire(request.session_id, process_ended=request.process_ended)
            return runner_session_service_pb2.RetireSessionResponse(
                outcome=retired.outcome.value,  # type: ignore[arg-type]  # same numbers
                models=retired.models,
                pools=retired.pools,
            )
