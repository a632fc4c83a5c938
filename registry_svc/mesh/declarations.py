"""Declarations of operators: applied all or none, and deleted by name."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol

from google.protobuf.timestamp_pb2 import Timestamp

from registry_svc.mesh.central import Bell
from registry_svc.mesh.claims import claim_to
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.domain import EventDraft, EventReason, Kind, Outcome
from registry_svc.mesh.mesh_state import ResourceIndex
from registry_svc.mesh.overlay import says_the_same
from registry_svc.mesh.policy.declarations import (
    decide_outcome,
    in_use,
    require_alias_target,
    require_candidates,
    require_own_pattern,
    require_target,
    require_workflow_model,
    still_loaded,
)
from registry_svc.mesh.policy.events import events_for
from registry_svc.mesh.policy.limits import require_room
from registry_svc.mesh.policy.namespace import require_free
from registry_svc.mesh.policy.ownership import Author, settled_owner
from registry_svc.mesh.providers import secret_of
from registry_svc.mesh.records import is_loaded, kind_number, name_of, pool_name_of, to_kind
from registry_svc.mesh.rows import NO_NAMES, DeclaredNames, DeclaredRecords
from weft.api.registry.v1 import (
    agent_pb2,
    alias_pb2,
    model_pb2,
    profile_pb2,
    registry_service_pb2,
    route_pb2,
    tenant_pb2,
    workflow_pb2,
)
from weft.api.registry.v1.declaration_service_pb2 import (
    ApplyRequest,
    ApplyResult,
    Declaration,
    PoolDeclaration,
)
from weft.api.registry.v1.journal_pb2 import JOURNAL_MODE_UNSPECIFIED, JournalMode
from weft.api.registry.v1.model_pb2 import ModelDeclaration
from weft.api.registry.v1.settings_pb2 import MeshSettings
from weft.documents.rights import visible_names
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log import get_logger
from weft.kernel.names import AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX
from weft.kernel.reasons import Reason
from weft.kernel.rpc_auth import caller
from weft.kernel.timestamps import stamp_of
from weft.kernel.unknown_names import unknown_name

log = get_logger("weft.registry")

_EVENT_REASONS: dict[int, EventReason] = {
    ApplyResult.OUTCOME_CREATED: EventReason.CREATED,
    ApplyResult.OUTCOME_CONFIGURED: EventReason.CONFIGURED,
    ApplyResult.OUTCOME_DELETED: EventReason.DELETED,
}
_EVENT_MESSAGES: dict[int, str] = {
    ApplyResult.OUTCOME_CREATED: "declared by an operator",
    ApplyResult.OUTCOME_CONFIGURED: "declared by an operator",
    ApplyResult.OUTCOME_DELETED: "deleted by an operator",
}


NOBODY = Author()
"""The author of what the machine or a service declares for itself."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """The effects of an Apply, planned completely before any is carried out."""

    now: Timestamp
    adopt: bool
    author: Author
    arriving: dict[str, str]
    """The models of the batch, and the pool of each."""
    results: list[ApplyResult] = field(default_factory=list)
    models: list[model_pb2.Model] = field(default_factory=list)
    agents: list[agent_pb2.Agent] = field(default_factory=list)
    routes: list[route_pb2.Route] = field(default_factory=list)
    aliases: list[alias_pb2.Alias] = field(default_factory=list)
    profiles: list[profile_pb2.Profile] = field(default_factory=list)
    workflows: list[workflow_pb2.RegisteredWorkflow] = field(default_factory=list)
    tenants: list[tenant_pb2.Tenant] = field(default_factory=list)
    arriving_targets: frozenset[str] = frozenset()
    """The agents, routes and workflows of the batch, as requests ask for them."""
    leaving: DeclaredNames = NO_NAMES
    """What is deleted with it."""


class Unloader(Protocol):
    """Unloads models that are deleted."""

    async def unload(self, model: str, requested_by: str) -> None:
        """Unload a model and return when it is unloaded; raises the WeftError of the failure."""
        ...

    async def remove(self, model: str, requested_by: str) -> None:
        """End a model that its runner was asked for by its source; returns when it is no longer served."""
        ...


class Declarations:
    """Applies and deletes declarations, one write at a time with those of the session manager."""

    def __init__(
        self,
        core: RegistryCore,
        unloader: Unloader,
        has_secret: Callable[[str], bool] = lambda _: False,
        bell: Bell | None = None,
    ) -> None:
        """`has_secret` says whether there is a secret of this name; `bell` rings with every change."""
        self._core = core
        self._unloader = unloader
        self._has_secret = has_secret
        self._bell = bell or Bell()

    async def apply(self, request: ApplyRequest, author: Author = NOBODY) -> list[ApplyResult]:
        """One result per declaration, in order; see DeclarationService.Apply. `author` declares them."""
        return await self._core.write(lambda: self._apply(request, author))

    def name_of(self, name_or_id: str) -> str:
        """The name of the model, the agent or the route with this id; any other text as it is."""
        return self._core.name_of(name_or_id)

    def name_targets(self, request: ApplyRequest) -> None:
        """Replace ids to which agents, routes and aliases point by names, under which they are stored."""
        for declaration in request.declarations:
            if declaration.agent.model:
                declaration.agent.model = self.name_of(declaration.agent.model)
            if declaration.HasField("route"):
                declaration.route.candidates[:] = map(self.name_of, declaration.route.candidates)
            if declaration.workflow.model:
                declaration.workflow.model = self.name_of(declaration.workflow.model)
            if declaration.HasField("alias"):
                declaration.alias.target = self._core.asked_by(declaration.alias.target)

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
        if kind is Kind.MODEL and self._is_added(name):
            await self._remove_added(name, requested_by, force=force)
            return
        await self._core.write(lambda: self._delete(kind, name, force=force))

    async def _apply(self, request: ApplyRequest, author: Author) -> list[ApplyResult]:
        plan = self.planned(request, author)
        if not request.dry_run:
            await self.carry_out(plan)
        return plan.results

    async def carry_out(self, plan: Plan, gone: DeclaredNames = NO_NAMES, events: Iterable[EventDraft] = ()) -> None:
        """Store what was planned, delete `gone`, publish both, and record them with further events.

        Call it in a write.
        """
        planned = plan.models, plan.agents, plan.routes, plan.aliases, plan.profiles, plan.workflows, plan.tenants
        if not any(planned) and gone == NO_NAMES:
            self._core.publish([], events)
            return
        await self._core.store.save_declarations(DeclaredRecords(*planned), gone)
        mesh = self._core.mesh
        changes = mesh.drop((), gone.agents, gone.routes, gone.aliases) + mesh.declare(*planned)
        self._core.publish(changes, [*events_of(plan.results), *events])
        self._bell.ring()
        log.info(
            "declarations applied",
            models=len(plan.models),
            agents=len(plan.agents),
            routes=len(plan.routes),
            aliases=len(plan.aliases),
            profiles=len(plan.profiles),
            workflows=len(plan.workflows),
            tenants=len(plan.tenants),
            adopt=plan.adopt,
        )

    def planned(self, request: ApplyRequest, author: Author, leaving: DeclaredNames = NO_NAMES) -> Plan:
        """The effects of an Apply on what is declared now; raises what Apply raises."""
        self._require_as_expected(request)
        models = [each.model.manifest for each in request.declarations if each.HasField("model")]
        plan = Plan(
            now=stamp_of(self._core.clock.utc_now()),
            adopt=request.adopt,
            author=author,
            leaving=leaving,
            arriving={manifest.name: pool_name_of(manifest) for manifest in models},
            arriving_targets=frozenset(
                f"{kind}/{name_of(each)}"
                for each in request.declarations
                if (kind := each.WhichOneof("resource")) in {"agent", "route", "workflow"}
            ),
        )
        for index, declaration in enumerate(request.declarations):
            try:
                plan.results.append(self._planned_one(plan, declaration, f"declarations[{index}]"))
            except WeftError as error:
                error.metadata.setdefault("declaration", str(index))
                raise
        self._require_room(plan)
        return plan

    def _require_as_expected(self, request: ApplyRequest) -> None:
        """Raise RESOURCE_CHANGED for a resource that is declared otherwise than the caller read it."""
        if request.expected and len(request.expected) != len(request.declarations):
            raise invalid_field("expected", "must have one entry for each declaration, or none")
        for index, (given, expected) in enumerate(zip(request.declarations, request.expected, strict=False)):
            if name_of(given) != name_of(expected) or given.WhichOneof("resource") != expected.WhichOneof("resource"):
                raise invalid_field(f"expected[{index}]", "must be of the same kind and name as the declaration")
            if not self._core.mesh.is_declared_as(expected):
                kind = given.WhichOneof("resource")
                raise WeftError(
                    Reason.RESOURCE_CHANGED,
                    f"the {kind} {name_of(given)!r} was changed or deleted since it was read; read it again",
                    metadata={str(kind): name_of(given), "declaration": str(index)},
                )

    def _planned_one(self, plan: Plan, given: Declaration, field_: str) -> ApplyResult:
        """Plan one declaration; returns its result."""
        match given.WhichOneof("resource"):
            case "model":
                self._require_secret(given.model.manifest, f"{field_}.model.manifest.provider.api_key_ref")
                _settle_owner(
                    plan, given.model.manifest, self._core.mesh.model(name_of(given)), f"{field_}.model.manifest"
                )
                kind, (outcome, before) = Kind.MODEL, self._plan_model(plan, given.model)
            case "agent":
                _settle_owner(plan, given.agent, self._core.mesh.agent(name_of(given)), f"{field_}.agent")
                kind, (outcome, before) = Kind.AGENT, self._plan_agent(plan, given.agent)
            case "route":
                kind, (outcome, before) = Kind.ROUTE, self._plan_route(plan, given.route)
            case "alias":
                kind, (outcome, before) = Kind.ALIAS, self._plan_alias(plan, given.alias)
            case "profile":
                kind, (outcome, before) = Kind.PROFILE, self._plan_profile(plan, given.profile)
            case "workflow":
                kind, (outcome, before) = Kind.WORKFLOW, self._plan_workflow(plan, given.workflow)
            case "tenant":
                kind, (outcome, before) = Kind.TENANT, self._plan_tenant(plan, given.tenant)
            case "runner":
                self._require_runner(given.runner.name)
                kind, outcome, before = Kind.RUNNER, Outcome.UNCHANGED, given
            case _:
                self._require_pool(plan, given.pool, f"{field_}.pool.members")
                kind, outcome, before = Kind.POOL, Outcome.UNCHANGED, given
        return ApplyResult(
            kind=kind_number(kind),
            name=name_of(given),
            outcome=ApplyResult.Outcome.ValueType(outcome),
            before=before,
            after=given,
        )

    def _plan_model(self, plan: Plan, given: ModelDeclaration) -> tuple[Outcome, Declaration | None]:
        mesh, manifest = self._core.mesh, given.manifest
        require_free([claim_to(mesh, Kind.MODEL, manifest.name)])
        if manifest.pool_name:
            require_free([claim_to(mesh, Kind.POOL, manifest.pool_name)])
        view, declared = mesh.model(manifest.name), mesh.declared_model(manifest.name)
        publication, publisher = mesh.published_model(manifest.name) or (None, None)
        outcome = decide_outcome(
            Kind.MODEL,
            manifest.name,
            is_declared=declared is not None,
            same=says_the_same(given, view=view, declared=declared, publication=publication),
            publisher="" if publication is None else publication.runner,
            publisher_live=publisher is not None and publisher.pulse.active,
            adopt=plan.adopt,
        )
        if outcome is Outcome.UNCHANGED:
            return outcome, Declaration(model=given)
        plan.models.append(
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
        return outcome, Declaration(model=ModelDeclaration(manifest=known.manifest, runner=known.declared_runner))

    def _plan_agent(self, plan: Plan, given: agent_pb2.AgentManifest) -> tuple[Outcome, Declaration | None]:
        mesh, name = self._core.mesh, given.name
        require_free([claim_to(mesh, Kind.AGENT, name, besides=frozenset(plan.arriving))])
        require_target(mesh.target(given), arriving=plan.arriving, leaving=(), names=partial(_seen, mesh))
        view, declared = mesh.agent(name), mesh.declared_agent(name)
        publication, publisher = mesh.published_agent(name) or (None, None)
        outcome = decide_outcome(
            Kind.AGENT,
            name,
            is_declared=declared is not None,
            same=view is not None and given == view.manifest,
            publisher="" if publication is None else publication.runner,
            publisher_live=publisher is not None and publisher.pulse.active,
            adopt=plan.adopt,
        )
        if outcome is not Outcome.UNCHANGED:
            created = plan.now if view is None else view.create_time
            plan.agents.append(agent_pb2.Agent(manifest=given, kind=agent_pb2.Agent.KIND_PUBLIC, create_time=created))
        return outcome, None if view is None else Declaration(agent=view.manifest)

    def _plan_route(self, plan: Plan, given: route_pb2.RouteManifest) -> tuple[Outcome, Declaration | None]:
        mesh, name = self._core.mesh, given.name
        require_free([claim_to(mesh, Kind.ROUTE, name, besides=frozenset(plan.arriving))])
        names = partial(_seen, mesh, Kind.MODEL, Kind.POOL)
        require_candidates(name, mesh.routes.candidates(given), arriving=plan.arriving, names=names)
        earlier = mesh.routes.get(name)
        # No runner publishes routes. The order of a ladder is what it is about.
        outcome = decide_outcome(
            Kind.ROUTE,
            name,
            is_declared=earlier is not None,
            same=earlier is not None and given == earlier.manifest,
            publisher="",
            publisher_live=False,
            adopt=plan.adopt,
        )
        if outcome is not Outcome.UNCHANGED:
            created = plan.now if earlier is None else earlier.create_time
            plan.routes.append(route_pb2.Route(manifest=given, create_time=created))
        return outcome, None if earlier is None else Declaration(route=earlier.manifest)

    def _plan_alias(self, plan: Plan, given: alias_pb2.AliasManifest) -> tuple[Outcome, Declaration | None]:
        mesh, name = self._core.mesh, given.name
        is_known = self._is_target(plan, given.target)
        require_alias_target(name, given.target, is_known=is_known, names=partial(_seen_targets, mesh))
        others = (each.manifest for each in plan.aliases)
        twin = next((each.name for each in others if (each.tenant, each.pattern) == (given.tenant, given.pattern)), "")
        require_own_pattern(name, given.pattern, twin or mesh.aliases.same_pattern(given, plan.leaving.aliases))
        earlier = mesh.aliases.declared(name)
        outcome = decide_outcome(
            Kind.ALIAS,
            name,
            is_declared=earlier is not None,
            same=earlier is not None and given == earlier.manifest,
            publisher="",
            publisher_live=False,
            adopt=plan.adopt,
        )
        if outcome is not Outcome.UNCHANGED:
            created = plan.now if earlier is None else earlier.create_time
            source = alias_pb2.Alias.SOURCE_DECLARED
            plan.aliases.append(alias_pb2.Alias(manifest=given, source=source, create_time=created))
        return outcome, None if earlier is None else Declaration(alias=earlier.manifest)

    def _plan_profile(self, plan: Plan, given: profile_pb2.ProfileManifest) -> tuple[Outcome, Declaration | None]:
        earlier = self._core.mesh.profiles.get(given.name)
        if earlier is not None and given == earlier.manifest:
            return Outcome.UNCHANGED, Declaration(profile=given)
        profile = profile_pb2.Profile(create_time=plan.now)
        if earlier is not None:
            profile.CopyFrom(earlier)
        profile.manifest.CopyFrom(given)
        plan.profiles.append(profile)
        if earlier is None:
            return Outcome.CREATED, None
        return Outcome.CONFIGURED, Declaration(profile=earlier.manifest)

    def _plan_workflow(self, plan: Plan, given: workflow_pb2.WorkflowManifest) -> tuple[Outcome, Declaration | None]:
        mesh, name = self._core.mesh, given.name
        require_free([claim_to(mesh, Kind.WORKFLOW, name, besides=frozenset(plan.arriving))])
        is_known = self._is_model_or_pool(plan, given.model)
        require_workflow_model(name, given.model, is_known=is_known, names=partial(_seen, mesh, Kind.MODEL, Kind.POOL))
        earlier = mesh.workflows.get(name)
        if earlier is not None and given == earlier.manifest:
            return Outcome.UNCHANGED, Declaration(workflow=given)
        created = plan.now if earlier is None else earlier.create_time
        plan.workflows.append(workflow_pb2.RegisteredWorkflow(manifest=given, create_time=created))
        if earlier is None:
            return Outcome.CREATED, None
        return Outcome.CONFIGURED, Declaration(workflow=earlier.manifest)

    def _plan_tenant(self, plan: Plan, given: tenant_pb2.TenantManifest) -> tuple[Outcome, Declaration | None]:
        earlier = self._core.mesh.tenants.declared(given.name)
        if earlier is not None and given == earlier.manifest:
            return Outcome.UNCHANGED, Declaration(tenant=given)
        created = plan.now if earlier is None else earlier.create_time
        source = tenant_pb2.Tenant.SOURCE_DECLARED
        plan.tenants.append(tenant_pb2.Tenant(manifest=given, source=source, create_time=created))
        if earlier is None:
            return Outcome.CREATED, None
        return Outcome.CONFIGURED, Declaration(tenant=earlier.manifest)

    def _is_target(self, plan: Plan, target: str) -> bool:
        """Whether a request could mean this once the batch is applied."""
        mesh = self._core.mesh
        if target in plan.arriving_targets:
            return True
        if target.startswith(AGENT_PREFIX):
            agent = target.removeprefix(AGENT_PREFIX)
            return agent not in plan.leaving.agents and mesh.agent(agent) is not None
        if target.startswith(ROUTE_PREFIX):
            route = target.removeprefix(ROUTE_PREFIX)
            return route not in plan.leaving.routes and route in mesh.routes
        if target.startswith(WORKFLOW_PREFIX):
            return target.removeprefix(WORKFLOW_PREFIX) in mesh.workflows
        return self._is_model_or_pool(plan, target)

    def _is_model_or_pool(self, plan: Plan, name: str) -> bool:
        """Whether there is a model or a pool of this name once the batch is applied."""
        if name in plan.arriving or name in plan.arriving.values():
            return True
        return self._core.mesh.model(name) is not None or self._core.mesh.pool(name) is not None

    def _require_secret(self, manifest: model_pb2.ModelManifest, field_: str) -> None:
        name = secret_of(manifest)
        if name and not self._has_secret(name):
            raise invalid_field(field_, f"there is no secret {name!r}; create it first: weft create secret {name}")

    def _require_runner(self, name: str) -> None:
        if self._core.mesh.of_runner(name) is None:
            raise WeftError(
                Reason.NOT_FOUND,
                f"there is no runner {name!r}; runners cannot be declared, they register themselves",
                metadata={Kind.RUNNER.value: name},
            )

    def _require_pool(self, plan: Plan, given: PoolDeclaration, field_: str) -> None:
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

    def _require_room(self, plan: Plan) -> None:
        mesh, config = self._core.mesh, self._core.config
        new = [result.kind for result in plan.results if result.outcome == ApplyResult.OUTCOME_CREATED]
        for what, present, kind, limit in (
            ("models", len(mesh.pools), Kind.MODEL, config.max_models),
            ("agents", len(mesh.targets), Kind.AGENT, config.max_agents),
            ("routes", len(mesh.routes), Kind.ROUTE, config.max_routes),
            ("aliases", len(mesh.aliases), Kind.ALIAS, config.max_aliases),
            ("profiles", len(mesh.profiles), Kind.PROFILE, config.max_profiles),
            ("workflows", len(mesh.workflows), Kind.WORKFLOW, config.max_workflows),
            ("tenants", len(mesh.tenants), Kind.TENANT, config.max_tenants),
        ):
            require_room(what, present, new.count(kind_number(kind)), limit)
        growth = mesh.sizes.growth_bytes(
            [
                *(each.manifest for each in plan.models),
                *(each.manifest for each in plan.agents),
                *(each.manifest for each in plan.routes),
                *(each.manifest for each in plan.aliases),
                *(each.manifest for each in plan.profiles),
                *(each.manifest for each in plan.workflows),
                *(each.manifest for each in plan.tenants),
            ]
        )
        require_room(
            "bytes of all that is declared and published", mesh.sizes.total_bytes, growth, config.max_manifest_bytes
        )

    async def _delete(self, kind: Kind, name: str, *, force: bool) -> None:
        self._require_deletable(kind, name)
        runner, loaded = self._loaded(kind, name)
        if loaded and not force:
            raise still_loaded(kind, name, runner, loaded)
        match kind:
            case Kind.MODEL:
                await self._core.store.delete_names([name], [])
                self._core.publish(self._core.mesh.drop(models=[name]), _deleted([(kind, name)]))
                self._bell.ring()
            case Kind.AGENT:
                await self._core.store.delete_names([], [name])
                self._core.publish(self._core.mesh.drop(agents=[name]), _deleted([(kind, name)]))
            case Kind.RUNNER:
                await self._delete_runner(name)
            case Kind.ALIAS:
                await self._core.store.delete_names([], [], [], [name])
                self._core.publish(self._core.mesh.drop(aliases=[name]), _deleted([(kind, name)]))
            case Kind.PROFILE:
                await self._core.store.delete_names([], [], [], [], [name])
                self._core.publish(self._core.mesh.drop(profiles=[name]), _deleted([(kind, name)]))
            case Kind.WORKFLOW:
                await self._core.store.delete_names([], [], [], [], [], [name])
                self._core.publish(self._core.mesh.drop(workflows=[name]), _deleted([(kind, name)]))
            case Kind.TENANT:
                await self._core.store.delete_names([], [], tenants=[name])
                self._core.publish(self._core.mesh.drop(tenants=[name]), _deleted([(kind, name)]))
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
        """Raise NOT_FOUND, INVALID_ARGUMENT for a pool, or RESOURCE_IN_USE when others still refer to it."""
        mesh = self._core.mesh
        leaving, own_agents, targets, is_known = set[str](), set[str](), set[str](), False
        match kind:
            case Kind.MODEL:
                leaving, is_known = {name}, mesh.model(name) is not None
            case Kind.AGENT:
                targets, is_known = {AGENT_PREFIX + name}, mesh.agent(name) is not None
            case Kind.ROUTE | Kind.WORKFLOW:
                targets, is_known = self._ladder_or_workflow(kind, name)
            case Kind.ALIAS | Kind.TENANT:
                is_known = self._require_declared(kind, name)
            case Kind.PROFILE:
                is_known = mesh.profiles.get(name) is not None
            case Kind.RUNNER:
                state = mesh.of_runner(name)
                is_known = state is not None
                rows = [] if state is None else [row for row in state.rows() if not mesh.is_declared(*row)]
                own_agents = {agent for row_kind, agent in rows if row_kind is Kind.AGENT}
                leaving = {model for row_kind, model in rows if row_kind is Kind.MODEL}
            case Kind.POOL:
                raise invalid_field("kind", "a pool follows from its models; delete those instead")
        if not is_known:
            raise unknown_name(kind.value, name, visible_names(caller(), mesh.names_of(kind)))
        agents, routes = self._pointing_at(leaving) - own_agents, mesh.routes.broken_by(leaving)
        names = self._leaving_names(leaving)
        aliases, workflows = mesh.aliases.leading_to(targets | names), mesh.workflows.naming(names)
        if agents or routes or aliases or workflows:
            raise in_use(kind, name, agents, routes, aliases, workflows)

    def _ladder_or_workflow(self, kind: Kind, name: str) -> tuple[set[str], bool]:
        """Return what requests for a route or a workflow ask for, and whether there is one."""
        if kind is Kind.ROUTE:
            return {ROUTE_PREFIX + name}, name in self._core.mesh.routes
        return {WORKFLOW_PREFIX + name}, name in self._core.mesh.workflows

    def _require_declared(self, kind: Kind, name: str) -> bool:
        """Whether there is an alias or a tenant of this name; raises RESOURCE_IN_USE for one of the configuration."""
        mesh = self._core.mesh
        index, section = (
            (mesh.aliases, "registry.aliases")
            if kind is Kind.ALIAS
            else (mesh.tenants, "router.tenants, router.rate_limits")
        )
        if index.declared(name) is None and name in index.shown:
            raise WeftError(
                Reason.RESOURCE_IN_USE,
                f"the {kind.value} {name!r} is of the mesh's weft.yaml ({section}); remove it there",
                metadata={kind.value: name},
            )
        return index.declared(name) is not None

    def _leaving_names(self, leaving: set[str]) -> set[str]:
        """Return these models, and the pools that would have no member without them."""
        pools = self._core.mesh.pools
        of_models = {pool for model in leaving if (pool := pools.pool_of(model)) is not None}
        return {name for name in leaving | of_models if leaving.issuperset(pools.members(name))}

    def _loaded(self, kind: Kind, name: str) -> tuple[str, list[str]]:
        """Return the live runner whose engines would become unowned, and its loaded models."""
        mesh, state = self._core.mesh, None
        if kind is Kind.MODEL:
            # No engine of a central model would be left without an owner.
            state = None if name in mesh.central_models else mesh.publisher_of(name)
        elif kind is Kind.RUNNER:
            state = mesh.of_runner(name)
        if state is None or not state.pulse.active:
            return "", []
        loaded = [each.model for each in state.capability.message().instances if is_loaded(each)]
        return state.profile.name, [model for model in loaded if kind is Kind.RUNNER or model == name]

    async def _remove_added(self, name: str, requested_by: str, *, force: bool) -> None:
        """Have the runner of an added model end it; its next session is without the model."""
        self._require_deletable(Kind.MODEL, name)
        runner, loaded = self._loaded(Kind.MODEL, name)
        if loaded and not force:
            raise still_loaded(Kind.MODEL, name, runner, loaded)
        await self._unloader.remove(name, requested_by)
        await self._core.write(lambda: self._delete_remaining(name))

    async def _delete_remaining(self, name: str) -> None:
        """Delete a model that its runner has ended, unless the runner's next session went before and took it along."""
        if self._core.mesh.model(name) is not None:
            await self._delete(Kind.MODEL, name, force=True)

    def _is_added(self, name: str) -> bool:
        """Whether a runner that is there serves a model because it was asked for it by its source."""
        state = self._core.mesh.publisher_of(name)
        if state is None or not state.pulse.active:
            return False
        instances = state.capability.message().instances
        return any(each.model == name and each.added_source for each in instances)

    def _pointing_at(self, leaving: set[str]) -> set[str]:
        """Return the agents that would have no target without these models."""
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
    """Set the owner in a declaration that is planned; raises PERMISSION_DENIED naming the field."""
    earlier = None if view is None else view.manifest.tags.owner
    owner = settled_owner(manifest.tags.owner, plan.author, earlier=earlier, field=f"{field_}.tags.owner")
    if owner:
        manifest.tags.owner = owner


def events_of(results: Iterable[ApplyResult]) -> list[EventDraft]:
    """The events of what was done."""
    return [
        EventDraft(
            kind=to_kind(result.kind, "kind"),
            name=result.name,
            reason=_EVENT_REASONS[result.outcome],
            message=_EVENT_MESSAGES[result.outcome],
        )
        for result in results
        if result.outcome in _EVENT_REASONS
    ]


def _deleted(rows: list[tuple[Kind, str]]) -> list[EventDraft]:
    return list(events_for(rows, EventReason.DELETED, "deleted by an operator"))


class SettingsManager:
    """Reads and changes the settings; writes pass one by one with those of declarations and sessions."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    def current(self) -> MeshSettings:
        """Return the present settings; raises SHUTTING_DOWN while the registry does not run."""
        self._core.require_open()
        return self._core.settings

    async def update(
        self, allow_cloud_fallback: bool | None, journal: "JournalMode.ValueType" = JOURNAL_MODE_UNSPECIFIED
    ) -> MeshSettings:
        """Set what is given; it is on disk and published when this returns. Equal values change nothing."""
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


def _happening(before: MeshSettings, settings: MeshSettings) -> EventDraft:
    may = "may" if settings.allow_cloud_fallback else "may not"
    changes = []
    if before.allow_cloud_fallback != settings.allow_cloud_fallback:
        changes.append(f"routes {may} fall back to remote models")
    if before.journal != settings.journal:
        changes.append(f"requests without a setting of their own are journaled: {_journal_word(settings)}")
    return EventDraft(
        kind=None,
        name="settings",
        reason=EventReason.CONFIGURED,
        message=f"set by an operator: {'; '.join(changes)}",
    )


def _journal_word(settings: MeshSettings) -> str:
    return JournalMode.Name(settings.journal).removeprefix("JOURNAL_MODE_").lower()


def _seen(mesh: ResourceIndex, *kinds: Kind) -> frozenset[str]:
    """Returns the names of some kinds that the caller may see; a pool has the name of its only model."""
    return frozenset(visible_names(caller(), chain.from_iterable(map(mesh.names_of, kinds))))


def _seen_targets(mesh: ResourceIndex) -> Iterator[str]:
    """Yields what the caller's requests can name, with the prefixes of agents, routes and workflows."""
    yield from _seen(mesh, Kind.MODEL, Kind.POOL)
    for kind, prefix in (
        (Kind.AGENT, AGENT_PREFIX),
        (Kind.ROUTE, ROUTE_PREFIX),
        (Kind.WORKFLOW, WORKFLOW_PREFIX),
    ):
        yield from (f"{prefix}{name}" for name in _seen(mesh, kind))
