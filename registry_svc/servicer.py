"""gRPC in front of the roster: translation only."""

# ruff: noqa: N802 - the methods are called as in the contract

from typing import Any

import grpc

from registry_svc.config import RegistryConfig
from registry_svc.messages import change_message, model_message, opened, runner_message, snapshot_message
from registry_svc.requests import page_of, page_token, to_heartbeat, to_opening
from registry_svc.roster import Roster
from weft.api.registry.v1 import (
    registry_service_pb2,
    registry_service_pb2_grpc,
    runner_session_service_pb2,
    runner_session_service_pb2_grpc,
)
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import answering

Context = grpc.aio.ServicerContext[Any, Any]


class RegistryServicer(registry_service_pb2_grpc.RegistryServiceServicer):
    """See RegistryService in the contract."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    async def ListModels(
        self, request: registry_service_pb2.ListModelsRequest, context: Context
    ) -> registry_service_pb2.ListModelsResponse:
        """See the contract."""
        async with answering(context):
            after, size = page_of(request)
            models = self._roster.models_after(after, size + 1)
            return registry_service_pb2.ListModelsResponse(
                models=[model_message(model) for model in models[:size]],
                next_page_token=page_token(models[size - 1].publication.manifest.name) if len(models) > size else "",
            )

    async def GetModel(
        self, request: registry_service_pb2.GetModelRequest, context: Context
    ) -> registry_service_pb2.GetModelResponse:
        """See the contract."""
        async with answering(context):
            model = self._roster.model(request.name)
            if model is None:
                raise WeftError(Reason.MODEL_NOT_FOUND, "no model of this name is known")
            return registry_service_pb2.GetModelResponse(model=model_message(model))

    async def ListRunners(
        self, request: registry_service_pb2.ListRunnersRequest, context: Context
    ) -> registry_service_pb2.ListRunnersResponse:
        """See the contract."""
        async with answering(context):
            after, size = page_of(request)
            runners = self._roster.runners_after(after, size + 1)
            return registry_service_pb2.ListRunnersResponse(
                runners=[runner_message(runner) for runner in runners[:size]],
                next_page_token=page_token(runners[size - 1].profile.name) if len(runners) > size else "",
            )

    async def GetRunner(
        self, request: registry_service_pb2.GetRunnerRequest, context: Context
    ) -> registry_service_pb2.GetRunnerResponse:
        """See the contract."""
        async with answering(context):
            runner = self._roster.runner(request.name)
            if runner is None:
                raise WeftError(Reason.NOT_FOUND, "no runner of this name is known")
            return registry_service_pb2.GetRunnerResponse(runner=runner_message(runner))

    # A coroutine that writes ends its watcher the moment the call is cancelled; a generator would wait for the
    # garbage collector. grpc.aio takes both, the generated types know only the latter.
    async def Watch(  # type: ignore[override]
        self, request: registry_service_pb2.WatchRequest, context: Context
    ) -> None:
        """See the contract."""
        async with answering(context):
            snapshot, watcher = self._roster.watch()
            with watcher:
                await context.write(snapshot_message(snapshot, with_keys=request.include_ticket_keys))
                async for revised in watcher:
                    await context.write(change_message(revised, with_keys=request.include_ticket_keys))


class RunnerSessionServicer(runner_session_service_pb2_grpc.RunnerSessionServiceServicer):
    """See RunnerSessionService in the contract."""

    def __init__(self, roster: Roster, config: RegistryConfig) -> None:
        self._roster = roster
        self._config = config

    async def OpenSession(
        self, request: runner_session_service_pb2.OpenSessionRequest, context: Context
    ) -> runner_session_service_pb2.OpenSessionResponse:
        """See the contract."""
        async with answering(context):
            session = await self._roster.open_session(to_opening(request, self._config))
            return opened(session, self._config)

    async def Heartbeat(
        self, request: runner_session_service_pb2.HeartbeatRequest, context: Context
    ) -> runner_session_service_pb2.HeartbeatResponse:
        """See the contract."""
        async with answering(context):
            await self._roster.hear(to_heartbeat(request, self._config))
            return runner_session_service_pb2.HeartbeatResponse()

    async def CloseSession(
        self, request: runner_session_service_pb2.CloseSessionRequest, context: Context
    ) -> runner_session_service_pb2.CloseSessionResponse:
        """See the contract."""
        async with answering(context):
            await self._roster.close_session(request.session_id, request.incarnation)
            return runner_session_service_pb2.CloseSessionResponse()
