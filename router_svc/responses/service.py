"""The keeping of answers as a service beside the router's own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
import structlog

from router_svc.responses.config import ResponseLimits
from router_svc.responses.keeper import ResponseKeeper
from router_svc.responses.servicer import StoredResponseServicer
from router_svc.responses.sql import ResponseTable
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import stored_response_service_pb2, stored_response_service_pb2_grpc
from weft.durable.responses import ResponseStore
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.service import start_restarting, stop_tasks

if TYPE_CHECKING:
    import asyncio

log = structlog.get_logger("weft.router")


def build(database: RouterDatabase, limits: ResponseLimits, *, clock: Clock | None = None) -> "ResponseService":
    """The keeping of answers in a database, not started."""
    return ResponseService(database, limits, clock or SystemClock())


class ResponseService:
    """See weft.kernel.service.Service."""

    def __init__(self, database: RouterDatabase, limits: ResponseLimits, clock: Clock) -> None:
        self._database = database
        self._limits = limits
        self._clock = clock
        self._keeper = ResponseKeeper(ResponseTable(database), limits, clock)
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def store(self) -> ResponseStore:
        """The port for gateways in this very process."""
        return self._keeper

    @property
    def service_names(self) -> Sequence[str]:
        """See Service.service_names."""
        return (stored_response_service_pb2.DESCRIPTOR.services_by_name["StoredResponseService"].full_name,)

    def register(self, server: grpc.aio.Server) -> None:
        """See Service.register."""
        stored_response_service_pb2_grpc.add_StoredResponseServiceServicer_to_server(
            StoredResponseServicer(self._keeper), server
        )

    async def start(self) -> None:
        """See Service.start."""
        await self._database.open()
        await self._sweep_once()
        self._sweeping = start_restarting(self._sweep, name="response-sweeper", clock=self._clock)

    async def stop(self, grace_seconds: float) -> None:  # noqa: ARG002 - nothing here takes long
        """See Service.stop."""
        if self._sweeping is not None:
            task, self._sweeping = self._sweeping, None
            await stop_tasks([task])
            await self._database.close()

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(self._limits.sweep_interval_seconds)
            await self._sweep_once()

    async def _sweep_once(self) -> None:
        """Housekeeping: a disk that is full ends no service. The next round does again what this one could not."""
        try:
            await self._keeper.sweep()
        except WeftError as error:
            log.error("responses were not swept", reason=error.reason.name)  # noqa: TRY400 - the cause is logged
