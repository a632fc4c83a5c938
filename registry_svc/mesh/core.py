"""Shared state of the registry's writers. Each change is committed to the store, applied, then published."""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from registry_svc.mesh.leave_out import drop_recipe
from registry_svc.mesh.mesh_state import Mesh
from registry_svc.mesh.policy.heartbeat import resumed
from registry_svc.mesh.policy.joining import Joiner
from registry_svc.mesh.records import Held
from registry_svc.mesh.session_state import SessionState
from registry_svc.mesh.store import SqlStore, StoredSession
from registry_svc.mesh.watch import EventLog, Snapshot
from registry_svc.registry_config import AliasSetting, RegistryConfig
from registry_svc.watchers import Watcher, Watchers
from registry_svc.writer import SingleWriter
from weft.api.registry.v1 import alias_pb2, event_pb2, registry_service_pb2, settings_pb2, tenant_pb2
from weft.dispatch.declared_presets import preset_of
from weft.documents.kinds import Key, key_of
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.errors.removed_features import unused_documents
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock, MeshClock
from weft.kernel.values.names import AGENT_PREFIX, ROUTE_PREFIX, ascii_name

if TYPE_CHECKING:
    from registry_svc.mesh.states import JoinToken
    from weft.api.registry.v1.router_pb2 import Router

log = get_logger("weft.registry")

RETRY_AFTER_SECONDS = 1.0

T = TypeVar("T")


class RegistryCore:
    """The state of one registry: memory, store, writer and watchers."""

    def __init__(self, store: SqlStore, clock: Clock, config: RegistryConfig) -> None:
        self.store = store
        self.clock = clock
        self.mesh_clock = MeshClock(clock)
        """Clock of tickets and permits. Set once, so that correcting the machine's clock does not invalidate them."""
        self.mesh_clock.set(clock.utc_now())
        self.config = config
        self.mesh = Mesh()
        self.join_tokens: dict[str, JoinToken] = {}
        self.configured_names = config.configured_names
        """See `RegistryConfig.configured_names`."""
        self.removed: tuple[str, ...] = ()
        """Messages about stored documents of kinds that were removed or are off."""
        self.routers: dict[str, Router] = {}
        """Routers with a session, by name."""
        self.settings = settings_pb2.MeshSettings(allow_cloud_fallback=config.allow_cloud_fallback, revision=1)
        self.writer = SingleWriter(lambda: store.is_in_doubt)
        self.events = EventLog(clock, config.max_events, config.watch_buffer_responses)
        self.watchers = Watchers[registry_service_pb2.WatchResponse](config.watch_buffer_responses)
        self._open = False
        # Revision 0 is a watcher's state before its first snapshot.
        self._revision = 1

    async def start(self) -> None:
        """Opens and loads the store. Raises ALREADY_EXISTS if another registry owns it."""
        await self.store.open()
        try:
            stored = await self.store.load()
            self.mesh.documents[ResourceKind.ALIAS].configure(map(configured_alias, self.config.aliases))
            self.mesh.documents[ResourceKind.TENANT].configure(map(configured_tenant, self.config.tenants))
            self.mesh.declare(each for each in stored.documents if key_of(each)[0] not in self.config.kinds_off)
            for session in stored.sessions:
                self.mesh.install(self._read_back(session))
            self.join_tokens = {token.id: token for token in stored.join_tokens}
            self.events.restore(stored.events)
            if stored.settings is None:
                await self.store.save_settings(self.settings)
            self.settings = stored.settings or self.settings
            self.removed = (*stored.removed, *self._off(map(key_of, stored.documents)))
        except BaseException:
            self.mesh = Mesh()
            await self.store.close()
            raise
        self._open = True
        for message in self.removed:
            log.warning("stored resources are not used", why=message)
        log.info("registry open", runners=len(self.mesh), models=len(self.mesh.pools))

    def _off(self, stored: Iterable[Key]) -> Iterator[str]:
        """Yields messages about stored documents of kinds that are off."""
        keys = tuple(stored)
        for off, why in self.config.kinds_off.items():
            if names := [name for kind, name in keys if kind == off]:
                yield unused_documents(why, off, names)

    async def stop(self, grace_seconds: float) -> None:
        """Ends the watchers, finishes pending writes within `grace_seconds`, and closes the store."""
        self.watchers.close()
        self.events.close()
        if self._open:
            self._open = False
            await self.writer.drain(grace_seconds)
            # The last heartbeat times and events are not essential: ignore failures.
            with suppress(WeftError):
                await self.store.save_pulses([state.stored_pulse() for state in self.mesh])
                await self.events.save(self.store.save_events)
            self.mesh = Mesh()
            self.join_tokens = {}
            await self.store.close()

    def reconfigure(
        self,
        aliases: Iterable[AliasSetting],
        tenants: Iterable[tenant_pb2.TenantManifest] = (),
        names: frozenset[str] = frozenset(),
    ) -> None:
        """Replaces the aliases, tenants and names of the configuration."""
        self.configured_names = names
        self.publish(
            self.mesh.configure(ResourceKind.ALIAS, map(configured_alias, aliases))
            + self.mesh.configure(ResourceKind.TENANT, map(configured_tenant, tenants))
        )

    def joiner(self, token_id: str) -> Joiner:
        """Returns the rights of a join token or machine. Raises UNAUTHENTICATED if it was revoked."""
        token = self.join_tokens.get(token_id)
        if token is None:
            raise WeftError(Reason.UNAUTHENTICATED, "the machine was revoked; it needs a new join token")
        kept = {name: each.id for each in self.join_tokens.values() for name in each.names.split()}
        reserved = kept | dict.fromkeys(self.configured_names, "")
        return Joiner(id=token_id, name_pattern=token.name_pattern, pool=token.pool, reserved=reserved)

    def of_runner(self, name: str) -> SessionState | None:
        """Returns the session of a runner in the current mesh, or None."""
        return self.mesh.of_runner(name)

    def name_of(self, name_or_id: str) -> str:
        """Returns the name of the model, agent or route with this id; any other text unchanged."""
        return self.mesh.ids.name_of(name_or_id)

    def asked_by(self, text: str) -> str:
        """Returns a request's model text with ids replaced by names, with the prefix of agents and routes."""
        name = self.name_of(text)
        if name == text or text.startswith("model-"):
            return name
        return f"{AGENT_PREFIX if text.startswith('agent-') else ROUTE_PREFIX}{name}"

    def require_open(self) -> None:
        """Raises SHUTTING_DOWN unless the registry is running."""
        if not self._open:
            raise WeftError(
                Reason.SHUTTING_DOWN, "the registry is not running", retry_after_seconds=RETRY_AFTER_SECONDS
            )

    async def write(self, write: Callable[[], Awaitable[T]]) -> T:
        """Runs a caller's write in its turn, see SingleWriter.run. Raises SHUTTING_DOWN and QUEUE_FULL."""
        self.require_open()
        # Heartbeats use the same queue: a flood of registrations must not make healthy runners look silent.
        if self.writer.waiting >= self.config.max_waiting_writes:
            raise WeftError(
                Reason.QUEUE_FULL,
                f"the registry has {self.config.max_waiting_writes} changes waiting to be written; try again",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        return await self.writer.run(write)

    def watch(self) -> tuple[Snapshot, Watcher[registry_service_pb2.WatchResponse]]:
        """Returns a snapshot, and a watcher for every later change."""
        self.require_open()
        mesh = self.mesh
        snapshot = Snapshot(
            self._revision,
            self.settings,
            tuple(state.publisher() for state in mesh),
            tuple(mesh.deferred_resources()),
            tuple(self.routers.values()),
        )
        return snapshot, self.watchers.subscribe()

    @property
    def revision(self) -> int:
        """Number of the last published change."""
        return self._revision

    def publish(self, changes: Iterable[registry_service_pb2.Change], drafts: Iterable[event_pb2.Event] = ()) -> None:
        """Publishes changes and events to the watchers."""
        batch: list[registry_service_pb2.WatchResponse] = []
        for change in changes:
            self._revision += 1
            batch.append(registry_service_pb2.WatchResponse(revision=self._revision, change=change))
        if batch:
            self.watchers.publish(batch)
        self.events.record(drafts)

    def _read_back(self, stored: StoredSession) -> SessionState:
        now_utc, pulse = self.clock.utc_now(), stored.pulse
        lost_ago = None if pulse.inactive_since is None else (now_utc - pulse.inactive_since).total_seconds()
        since_heartbeat = (now_utc - pulse.last_heartbeat_at).total_seconds()
        if stored.profile.dial_out:
            for each in stored.publications:  # an earlier release has stored them whole
                drop_recipe(each.manifest)
        resumed_pulse = resumed(pulse.standing, since_heartbeat, lost_ago, self.clock.monotonic())
        return SessionState(
            session=stored.session,
            profile=stored.profile,
            pulse=resumed_pulse,
            last_heartbeat_at=pulse.last_heartbeat_at,
            inactive_since=pulse.inactive_since,
            publications={each.manifest.name: Held(each) for each in stored.publications},
            agents={each.manifest.name: each for each in stored.agents},
            saved_pulse=resumed_pulse,
        )


def configured_alias(setting: AliasSetting) -> alias_pb2.Alias:
    """Returns an alias of the configuration."""
    manifest = alias_pb2.AliasManifest(
        name=setting.name,
        pattern=setting.pattern or setting.name,
        target=ascii_name(setting.target),
        tenant=setting.tenant,
        description=setting.description,
        **preset_of(setting),
    )
    return alias_pb2.Alias(manifest=manifest, source=alias_pb2.Alias.SOURCE_CONFIGURED)


def configured_tenant(manifest: tenant_pb2.TenantManifest) -> tenant_pb2.Tenant:
    """Returns a tenant of the configuration."""
    return tenant_pb2.Tenant(manifest=manifest, source=tenant_pb2.Tenant.SOURCE_CONFIGURED)
