"""ConfigurationService over gRPC: reloads the configuration of a process."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from typing_extensions import override

from weft.api.operations.v1 import configuration_service_pb2 as pb
from weft.api.operations.v1 import configuration_service_pb2_grpc
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft_app.compose")

Reload = Callable[[bool], Awaitable[pb.ReloadConfigurationResponse]]
"""Reloads the configuration. With True it only returns what would change."""


class ConfigurationService(AnsweringServicer, Service, configuration_service_pb2_grpc.ConfigurationServiceServicer):
    """Runs one reload at a time, to its end even if the caller disconnects."""

    service_names = (pb.DESCRIPTOR.services_by_name["ConfigurationService"].full_name,)

    def __init__(self, reload: Reload) -> None:
        self._reload = reload
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[pb.ReloadConfigurationResponse]] = set()

    @override
    def register(self, server: grpc.aio.Server) -> None:
        add: Any = configuration_service_pb2_grpc.add_ConfigurationServiceServicer_to_server
        add(self, server)

    @override
    async def start(self) -> None:
        """Does nothing: reloads start with calls."""

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Cancels running reloads."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reload(self, dry_run: bool) -> pb.ReloadConfigurationResponse:
        """Reloads after all earlier calls have ended. Raises as the reload."""
        task = asyncio.create_task(self._in_turn(dry_run), name="reload")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The reload must continue if the caller disconnects.
        return await asyncio.shield(task)

    async def _in_turn(self, dry_run: bool) -> pb.ReloadConfigurationResponse:
        try:
            async with self._turn:
                return await self._reload(dry_run)
        except WeftError as error:
            log.warning("the configuration is not reloaded", why=error.message)
            raise
        except Exception:
            log.exception("a reload failed")
            raise

    async def ReloadConfiguration(  # noqa: N802 - the name of the rpc
        self,
        request: pb.ReloadConfigurationRequest,
        context: Any,  # noqa: ARG002
    ) -> pb.ReloadConfigurationResponse:
        """See the contract."""
        return await self.reload(request.dry_run)
