"""The registry as a service: what `weft.host` composes."""

from collections.abc import Sequence

import grpc

from registry_svc.catalogue import Catalogue
from registry_svc.config import RegistryConfig
from registry_svc.core import RegistryCore
from registry_svc.declarations import Declarations
from registry_svc.expiry import Expiry
from registry_svc.roster import Roster
from registry_svc.servicers.declarations import DeclarationServicer
from registry_svc.servicers.join_tokens import JoinTokenServicer
from registry_svc.servicers.registry import RegistryServicer
from registry_svc.servicers.runner_sessions import RunnerSessionServicer
from registry_svc.store.sql import SqlStore
from registry_svc.sweeper import Sweeper
from registry_svc.tokens import JoinTokens
from weft.api.registry.v1 import (
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    join_token_service_pb2,
    join_token_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
    runner_session_service_pb2,
    runner_session_service_pb2_grpc,
)
from weft.kernel.clock import Clock, SystemClock

_SERVICE_NAMES = tuple(
    service.full_name
    for module in (
        registry_service_pb2,
        runner_session_service_pb2,
        declaration_service_pb2,
        join_token_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)


class RegistryService:
    """See weft.kernel.service.Service. Calls outside of start and stop are answered with SHUTTING_DOWN."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core
        self._expiry = Expiry(core)
        self._sweeper = Sweeper(self._expiry, core.clock, core.config.sweep_interval_seconds)

    @property
    def service_names(self) -> Sequence[str]:
        """See Service.service_names."""
        return _SERVICE_NAMES

    def register(self, server: grpc.aio.Server) -> None:
        """See Service.register."""
        core = self._core
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(RegistryServicer(Catalogue(core)), server)
        runner_session_service_pb2_grpc.add_RunnerSessionServiceServicer_to_server(
            RunnerSessionServicer(Roster(core), core.config), server
        )
        declaration_service_pb2_grpc.add_DeclarationServiceServicer_to_server(
            DeclarationServicer(Declarations(core), core.config), server
        )
        join_token_service_pb2_grpc.add_JoinTokenServiceServicer_to_server(JoinTokenServicer(JoinTokens(core)), server)

    async def start(self) -> None:
        """See Service.start; raises ALREADY_EXISTS when another registry runs on the same database."""
        await self._core.start()
        self._expiry.start()
        self._sweeper.start()

    async def stop(self, grace_seconds: float) -> None:
        """See Service.stop; watchers are told at once."""
        await self._sweeper.stop()
        await self._core.stop(grace_seconds)


def build(config: RegistryConfig, *, clock: Clock | None = None) -> RegistryService:
    """A registry on its database, not yet started; `clock` defaults to the machine's."""
    return RegistryService(RegistryCore(SqlStore(config.database_url), clock or SystemClock(), config))
