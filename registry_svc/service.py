"""The registry as a service: what `weft.host` composes."""

from collections.abc import Sequence

import grpc

from registry_svc.config import RegistryConfig
from registry_svc.roster import Roster
from registry_svc.servicer import RegistryServicer, RunnerSessionServicer
from registry_svc.store.sql import SqlStore
from registry_svc.sweeper import Sweeper
from weft.api.registry.v1 import (
    registry_service_pb2,
    registry_service_pb2_grpc,
    runner_session_service_pb2,
    runner_session_service_pb2_grpc,
)
from weft.kernel.clock import Clock, SystemClock

_SERVICE_NAMES = (
    registry_service_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name,
    runner_session_service_pb2.DESCRIPTOR.services_by_name["RunnerSessionService"].full_name,
)


class RegistryService:
    """See weft.kernel.service.Service. Calls outside of start and stop are answered with SHUTTING_DOWN."""

    def __init__(self, config: RegistryConfig, roster: Roster, sweeper: Sweeper) -> None:
        self._config = config
        self._roster = roster
        self._sweeper = sweeper

    @property
    def service_names(self) -> Sequence[str]:
        """See Service.service_names."""
        return _SERVICE_NAMES

    def register(self, server: grpc.aio.Server) -> None:
        """See Service.register."""
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryServicer(self._roster), server)
        runner_session_service_pb2_grpc.add_RunnerSessionServiceServicer_to_server(
            RunnerSessionServicer(self._roster, self._config), server
        )

    async def start(self) -> None:
        """See Service.start; raises ALREADY_EXISTS when another registry runs on the same database."""
        await self._roster.start()
        self._sweeper.start()

    async def stop(self, grace_seconds: float) -> None:
        """See Service.stop; watchers are told at once."""
        await self._sweeper.stop()
        await self._roster.stop(grace_seconds)


def build(config: RegistryConfig, *, clock: Clock | None = None) -> RegistryService:
    """A registry on its database, not yet started; `clock` defaults to the machine's."""
    clock = clock or SystemClock()
    roster = Roster(SqlStore(config.database_url), clock, config)
    return RegistryService(config, roster, Sweeper(roster, clock, config.sweep_interval_seconds))
