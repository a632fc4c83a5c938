"""Decides which models and agents of an opening session are published; the others are left out, with the reason."""

from collections.abc import Sequence

from registry_svc.mesh.leave_out import keep_valid
from registry_svc.mesh.mesh_state import Mesh
from registry_svc.mesh.name_owners import owners_of_name
from registry_svc.mesh.policy.declarations import absent, exists
from registry_svc.mesh.policy.heartbeat import Admitted
from registry_svc.mesh.policy.joining import Joiner
from registry_svc.mesh.policy.limits import require_room
from registry_svc.mesh.policy.namespace import NameOwners, sessions_to_end
from registry_svc.mesh.records import pool_name_of
from registry_svc.mesh.session_state import listed_in
from registry_svc.registry_config import RegistryConfig
from weft.api.registry.v1.agent_pb2 import AgentManifest
from weft.api.registry.v1.model_pb2 import ModelManifest
from weft.api.registry.v1.runner_pb2 import LeftOut
from weft.api.registry.v1.runner_session_service_pb2 import OpenSessionRequest
from weft.documents.kinds import DECLARED_KINDS
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import ANY, AUTO_MODEL, matches, with_twin


class Publication:
    """The items of one opening session, admitted one by one: models first, since agents may point to them."""

    def __init__(
        self, mesh: Mesh, config: RegistryConfig, runner: str, decision: Admitted, joiner: Joiner | None = None
    ) -> None:
        """`joiner`: the rights of a runner that joined over a relay; None: it did not."""
        self._mesh = mesh
        self._joiner = joiner
        self._config = config
        self._runner = runner
        self._own = "" if decision.adopted is None else decision.adopted.id
        self.ended = set(decision.evicted)
        """Ids of dead sessions that lose all their resources."""
        self._new_models = self._new_agents = self._growth_bytes = 0
        self._declared_instead: dict[str, str] = {}
        """What the names of models from lists of servers are declared for, by name."""
        self._arriving: dict[str, str] = {}
        """Pools of the admitted models, by name."""

    def leave_out(self, opening: OpenSessionRequest) -> list[LeftOut]:
        """Removes from an opening what cannot be published; returns it. If it requires all, raises the first error."""
        config, whole = self._config, opening.requires_all
        self._declared_instead = self._mesh.declared_instead(listed_in(opening.runner.capability))
        models = config.max_models_per_session
        removed = keep_valid(opening.models, "model", models, self._admit_model, requires_all=whole)
        agents = config.max_agents_per_session
        return removed + keep_valid(opening.agents, "agent", agents, self._admit_agent, requires_all=whole)

    def _admit_model(self, manifest: ModelManifest) -> None:
        declared = self._mesh.declared_model(manifest.name)
        if (what := self._declared_instead.get(manifest.name)) is not None:
            words = f"the name {manifest.name!r}, which a server lists, is that of {what}"
            raise WeftError(Reason.ALREADY_EXISTS, words)
        pools = [manifest.pool_name] if manifest.pool_name and declared is None else []
        self._require_own(manifest.name, None if declared is None else declared.declared_runner)
        for pool in dict.fromkeys((*pools, manifest.name)):
            self._require_own_pool(pool, manifest.name)
        # If a model is also declared, the declared pool applies.
        wanted = [
            self._owners(ResourceKind.MODEL, manifest.name),
            *(self._owners(ResourceKind.POOL, each) for each in pools),
        ]
        self._take(ResourceKind.MODEL, manifest, wanted)
        self._arriving[manifest.name] = pool_name_of(manifest if declared is None else declared.manifest)

    def _admit_agent(self, manifest: AgentManifest) -> None:
        self._require_targets(manifest)
        self._require_own(manifest.name, "" if self._mesh.is_declared(ResourceKind.AGENT, manifest.name) else None)
        self._take(ResourceKind.AGENT, manifest, [self._owners(ResourceKind.AGENT, manifest.name)])

    def _owners(self, kind: ResourceKind, name: str) -> NameOwners:
        return owners_of_name(self._mesh, kind, name, joiner=self._joiner)

    def _require_own(self, name: str, declared_runner: str | None) -> None:
        """Raises an error for a name that a joined runner may not have.

        `declared_runner`: the runner that a declaration of this name is for, or "" for any; None: it is not declared.
        """
        joiner = self._joiner
        if joiner is None or declared_runner == self._runner:
            return
        joiner.require_name(name)
        if declared_runner is not None and not joiner.name_pattern:
            raise WeftError(Reason.ALREADY_EXISTS, f"the name {name!r} is declared by an operator; choose another name")

    def _require_own_pool(self, pool: str, own: str) -> None:
        """Raises an error if a joined runner's model `own` would answer for models of others, or for an alias."""
        mesh, joiner = self._mesh, self._joiner
        if joiner is None or pool == joiner.pool:
            return
        aliases = mesh.documents[ResourceKind.ALIAS].shown.values()
        patterns = {AUTO_MODEL, *(each.manifest.pattern for each in aliases)} - {ANY}
        is_alias = any(matches(pattern, name) for pattern in patterns for name in with_twin(pool))
        if is_alias and not joiner.name_pattern:
            raise WeftError(Reason.ALREADY_EXISTS, f"the name {pool!r} is an alias of the mesh; choose another name")
        answering = {model for name in with_twin(pool) for model in (*mesh.pools.members(name), name)} - {own}
        for model in filter(mesh.model, answering):
            state, declared = mesh.publisher_of(model), mesh.declared_model(model)
            is_own = state is not None and (state.profile.joined_by == joiner.id or state.session.id == self._own)
            if not is_own or (declared is not None and declared.declared_runner != self._runner):
                raise joiner.others_pool(pool)
        if pool != own:
            joiner.require_name(pool)

    def _take(self, kind: ResourceKind, manifest: ModelManifest | AgentManifest, wanted: Sequence[NameOwners]) -> None:
        """Admits an item. Raises ALREADY_EXISTS for a name that another session keeps, and TOO_MANY_RESOURCES."""
        mesh, config, name = self._mesh, self._config, manifest.name
        ended = sessions_to_end(wanted, own_session=self._own, runner=self._runner)
        models = self._new_models + (kind is ResourceKind.MODEL and mesh.model(name) is None)
        agents = self._new_agents + (kind is ResourceKind.AGENT and mesh.agent(name) is None)
        growth = self._growth_bytes + mesh.sizes.growth_bytes([(kind, name, manifest)])
        require_room("models", len(mesh.pools), models, config.max_models)
        require_room("agents", len(mesh.targets), agents, config.max_agents)
        require_room("bytes of models, agents and routes", mesh.sizes.total_bytes, growth, config.max_manifest_bytes)
        self._new_models, self._new_agents, self._growth_bytes = models, agents, growth
        self.ended |= ended

    def _require_targets(self, agent: AgentManifest) -> None:
        """Raises MODEL_NOT_FOUND if what an agent points to is neither in the mesh nor admitted."""
        mesh = self._mesh
        ending = (mesh.of_session(session) for session in {*self.ended, self._own})
        leaving = {
            name
            for state in ending
            if state is not None
            for name in state.publications
            if not mesh.declared_model(name)
        }
        for reference in DECLARED_KINDS[ResourceKind.AGENT].references_of(agent):
            to = reference.field.to
            if not exists(mesh.target(reference.target), to, arriving=self._arriving, leaving=leaving):
                raise absent(ResourceKind.AGENT, agent.name, reference, mesh.names_of(ResourceKind(to.value)))
