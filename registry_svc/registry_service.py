"""The registry as a service: composes the features, and starts and stops them in order."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import grpc

from registry_svc.captures.captures import Captures, CaptureServicer
from registry_svc.keys.api_keys import ApiKeys, KeyServicer, SqlKeyStore
from registry_svc.keys.join_tokens import JoinTokens, JoinTokenServicer
from registry_svc.ledger.lease_store import LeaseStore
from registry_svc.ledger.ledger import Ledger
from registry_svc.ledger.policy.leases import Grant
from registry_svc.ledger.servicer import LeaseServicer
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.declarations import Declarations, SettingsManager
from registry_svc.mesh.expiry import Expiry, Retirements
from registry_svc.mesh.provider_models import CentralModelServicer, ChangeEvent
from registry_svc.mesh.runner_calls import RunnerCalls
from registry_svc.mesh.servicers import (
    DeclarationServicer,
    RegistryServicer,
    RunnerSessionServicer,
    SettingsServicer,
    WatchingProcesses,
)
from registry_svc.mesh.sessions import SessionManager
from registry_svc.mesh.store import SqlStore
from registry_svc.mesh.trials import TrialServicer
from registry_svc.mesh.unowned import UnownedModels
from registry_svc.operations.governance import build_gate
from registry_svc.operations.operations import OperationService
from registry_svc.operations.servicer import OperationServicer
from registry_svc.registry_config import RegistryConfig
from registry_svc.router_sessions import RouterSessions, RouterSessionServicer
from registry_svc.secrets.secrets import Secrets, SecretServicer, SqlSecretStore
from registry_svc.store.database import REGISTRY_OWNER, RegistryDatabase
from weft.api.operations.v1.process_service_pb2 import DatabaseSchema
from weft.api.registry.v1.lease_service_pb2 import HostMemory
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.principal import KeyRing
from weft.kernel.channels.rpc import ChannelPool
from weft.kernel.services.health import HealthCheck
from weft.kernel.telemetry.tracing import NO_TRACING, Tracing
from weft.kernel.time.clock import Clock, SystemClock
from weft.sql.address import address_of
from weft.sql.ownership import OwnerHeartbeats, StandbyPair, write_check
from weft.sql.standby import owner_watch_of
from weft.sql.store import Store
from weft.sql.sweeper import Sweeper


def _stub_module(servicer: object) -> tuple[ModuleType, str]:
    """Returns the generated module of a servicer's service, and the service's name in its package."""
    base = next(each for each in type(servicer).__mro__ if each.__module__.endswith("_pb2_grpc"))
    return sys.modules[base.__module__], base.__name__.removesuffix("Servicer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryFigures:
    """The state of a running registry."""

    hosts: Iterable[HostMemory]
    active_sessions: int
    inactive_sessions: int
    revision: int
    """Number of the last change sent to watchers."""
    watchers: int
    evictions: Mapping[str, int]
    """Evictions requested from runners since the start, by their answer."""
    has_standby: bool = False
    """Whether a standby is connected."""


class RegistryService:
    """See weft.kernel.services.service_lifecycle.Service. Calls before start or after stop fail with SHUTTING_DOWN."""

    def __init__(self, core: RegistryCore, database: RegistryDatabase, tracing: Tracing = NO_TRACING) -> None:
        """`database` is that of the core's store."""
        config = core.config
        self._database = database
        self._core = core
        self._expiry = Expiry(core)
        self._keys = ApiKeys(core, SqlKeyStore(database))
        self._tokens = JoinTokens(core)
        self._routers = RouterSessions(core, database)
        self._change_event = ChangeEvent()
        self._secrets = Secrets(core, SqlSecretStore(database), self._change_event)
        self._channels = ChannelPool(security=config.security)
        # Not the core's clock, since readers of the heartbeats use the database's clock.
        self.heartbeats = OwnerHeartbeats(
            database, REGISTRY_OWNER, SystemClock(), config.owner_silence_seconds, self._extend_grace
        )
        self._calls = calls = RunnerCalls(core, self._channels, self.heartbeats.until_current)
        self.ledger = Ledger(LeaseStore(database), core.clock, config.ledger, calls, core.of_runner)
        self._retirements = Retirements(core, self.ledger.lease_count)
        gate = build_gate(config.governance, core.clock)
        self._operations = OperationService(core, database, calls, gate, config.operations, tracing)
        self._captures = Captures(core, database, self._secrets, self._operations.operations.record_request)
        self._unowned = UnownedModels(core, calls, self.ledger.unowned_models)
        sweeps = {
            "runners": self._expiry.sweep,
            "retirements": self._retirements.sweep,
            "unowned models": self._unowned.sweep,
            "API keys": self._keys.sweep,
            "join tokens": self._tokens.sweep,
            "captures": self._captures.sweep,
        }
        self._sweeper = Sweeper("registry-sweeper", sweeps, config.sweep_interval_seconds, core.clock)
        self.watching = WatchingProcesses()
        """The processes that watch this registry."""
        operations = self._operations.operations
        declarations = Declarations(
            core, self._operations.unloader, self._secrets.has, self._change_event, self._captures.note_switch
        )
        roster = SessionManager(core, calls.incarnation_at, self.ledger.is_local_host)
        self.refusal_of = roster.refusal
        """Returns why the last session of a runner was refused, by its name; empty: it was not."""
        self._servicers = (
            CaptureServicer(self._captures),
            RegistryServicer(core, self.watching),
            RouterSessionServicer(self._routers),
            RunnerSessionServicer(roster, self._retirements, core),
            CentralModelServicer(core, self._change_event, self._secrets.value),
            DeclarationServicer(declarations, core),
            JoinTokenServicer(self._tokens),
            KeyServicer(self._keys),
            LeaseServicer(self.ledger, core.mesh_clock, self._record_release),
            OperationServicer(operations, core.name_of),
            SecretServicer(self._secrets),
            SettingsServicer(SettingsManager(core)),
            *(() if ResourceKind.TRIAL in config.kinds_off else (TrialServicer(core),)),
        )

    @property
    def removed(self) -> tuple[str, ...]:
        """Messages about stored resources of kinds that were removed or are off."""
        return self._core.removed

    @property
    def service_names(self) -> tuple[str, ...]:
        """See Service.service_names."""
        stubs = map(_stub_module, self._servicers)
        return tuple(f"{module.__name__.rpartition('.')[0]}.{name}" for module, name in stubs)

    def health_checks(self) -> Sequence[HealthCheck]:
        """Returns the check of its store."""
        return (write_check("store", self._database.write_failure, self._core.clock, services=self.service_names),)

    @property
    def known_schema(self) -> DatabaseSchema:
        """The schema revision of this release."""
        return self._database.known_schema

    async def schema(self) -> DatabaseSchema:
        """Returns the schema revisions of this release and the database."""
        return await self._database.schema()

    @property
    def key_ring(self) -> KeyRing:
        """The valid keys, for authentication in this process. Empty before the start."""
        return self._keys.ring

    def register(self, server: grpc.aio.Server) -> None:
        """See Service.register."""
        for servicer in self._servicers:
            module, name = _stub_module(servicer)
            getattr(module, f"add_{name}Servicer_to_server")(servicer, server)

    async def _record_release(self, grant: Grant, requested_by: str) -> None:
        lease = {
            "lease": grant.id,
            "host": grant.host,
            "holder": grant.holder.name,
            "purpose": grant.purpose,
            "bytes": sum(size for _, size in grant.shares),
        }
        await self._operations.operations.record_request("lease.release_requested", lease, requested_by)

    def reconfigure(self, config: RegistryConfig) -> None:
        """Applies the aliases, tenants and names of a new configuration; other settings stay unchanged."""
        self._core.reconfigure(config.aliases, config.tenants, config.configured_names)

    def figures(self) -> RegistryFigures | None:
        """Returns the values for metrics; None if the registry is not running."""
        if not self.ledger.is_running:
            return None
        core = self._core
        active = sum(state.pulse.active for state in core.mesh)
        return RegistryFigures(
            hosts=self.ledger.hosts(),
            active_sessions=active,
            inactive_sessions=len(core.mesh) - active,
            revision=core.revision,
            watchers=len(core.watchers),
            evictions=self.ledger.evictions,
            has_standby=self.heartbeats.sees_standby,
        )

    async def until_central_models(self) -> None:
        """Waits until there is a central model or a secret."""
        while not self._core.mesh.central_models and self._secrets.is_empty:
            await self._change_event.next().wait()

    async def start(self) -> None:
        """See Service.start. Raises ALREADY_EXISTS if another registry runs on the same database."""
        await self._core.start()
        try:
            await self.heartbeats.start()
            await self._keys.start()
            await self._secrets.start()
            await self.ledger.start()
            await self._operations.start()
            await self._captures.start()
            await self._routers.start()
        except BaseException:
            await self._stop_books(grace_seconds=0.0)
            await self.heartbeats.stop()
            await self._core.stop(grace_seconds=0.0)
            raise
        self._expiry.start()
        self._sweeper.start()

    async def stop(self, grace_seconds: float) -> None:
        """See Service.stop. Watchers are ended immediately."""
        await self._sweeper.stop()
        await self._stop_books(grace_seconds)
        await self.heartbeats.stop()
        await self._core.stop(grace_seconds)
        self._change_event.set()
        await self._channels.close()

    async def require_files(self, database: Store) -> None:
        """Raises INVALID_ARGUMENT naming the setting for files that do not match the keys and secrets of a database."""
        await self._keys.require_pepper_of(SqlKeyStore(database))
        await self._secrets.require_keys_of(SqlSecretStore(database))

    def _extend_grace(self) -> None:
        """Starts the grace period of a restart, because runners and routers could not reach the registry until now."""
        self._expiry.start()
        self.ledger.extend_grace()
        self._routers.extend_grace()

    async def _stop_books(self, grace_seconds: float) -> None:
        """Stops the features that need the core's database and mesh. Call it before stopping the core."""
        await self._routers.stop()
        self._keys.close()
        await self._unowned.stop()
        await self._captures.stop(grace_seconds)
        await self._operations.stop(grace_seconds)
        await self.ledger.stop(grace_seconds)


def build(config: RegistryConfig, *, clock: Clock | None = None, tracing: Tracing = NO_TRACING) -> RegistryService:
    """Returns a registry on its database, not started; `clock` defaults to the machine's."""
    store = SqlStore(config.database_url, config.address)
    return RegistryService(RegistryCore(store, clock or SystemClock(), config), store, tracing)


def build_paired(
    config: RegistryConfig, *, names_owner: bool, clock: Clock | None = None, tracing: Tracing = NO_TRACING
) -> tuple[StandbyPair, RegistryService]:
    """Returns a registry, not started, that becomes a standby if another one owns its database; and its service.

    `names_owner`: whether it gives every caller the owner's address.
    """
    clock = clock or SystemClock()
    service = build(config, clock=clock, tracing=tracing)
    watch = owner_watch_of(address_of(config.database_url), REGISTRY_OWNER, clock, config.owner_silence_seconds)
    return StandbyPair(service, REGISTRY_OWNER, watch, clock, names_owner=names_owner), service
