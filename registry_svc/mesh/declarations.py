"""Declarations of operators: applied atomically, and deleted by name."""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.events import events_for
from registry_svc.mesh.mesh_state import ResourceIndex
from registry_svc.mesh.name_owners import owners_of_name
from registry_svc.mesh.overlay import is_unchanged
from registry_svc.mesh.policy.declarations import (
    Author,
    absent,
    decide_outcome,
    exists,
    in_use,
    require_free_scope,
    settled_owner,
    still_loaded,
)
from registry_svc.mesh.policy.limits import require_room
from registry_svc.mesh.policy.namespace import require_free
from registry_svc.mesh.provider_models import ChangeEvent
from registry_svc.mesh.records import MESH, is_loaded, pool_name_of
from registry_svc.mesh.requests import Batch
from registry_svc.mesh.states import Outcome
from weft.api.registry.v1 import agent_pb2, event_pb2, model_pb2, registry_service_pb2
from weft.api.registry.v1.alias_pb2 import AliasManifest
from weft.api.registry.v1.declaration_service_pb2 import (
    ApplyResult,
    PoolDeclaration,
)
from weft.api.registry.v1.journal_pb2 import JOURNAL_MODE_UNSPECIFIED, JournalMode
from weft.api.registry.v1.model_pb2 import ModelDeclaration
from weft.api.registry.v1.settings_pb2 import MeshSettings
from weft.documents.kind import PointsTo, Reference
from weft.documents.kinds import DECLARED_KINDS, key_of, packed
from weft.documents.kinds.model import secret_of
from weft.documents.kinds.tenant import webhook_secret
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument
from weft.documents.rights import visible_names
from weft.kernel.access.rpc_auth import caller
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.timestamps import stamp_of
from weft.kernel.values.names import KIND_PREFIXES, SECRET_PREFIX
from weft.kernel.values.unknown_names import unknown_name

log = get_logger("weft.registry")

_EVENT_REASONS: dict[int, event_pb2.EventReason.ValueType] = {
    ApplyResult.OUTCOME_CREATED: event_pb2.EVENT_REASON_CREATED,
    ApplyResult.OUTCOME_CONFIGURED: event_pb2.EVENT_REASON_CONFIGURED,
}
_EVENT_MESSAGES: dict[int, str] = {
    ApplyResult.OUTCOME_CREATED: "declared by an operator",
    ApplyResult.OUTCOME_CONFIGURED: "declared by an operator",
}


NO_AUTHOR = Author()
"""Author of declarations by the machine or a service itself."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """The effects of an Apply, planned completely before any is executed."""

    now: Timestamp
    adopt: bool
    author: Author
    arriving: dict[str, str]
    """Models of the batch with their pools."""
    arriving_targets: frozenset[str] = frozenset()
    """Declared names that requests use with a prefix, such as "route/fast"."""
    results: list[ApplyResult] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    """Records to save: Models, Aliases and so on."""


NoteSwitch = Callable[[str, bool, str], Awaitable[None]]
"""Records a tenant, whether it will have `capture`, and who declares it. Raises if it cannot."""


async def ignore_switch(_tenant: str, _will_be: bool, _actor: str) -> None:
    """Records nothing."""


class Unloader(Protocol):
    """Unloads deleted models."""

    async def unload(self, model: str, requested_by: str) -> None:
        """Unloads a model. Returns when it is unloaded. Raises WeftError."""
        ...

    async def remove(self, model: str, requested_by: str) -> None:
        """Removes a model that was added by its source. Returns when it is no longer served."""
        ...


class Declarations:
    """Applies and deletes declarations, serialized with the writes of the session manager."""

    def __init__(
        self,
        core: RegistryCore,
        unloader: Unloader,
        has_secret: Callable[[str], bool] = lambda _: False,
        change_event: ChangeEvent | None = None,
        on_capture: NoteSwitch = ignore_switch,
    ) -> None:
        """`has_secret` returns whether a secret exists; `change_event` is rung at every change.

        `on_capture` records each change of a tenant's `capture` before it is made.
        """
        self._core = core
        self._unloader = unloader
        self._has_secret = has_secret
        self._change_event = change_event or ChangeEvent()
        self._on_capture = on_capture

    async def apply(self, batch: Batch, author: Author = NO_AUTHOR) -> list[ApplyResult]:
        """Applies a batch for `author`. Returns a result per document; see DeclarationService.Apply."""
        return await self._core.write(lambda: self._apply(batch, author))

    def name_targets(self, documents: Iterable[AnyDocument]) -> None:
        """Replaces ids in references of documents by names, for storage."""
        for document in documents:
            if document.kind in DECLARED_KINDS:
                DECLARED_KINDS[document.kind].rename_references(document.manifest, self._core.asked_by)

    async def delete(self, kind: ResourceKind, name: str, *, force: bool = False, requested_by: str = "") -> None:
        """Deletes a resource, also a published one; see DeclarationService.Delete.

        `force` unloads its loaded models first. If a request loads one again meanwhile, that engine is unowned and gets
        unloaded as such.
        """
        self._core.require_open()
        if force:
            self._require_deletable(kind, name)
            for model in self._loaded(kind, name)[1]:
                await self._unloader.unload(model, requested_by)
        if kind is ResourceKind.MODEL and self.is_added(name):
            await self._remove_added(name, requested_by, force=force)
            return
        await self._core.write(lambda: self._delete(kind, name, requested_by, force=force))

    async def _apply(self, batch: Batch, author: Author) -> list[ApplyResult]:
        plan = self.planned(batch, author)
        if not batch.dry_run:
            for record in plan.records:
                if key_of(record)[0] is ResourceKind.TENANT:
                    await self._note_capture(record.manifest.name, author.name, will_be=record.manifest.capture)
            await self.carry_out(plan)
        return plan.results

    async def _note_capture(self, tenant: str, actor: str, *, will_be: bool) -> None:
        declared = self._core.mesh.documents[ResourceKind.TENANT].declared(tenant)
        if will_be != (declared is not None and declared.manifest.capture):
            await self._on_capture(tenant, will_be, actor or caller().name)

    async def carry_out(self, plan: Plan) -> None:
        """Stores a plan's records, and publishes them with their events. Call it in a write."""
        if not plan.records:
            return
        await self._core.store.save_documents(plan.records)
        self._core.publish(self._core.mesh.declare(plan.records), _events_of(plan.results))
        self._change_event.set()
        saved = Counter(key_of(record)[0].plural for record in plan.records)
        log.info("declarations applied", **saved, adopt=plan.adopt)

    def planned(self, batch: Batch, author: Author) -> Plan:
        """Returns the effects of an Apply on the current declarations. Raises what Apply raises."""
        self._require_as_expected(batch)
        models = [each.manifest for each in batch.documents if each.kind is ResourceKind.MODEL]
        plan = Plan(
            now=stamp_of(self._core.clock.utc_now()),
            adopt=batch.adopt,
            author=author,
            arriving={manifest.name: pool_name_of(manifest) for manifest in models},
            arriving_targets=frozenset(
                f"{kind.prefix}{each.name}"
                for each in batch.documents
                if (kind := DECLARED_KINDS.get(each.kind)) is not None and kind.prefix
            ),
        )
        for index, document in enumerate(batch.documents):
            try:
                plan.results.append(self._planned_one(plan, document, f"declarations[{index}]"))
            except WeftError as error:
                error.metadata.setdefault("declaration", str(index))
                raise
        self._require_room(plan)
        return plan

    def _require_as_expected(self, batch: Batch) -> None:
        """Raises RESOURCE_CHANGED if a resource differs from what the caller has read."""
        if batch.expected and len(batch.expected) != len(batch.documents):
            raise invalid_field("expected", "must have one entry for each declaration, or none")
        for index, (given, expected) in enumerate(zip(batch.documents, batch.expected, strict=False)):
            if given.label != expected.label:
                raise invalid_field(f"expected[{index}]", "must be of the same kind and name as the declaration")
            if not self._core.mesh.is_declared_as(expected):
                raise WeftError(
                    Reason.RESOURCE_CHANGED,
                    f"the {given.kind} {given.name!r} was changed or deleted since it was read; read it again",
                    metadata={str(given.kind): given.name, "declaration": str(index)},
                )

    def _planned_one(self, plan: Plan, given: AnyDocument, field_: str) -> ApplyResult:
        kind, manifest = given.kind, given.manifest
        outcome: Outcome = Outcome.UNCHANGED
        before: Message | None = given.declared
        match kind:
            case ResourceKind.MODEL:
                self._require_secret(secret_of(manifest), f"{field_}.model.manifest.provider.api_key_ref")
                outcome, before = self._plan_model(plan, given.declared, f"{field_}.model.manifest")
            case ResourceKind.RUNNER:
                self._require_runner(manifest.name)
            case ResourceKind.POOL:
                self._require_pool(plan, given.declared, f"{field_}.pool.members")
            case _:
                if kind is ResourceKind.ALIAS:
                    self._require_headers(plan, manifest, f"{field_}.alias.provider_headers")
                if kind is ResourceKind.TENANT:
                    self._require_secret(webhook_secret(manifest), f"{field_}.tenant.webhook.secret_ref")
                outcome, before = self._plan_document(plan, kind, manifest, f"{field_}.{kind.value}")
        return ApplyResult(
            kind=kind.value,
            name=given.name,
            outcome=ApplyResult.Outcome.ValueType(outcome),
            before=None if before is None else packed(kind, before),
            after=packed(kind, given.declared),
        )

    def _plan_model(self, plan: Plan, given: ModelDeclaration, field_: str) -> tuple[Outcome, Message | None]:
        mesh, manifest = self._core.mesh, given.manifest
        view, declared = mesh.model(manifest.name), mesh.declared_model(manifest.name)
        _settle_owner(plan, manifest, view, field_)
        require_free([owners_of_name(mesh, ResourceKind.MODEL, manifest.name)])
        if manifest.pool_name:
            require_free([owners_of_name(mesh, ResourceKind.POOL, manifest.pool_name)])
        publication, publisher = mesh.published_model(manifest.name) or (None, None)
        outcome = decide_outcome(
            ResourceKind.MODEL,
            manifest.name,
            is_declared=declared is not None,
            same=is_unchanged(given, view=view, declared=declared, publication=publication),
            publisher="" if publication is None else publication.runner,
            publisher_live=publisher is not None and publisher.pulse.active,
            adopt=plan.adopt,
        )
        if outcome is Outcome.UNCHANGED:
            return outcome, given
        plan.records.append(
            model_pb2.Model(
                manifest=manifest,
                kind=model_pb2.Model.KIND_PUBLIC,
                declared_runner=given.runner,
                create_time=plan.now if view is None else view.create_time,
            )
        )
        known = declared or view
        if known is None:
            return outcome, None
        return outcome, ModelDeclaration(manifest=known.manifest, runner=known.declared_runner)

    def _plan_document(
        self, plan: Plan, kind: ResourceKind, manifest: Any, field_: str
    ) -> tuple[Outcome, Message | None]:
        """Plans a declaration of any kind except models."""
        mesh, declared_kind, name = self._core.mesh, DECLARED_KINDS[kind], manifest.name
        documents = mesh.documents[kind]
        declared = documents.declared(name)
        known, publisher = declared, None
        if kind is ResourceKind.AGENT:
            known, (_, publisher) = mesh.agent(name), mesh.published_agent(name) or (None, None)
            _settle_owner(plan, manifest, known, field_)
        if declared_kind.shares_namespace:
            require_free([owners_of_name(mesh, kind, name, besides=frozenset(plan.arriving))])
        for reference in declared_kind.references_of(manifest):
            if not self._is_there(plan, reference):
                raise absent(kind, name, reference, _seen_targets(mesh, reference.field.to))
        self._require_free_scope(plan, kind, manifest)
        outcome = decide_outcome(
            kind,
            name,
            is_declared=declared is not None,
            same=known is not None and manifest == known.manifest,
            publisher="" if publisher is None else publisher.profile.name,
            publisher_live=publisher is not None and publisher.pulse.active,
            adopt=plan.adopt,
        )
        if outcome is not Outcome.UNCHANGED:
            record: Any = declared_kind.record(**declared_kind.initial)
            if declared is not None:
                record.CopyFrom(declared)
            record.create_time.CopyFrom(plan.now if known is None else known.create_time)
            record.manifest.CopyFrom(manifest)
            plan.records.append(record)
        return outcome, None if known is None else known.manifest

    def _require_free_scope(self, plan: Plan, kind: ResourceKind, manifest: Any) -> None:
        """Raises ALREADY_EXISTS if another document has the same scope."""
        scope = DECLARED_KINDS[kind].scope
        planned = (record.manifest for record in plan.records if key_of(record)[0] is kind)
        twin = next((each.name for each in planned if scope(each) == scope(manifest)), "")
        other = twin or self._core.mesh.documents[kind].same_scope(manifest)
        require_free_scope(kind, manifest.name, getattr(manifest, DECLARED_KINDS[kind].scope_field), other)

    def _is_there(self, plan: Plan, reference: Reference) -> bool:
        """Whether the target of a reference exists after the batch is applied."""
        mesh, to, name = self._core.mesh, reference.field.to, reference.target
        if to is PointsTo.REQUESTABLE:
            if name in plan.arriving_targets:
                return True
            for kind, declared in DECLARED_KINDS.items():
                if declared.prefix and name.startswith(declared.prefix):
                    own = name.removeprefix(declared.prefix)
                    return own in mesh.names_of(kind)
        return exists(mesh.target(name), to, arriving=plan.arriving, leaving=())

    def _require_secret(self, name: str, field_: str) -> None:
        if name and not self._has_secret(name):
            raise invalid_field(field_, f"there is no secret {name!r}; create it first: weft keys secret create {name}")

    def _require_headers(self, plan: Plan, alias: AliasManifest, field_: str) -> None:
        """Raises INVALID_ARGUMENT for headers that name no secret, or for a target that no provider serves."""
        for name, value in alias.provider_headers.items():
            if value.startswith(SECRET_PREFIX):
                self._require_secret(value.removeprefix(SECRET_PREFIX), f"{field_}[{name}]")
        central = self._core.mesh.central_models.values()
        served = {name for each in central for name in (each.name, pool_name_of(each))}
        known = served | plan.arriving.keys() | {*plan.arriving.values()}
        if alias.provider_headers and alias.target not in known and not alias.target.startswith(KIND_PREFIXES):
            raise invalid_field(field_, f"{alias.target} has no provider, and other models get no headers")

    def _require_runner(self, name: str) -> None:
        if self._core.mesh.of_runner(name) is None:
            raise WeftError(
                Reason.NOT_FOUND,
                f"there is no runner {name!r}; runners cannot be declared, they register themselves",
                metadata={ResourceKind.RUNNER.value: name},
            )

    def _require_pool(self, plan: Plan, given: PoolDeclaration, field_: str) -> None:
        stay = (model for model in self._core.mesh.pools.members(given.name) if model not in plan.arriving)
        come = (model for model, pool in plan.arriving.items() if pool == given.name)
        members = sorted({*stay, *come})
        if not members:
            raise WeftError(
                Reason.NOT_FOUND,
                f"there is no pool {given.name!r}; a pool follows from its models, name it as theirs",
                metadata={ResourceKind.POOL.value: given.name},
            )
        if given.members and sorted(given.members) != members:
            raise invalid_field(field_, "must be its members; a pool is defined by its models, so change those")

    def _require_room(self, plan: Plan) -> None:
        mesh, config = self._core.mesh, self._core.config
        new = Counter(result.kind for result in plan.results if result.outcome == ApplyResult.OUTCOME_CREATED)
        for kind in DECLARED_KINDS:
            require_room(kind.plural, mesh.count(kind), new[kind.value], config.max_of(kind))
        arriving = ((*key_of(record), record.manifest) for record in plan.records)
        growth = mesh.sizes.growth_bytes(arriving)
        require_room(
            "bytes of all that is declared and published", mesh.sizes.total_bytes, growth, config.max_manifest_bytes
        )

    async def _delete(self, kind: ResourceKind, name: str, requested_by: str, *, force: bool) -> None:
        self._require_deletable(kind, name)
        runner, loaded = self._loaded(kind, name)
        if loaded and not force:
            raise still_loaded(kind, name, runner, loaded)
        if kind is ResourceKind.RUNNER:
            await self._delete_runner(name)
        else:
            if kind is ResourceKind.TENANT:
                await self._note_capture(name, requested_by, will_be=False)
            await self._core.store.delete_documents([(kind, name)])
            self._core.publish(self._core.mesh.drop([(kind, name)]), _deleted([(kind, name)]))
            self._change_event.set()
        log.info("deleted", kind=kind.value, name=name, force=force)

    async def _delete_runner(self, name: str) -> None:
        mesh = self._core.mesh
        state = mesh.of_runner(name)
        assert state is not None, "only a runner that is known is deleted"
        rows = [row for row in state.rows() if not mesh.is_declared(*row)]
        await self._core.store.delete_sessions([state.session.id])
        self._core.publish(mesh.forget([state]), _deleted(rows))

    def _require_deletable(self, kind: ResourceKind, name: str) -> None:
        """Raises NOT_FOUND, INVALID_ARGUMENT for a pool, or RESOURCE_IN_USE if others refer to it."""
        mesh = self._core.mesh
        if kind is ResourceKind.POOL:
            raise invalid_field("kind", "a pool is defined by its models; delete those instead")
        if name not in mesh.names_of(kind):
            raise unknown_name(kind.value, name, visible_names(caller(), mesh.names_of(kind)))
        leaving, own_agents, targets = set[str](), set[str](), set[str]()
        if kind is ResourceKind.MODEL:
            leaving = {name}
        elif kind is ResourceKind.RUNNER:
            state = mesh.of_runner(name)
            rows = [] if state is None else [row for row in state.rows() if not mesh.is_declared(*row)]
            own_agents = {agent for row_kind, agent in rows if row_kind is ResourceKind.AGENT}
            leaving = {model for row_kind, model in rows if row_kind is ResourceKind.MODEL}
        else:
            declared = DECLARED_KINDS[kind]
            if declared.configured and name not in mesh.documents[kind]:
                raise WeftError(
                    Reason.RESOURCE_IN_USE,
                    f"the {kind.value} {name!r} is of the mesh's weft.yaml ({declared.configured}); remove it there",
                    metadata={kind.value: name},
                )
            targets = {declared.prefix + name} if declared.prefix else set()
        agents = self._pointing_at(leaving) - own_agents
        users = {ResourceKind.AGENT: agents, **self.users_of(leaving, targets)}
        if any(users.values()):
            raise in_use(kind, name, users)

    def users_of(self, models: Collection[str], targets: Collection[str]) -> dict[ResourceKind, set[str]]:
        """Returns the declared documents that would lose their target without these models and request `targets`."""
        mesh = self._core.mesh
        pools = {pool for model in models if (pool := mesh.pools.pool_of(model)) is not None}

        def loses_its_target(reference: Reference) -> bool:
            name, to = reference.target, reference.field.to
            if to is PointsTo.REQUESTABLE and name in targets:
                return True
            return (name in models or name in pools) and not exists(mesh.target(name), to, arriving={}, leaving=models)

        # Agents have an index, since there may be many.
        kinds = [kind for kind in DECLARED_KINDS if kind is not ResourceKind.AGENT] if models or targets else []
        return {kind: mesh.documents[kind].referring(loses_its_target) for kind in kinds}

    def _loaded(self, kind: ResourceKind, name: str) -> tuple[str, list[str]]:
        """Returns the active runner with engines that would become unowned, and its loaded models."""
        mesh, state = self._core.mesh, None
        if kind is ResourceKind.MODEL:
            # Central models have no engines.
            state = None if name in mesh.central_models else mesh.publisher_of(name)
        elif kind is ResourceKind.RUNNER:
            state = mesh.of_runner(name)
        if state is None or not state.pulse.active:
            return "", []
        loaded = [each.model for each in state.capability.message().instances if is_loaded(each)]
        return state.profile.name, [model for model in loaded if kind is ResourceKind.RUNNER or model == name]

    async def _remove_added(self, name: str, requested_by: str, *, force: bool) -> None:
        """Makes the runner of an added model remove it; its next session does not have the model."""
        self._require_deletable(ResourceKind.MODEL, name)
        runner, loaded = self._loaded(ResourceKind.MODEL, name)
        if loaded and not force:
            raise still_loaded(ResourceKind.MODEL, name, runner, loaded)
        await self._unloader.remove(name, requested_by)
        await self._core.write(lambda: self._delete_remaining(name, requested_by))

    async def _delete_remaining(self, name: str, requested_by: str) -> None:
        """Deletes a model that its runner has removed, unless the runner's next session has already withdrawn it."""
        if self._core.mesh.model(name) is not None:
            await self._delete(ResourceKind.MODEL, name, requested_by, force=True)

    def is_added(self, name: str) -> bool:
        """Whether an active runner serves a model that was added by its source."""
        state = self._core.mesh.publisher_of(name)
        if state is None or not state.pulse.active:
            return False
        instances = state.capability.message().instances
        return any(each.model == name and each.added_source for each in instances)

    def _pointing_at(self, leaving: set[str]) -> set[str]:
        """Returns the agents that would lose their target without these models."""
        mesh = self._core.mesh
        found = set[str]().union(*(mesh.targets.of_model(model) for model in leaving))
        for pool in {pool for model in leaving if (pool := mesh.pools.pool_of(model)) is not None}:
            if leaving.issuperset(mesh.pools.members(pool)):
                found |= mesh.targets.of_pool(pool)
        return found


def _settle_owner(
    plan: Plan,
    manifest: model_pb2.ModelManifest | agent_pb2.AgentManifest,
    view: model_pb2.Model | agent_pb2.Agent | None,
    field_: str,
) -> None:
    """Sets the owner in a planned declaration. Raises PERMISSION_DENIED naming the field."""
    earlier = None if view is None else view.manifest.tags.owner
    owner = settled_owner(manifest.tags.owner, plan.author, earlier=earlier, field=f"{field_}.tags.owner")
    if owner:
        manifest.tags.owner = owner


def _events_of(results: Iterable[ApplyResult]) -> list[event_pb2.Event]:
    """Returns the events for the results of an Apply."""
    return [
        event_pb2.Event(
            kind=ResourceKind(result.kind),
            name=result.name,
            reason=_EVENT_REASONS[result.outcome],
            message=_EVENT_MESSAGES[result.outcome],
        )
        for result in results
        if result.outcome in _EVENT_REASONS
    ]


def _deleted(rows: list[tuple[ResourceKind, str]]) -> list[event_pb2.Event]:
    return list(events_for(rows, event_pb2.EVENT_REASON_DELETED, "deleted by an operator"))


class SettingsManager:
    """Reads and changes the mesh settings, serialized with all other writes."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    def current(self) -> MeshSettings:
        """Returns the current settings. Raises SHUTTING_DOWN unless the registry is running."""
        self._core.require_open()
        return self._core.settings

    async def update(
        self, allow_cloud_fallback: bool | None, journal: "JournalMode.ValueType" = JOURNAL_MODE_UNSPECIFIED
    ) -> MeshSettings:
        """Changes the given settings durably, and publishes them. Does nothing if the values are the same."""
        return await self._core.write(lambda: self._update(allow_cloud_fallback, journal))

    async def _update(self, allow_cloud_fallback: bool | None, journal: "JournalMode.ValueType") -> MeshSettings:
        core = self._core
        before = core.settings
        changed = MeshSettings(
            allow_cloud_fallback=before.allow_cloud_fallback if allow_cloud_fallback is None else allow_cloud_fallback,
            journal=journal or before.journal,
            revision=before.revision,
        )
        if changed == before:
            return before
        changed.revision += 1
        await core.store.save_settings(changed)
        core.settings = changed
        core.publish([registry_service_pb2.Change(settings=changed)], [_happening(before, changed)])
        log.info(
            "settings changed",
            allow_cloud_fallback=changed.allow_cloud_fallback,
            revision=changed.revision,
            **({"journal": _journal_word(changed)} if changed.journal else {}),
        )
        return changed


def _happening(before: MeshSettings, settings: MeshSettings) -> event_pb2.Event:
    may = "may" if settings.allow_cloud_fallback else "may not"
    changes = []
    if before.allow_cloud_fallback != settings.allow_cloud_fallback:
        changes.append(f"routes {may} fall back to remote models")
    if before.journal != settings.journal:
        changes.append(f"requests without their own setting are journaled: {_journal_word(settings)}")
    return event_pb2.Event(
        kind=MESH,
        name="settings",
        reason=event_pb2.EVENT_REASON_CONFIGURED,
        message=f"set by an operator: {'; '.join(changes)}",
    )


def _journal_word(settings: MeshSettings) -> str:
    return JournalMode.Name(settings.journal).removeprefix("JOURNAL_MODE_").lower()


def _seen_targets(mesh: ResourceIndex, to: PointsTo) -> Iterator[str]:
    """Yields the possible targets of a reference that the caller may see, with prefixes if requests need them."""
    kinds = {PointsTo.MODEL: [ResourceKind.MODEL], PointsTo.POOL: [ResourceKind.POOL]}
    # A pool has the name of its only model.
    models = chain.from_iterable(map(mesh.names_of, kinds.get(to, [ResourceKind.MODEL, ResourceKind.POOL])))
    yield from frozenset(visible_names(caller(), models))
    if to is PointsTo.REQUESTABLE:
        for kind, declared in DECLARED_KINDS.items():
            if declared.prefix:
                yield from (f"{declared.prefix}{name}" for name in visible_names(caller(), mesh.names_of(kind)))
