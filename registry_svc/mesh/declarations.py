"""Declarations of operators: applied all or none, and deleted by name."""

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.domain import (
    AgentManifest,
    Applied,
    Batch,
    DeclaredAgent,
    DeclaredModel,
    DeclaredRoute,
    EventDraft,
    EventReason,
    Kind,
    MeshSettings,
    ModelDeclaration,
    Outcome,
    PoolDeclaration,
    RouteManifest,
    RunnerDeclaration,
)
from registry_svc.mesh.policy.declarations import (
    decide_agent,
    decide_model,
    decide_route,
    in_use,
    require_candidates,
    require_target,
    still_loaded,
)
from registry_svc.mesh.policy.events import events_for
from registry_svc.mesh.policy.limits import require_room
from registry_svc.mesh.policy.namespace import require_free
from registry_svc.mesh.policy.unowned import is_loaded
from registry_svc.mesh.watch import SettingsChanged
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason

log = get_logger("weft.registry")

_EVENT_REASONS = {Outcome.CREATED: EventReason.CREATED, Outcome.CONFIGURED: EventReason.CONFIGURED}


@dataclass(slots=True, kw_only=True)
class _Plan:
    """The effects of an Apply, planned completely before any is carried out."""

    now: datetime
    adopt: bool
    arriving: dict[str, str]
    """The models of the batch, and the pool of each."""
    results: list[Applied] = field(default_factory=list)
    models: list[DeclaredModel] = field(default_factory=list)
    agents: list[DeclaredAgent] = field(default_factory=list)
    routes: list[DeclaredRoute] = field(default_factory=list)


class Unloader(Protocol):
    """Unloads models that are deleted."""

    async def unload(self, model: str, requested_by: str) -> None:
        """Unload a model and return when it is unloaded; raises the WeftError of the failure."""
        ...


class Declarations:
    """Applies and deletes declarations, one write at a time with those of the session manager."""

    def __init__(self, core: RegistryCore, unloader: Unloader) -> None:
        self._core = core
        self._unloader = unloader

    async def apply(self, batch: Batch) -> list[Applied]:
        """One result per declaration, in order; see DeclarationService.Apply."""
        return await self._core.write(lambda: self._apply(batch))

    async def delete(self, kind: Kind, name: str, *, force: bool = False, requested_by: str = "") -> None:
        """Delete a resource, also one of a runner; see DeclarationService.Delete.

        `force`: unload its loaded models first. A request that arrives meanwhile may load one again; that engine is
        unowned then, and unloaded as such.
        """
        self._core.require_open()
        if force:
            self._require_deletable(kind, name)
            for model in self._loaded(kind, name)[1]:
                await self._unloader.unload(model, requested_by)
        await self._core.write(lambda: self._delete(kind, name, force=force))

    async def _apply(self, batch: Batch) -> list[Applied]:
        plan = self._planned(batch)
        counts = {"models": len(plan.models), "agents": len(plan.agents), "routes": len(plan.routes)}
        if batch.dry_run or not any(counts.values()):
            return plan.results
        await self._core.store.save_declarations(plan.models, plan.agents, plan.routes)
        changes = self._core.mesh.declare(plan.models, plan.agents, plan.routes)
        self._core.publish(changes, _events_of(plan))
        log.info("declarations applied", **counts, adopt=batch.adopt)
        return plan.results

    def _planned(self, batch: Batch) -> _Plan:
        models = [each.manifest for each in batch.declarations if isinstance(each, ModelDeclaration)]
        plan = _Plan(
            now=self._core.clock.utc_now(),
            adopt=batch.adopt,
            arriving={manifest.name: manifest.pool for manifest in models},
        )
        for index, declaration in enumerate(batch.declarations):
            try:
                match declaration:
                    case ModelDeclaration():
                        self._plan_model(plan, declaration)
                    case AgentManifest():
                        self._plan_agent(plan, declaration)
                    case RouteManifest():
                        self._plan_route(plan, declaration)
                    case RunnerDeclaration():
                        self._plan_runner(plan, declaration)
                    case PoolDeclaration():
                        self._plan_pool(plan, declaration, f"declarations[{index}].pool.members")
            except WeftError as error:
                error.metadata.setdefault("declaration", str(index))
                raise
        self._require_room(plan)
        return plan

    def _plan_model(self, plan: _Plan, given: ModelDeclaration) -> None:
        mesh, name = self._core.mesh, given.manifest.name
        require_free([mesh.claim(Kind.MODEL, name)])
        if given.manifest.pool_name:
            require_free([mesh.claim(Kind.POOL, given.manifest.pool_name)])
        view, declared, published = mesh.model(name), mesh.declared_model(name), mesh.published_model(name)
        outcome = decide_model(
            given,
            view=view,
            declared=declared,
            publication=None if published is None else published[0],
            publisher_live=published is not None and published[1].pulse.active,
            adopt=plan.adopt,
        )
        before = None if view is None else ModelDeclaration(manifest=view.manifest, runner=view.declared_runner)
        if declared is not None:
            before = ModelDeclaration(manifest=declared.manifest, runner=declared.runner)
        if outcome is Outcome.UNCHANGED:
            before = given
        else:
            created_at = plan.now if view is None else view.created_at
            plan.models.append(DeclaredModel(manifest=given.manifest, runner=given.runner, created_at=created_at))
        plan.results.append(Applied(kind=Kind.MODEL, name=name, outcome=outcome, before=before, after=given))

    def _plan_agent(self, plan: _Plan, given: AgentManifest) -> None:
        mesh, name = self._core.mesh, given.name
        require_free([mesh.claim(Kind.AGENT, name, besides=frozenset(plan.arriving))])
        require_target(mesh.target(given), arriving=plan.arriving, leaving=())
        view, published = mesh.agent(name), mesh.published_agent(name)
        outcome = decide_agent(
            given,
            declared=mesh.declared_agent(name),
            publication=None if published is None else published[0],
            publisher_live=published is not None and published[1].pulse.active,
            adopt=plan.adopt,
        )
        if outcome is not Outcome.UNCHANGED:
            created_at = plan.now if view is None else view.created_at
            plan.agents.append(DeclaredAgent(manifest=given, created_at=created_at))
        before = None if view is None else view.manifest
        plan.results.append(Applied(kind=Kind.AGENT, name=name, outcome=outcome, before=before, after=given))

    def _plan_route(self, plan: _Plan, given: RouteManifest) -> None:
        mesh, name = self._core.mesh, given.name
        require_free([mesh.claim(Kind.ROUTE, name, besides=frozenset(plan.arriving))])
        require_candidates(name, mesh.routes.candidates(given), arriving=plan.arriving)
        earlier = mesh.routes.get(name)
        before = None if earlier is None else earlier.manifest
        outcome = decide_route(given, before)
        if outcome is not Outcome.UNCHANGED:
            created_at = plan.now if earlier is None else earlier.created_at
            plan.routes.append(DeclaredRoute(manifest=given, created_at=created_at))
        plan.results.append(Applied(kind=Kind.ROUTE, name=name, outcome=outcome, before=before, after=given))

    def _plan_runner(self, plan: _Plan, given: RunnerDeclaration) -> None:
        if self._core.mesh.of_runner(given.name) is None:
            raise WeftError(
                Reason.NOT_FOUND,
                f"there is no runner {given.name!r}; runners cannot be declared, they register themselves",
                metadata={Kind.RUNNER.value: given.name},
            )
        plan.results.append(_unchanged(Kind.RUNNER, given.name, given))

    def _plan_pool(self, plan: _Plan, given: PoolDeclaration, field_: str) -> None:
        stay = (model for model in self._core.mesh.pools.members(given.name) if model not in plan.arriving)
        come = (model for model, pool in plan.arriving.items() if pool == given.name)
        members = sorted({*stay, *come})
        if not members:
            raise WeftError(
                Reason.NOT_FOUND,
                f"there is no pool {given.name!r}; a pool follows from its models, name it as theirs",
                metadata={Kind.POOL.value: given.name},
            )
        if given.members and sorted(given.members) != members:
            raise invalid_field(field_, "must be its members; a pool follows from its models, change theirs")
        plan.results.append(_unchanged(Kind.POOL, given.name, given))

    def _require_room(self, plan: _Plan) -> None:
        mesh, config = self._core.mesh, self._core.config
        new = [result.kind for result in plan.results if result.outcome is Outcome.CREATED]
        require_room("models", len(mesh.pools), new.count(Kind.MODEL), config.max_models)
        require_room("agents", len(mesh.targets), new.count(Kind.AGENT), config.max_agents)
        require_room("routes", len(mesh.routes), new.count(Kind.ROUTE), config.max_routes)
        growth = mesh.sizes.growth_bytes(
            [
                *(each.manifest for each in plan.models),
                *(each.manifest for each in plan.agents),
                *(each.manifest for each in plan.routes),
            ]
        )
        require_room("bytes of models, agents and routes", mesh.sizes.total_bytes, growth, config.max_manifest_bytes)

    async def _delete(self, kind: Kind, name: str, *, force: bool) -> None:
        self._require_deletable(kind, name)
        runner, loaded = self._loaded(kind, name)
        if loaded and not force:
            raise still_loaded(kind, name, runner, loaded)
        match kind:
            case Kind.MODEL:
                await self._core.store.delete_names([name], [])
                self._core.publish(self._core.mesh.drop(models=[name]), _deleted([(kind, name)]))
            case Kind.AGENT:
                await self._core.store.delete_names([], [name])
                self._core.publish(self._core.mesh.drop(agents=[name]), _deleted([(kind, name)]))
            case Kind.RUNNER:
                await self._delete_runner(name)
            case _:
                await self._core.store.delete_names([], [], [name])
                self._core.publish(self._core.mesh.drop(routes=[name]), _deleted([(kind, name)]))
        log.info("deleted", kind=kind.value, name=name, force=force)

    async def _delete_runner(self, name: str) -> None:
        mesh = self._core.mesh
        state = mesh.of_runner(name)
        assert state is not None, "only a runner that is known is deleted"
        rows = [row for row in state.rows() if not mesh.is_declared(*row)]
        await self._core.store.delete_sessions([state.session.id])
        self._core.publish(mesh.forget([state]), _deleted(rows))

    def _require_deletable(self, kind: Kind, name: str) -> None:
        """Raise NOT_FOUND, INVALID_ARGUMENT for a pool, or RESOURCE_IN_USE when agents or routes still refer to it."""
        mesh = self._core.mesh
        leaving, own_agents, is_known = set[str](), set[str](), False
        match kind:
            case Kind.MODEL:
                leaving, is_known = {name}, mesh.model(name) is not None
            case Kind.AGENT:
                is_known = mesh.agent(name) is not None
            case Kind.ROUTE:
                is_known = name in mesh.routes
            case Kind.RUNNER:
                state = mesh.of_runner(name)
                is_known = state is not None
                rows = [] if state is None else [row for row in state.rows() if not mesh.is_declared(*row)]
                own_agents = {agent for row_kind, agent in rows if row_kind is Kind.AGENT}
                leaving = {model for row_kind, model in rows if row_kind is Kind.MODEL}
            case Kind.POOL:
                raise invalid_field("kind", "a pool follows from its models; delete those instead")
        if not is_known:
            raise _not_found(kind, name)
        agents, routes = self._pointing_at(leaving) - own_agents, mesh.routes.broken_by(leaving)
        if agents or routes:
            raise in_use(kind, name, agents, routes)

    def _loaded(self, kind: Kind, name: str) -> tuple[str, list[str]]:
        """Return the live runner whose engines would become unowned, and its loaded models."""
        mesh, state = self._core.mesh, None
        if kind is Kind.MODEL and (published := mesh.published_model(name)) is not None:
            state = published[1]
        elif kind is Kind.RUNNER:
            state = mesh.of_runner(name)
        if state is None or not state.pulse.active:
            return "", []
        loaded = [each.model for each in state.capability.instances if is_loaded(each)]
        return state.profile.name, [model for model in loaded if kind is Kind.RUNNER or model == name]

    def _pointing_at(self, leaving: set[str]) -> set[str]:
        """Return the agents that would have no target without these models."""
        mesh = self._core.mesh
        found = set[str]().union(*(mesh.targets.of_model(model) for model in leaving))
        for pool in {pool for model in leaving if (pool := mesh.pools.pool_of(model)) is not None}:
            if leaving.issuperset(mesh.pools.members(pool)):
                found |= mesh.targets.of_pool(pool)
        return found


def _unchanged(kind: Kind, name: str, given: RunnerDeclaration | PoolDeclaration) -> Applied:
    return Applied(kind=kind, name=name, outcome=Outcome.UNCHANGED, before=given, after=given)


def _events_of(plan: _Plan) -> list[EventDraft]:
    return [
        EventDraft(
            kind=result.kind,
            name=result.name,
            reason=_EVENT_REASONS[result.outcome],
            message="declared by an operator",
        )
        for result in plan.results
        if result.outcome in _EVENT_REASONS
    ]


def _deleted(rows: list[tuple[Kind, str]]) -> list[EventDraft]:
    return list(events_for(rows, EventReason.DELETED, "deleted by an operator"))


def _not_found(kind: Kind, name: str) -> WeftError:
    return WeftError(Reason.NOT_FOUND, f"there is no {kind.value} {name!r}", metadata={kind.value: name})


class SettingsManager:
    """Reads and changes the settings; writes pass one by one with those of declarations and sessions."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    def current(self) -> MeshSettings:
        """Return the present settings; raises SHUTTING_DOWN while the registry does not run."""
        self._core.require_open()
        return self._core.settings

    async def update(self, allow_cloud_fallback: bool | None) -> MeshSettings:
        """Set what is not None; it is on disk and published when this returns. Equal values change nothing."""
        return await self._core.write(lambda: self._update(allow_cloud_fallback))

    async def _update(self, allow_cloud_fallback: bool | None) -> MeshSettings:
        core = self._core
        if allow_cloud_fallback is None or allow_cloud_fallback == core.settings.allow_cloud_fallback:
            return core.settings
        changed = replace(core.settings, allow_cloud_fallback=allow_cloud_fallback, revision=core.settings.revision + 1)
        await core.store.save_settings(changed)
        core.settings = changed
        core.publish([SettingsChanged(changed)], [_happening(changed)])
        log.info("settings changed", allow_cloud_fallback=changed.allow_cloud_fallback, revision=changed.revision)
        return changed


def _happening(settings: MeshSettings) -> EventDraft:
    may = "may" if settings.allow_cloud_fallback else "may not"
    return EventDraft(
        kind=None,
        name="settings",
        reason=EventReason.CONFIGURED,
        message=f"set by an operator: routes {may} fall back to models off the premises",
    )
