"""What an action names in the mesh: models, pools, runners and sources, and whether there are such."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.name_owners import owners_of_name
from registry_svc.mesh.session_state import SessionState
from registry_svc.operations.policy.loads import PoolMember
from weft.api.operations.v1 import operation_pb2
from weft.api.registry.v1 import runner_pb2
from weft.documents.resource_kinds import ResourceKind
from weft.documents.rights import visible_names
from weft.kernel.access.rpc_auth import caller
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import (
    ServerSource,
    asked_source,
    free_name,
    server_source,
    shown_source,
    suggested_name,
)
from weft.kernel.values.unknown_names import MODEL, MODEL_OR_POOL, RUNNER, unknown_name

_LOADED = frozenset({runner_pb2.InstanceState.PHASE_LOADING, runner_pb2.InstanceState.PHASE_READY})


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTarget:
    """The model and runner of a load by source."""

    model: str
    """Name of the model in the mesh."""
    runner: str
    is_served: bool = False
    """Whether the runner already serves this model from this source."""
    is_server: bool = False
    """Whether the source is a server to attach."""


@dataclass(frozen=True, slots=True)
class AddedModelView:
    """A model that an active runner serves by its source."""

    model: str
    source: str
    """For display: a URL has no query."""
    runner: str
    is_joined: bool = False
    """Whether this is what a joined machine says: it counts only for loads that name the machine."""


class RunnerDirectory:
    """Lookup of runners, models and pools."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    def runner_of(self, model: str) -> str | None:
        """Returns the runner that serves a model, "" if none does yet; None if the model is unknown."""
        found = self._core.mesh.model(model)
        return None if found is None else found.runner

    def holder_of(self, model: str) -> str | None:
        """As `runner_of`, but also returns a runner that has the model loaded but no longer publishes it."""
        found = self.runner_of(model)
        return self._core.mesh.unowned_on(model) if found is None else found

    def pool(self, name: str) -> tuple[PoolMember, ...]:
        """Returns the members of a pool; empty if there is no such pool."""
        found = self._core.mesh.pool(name)
        if found is None:
            return ()
        return tuple(self._pool_member(model.manifest.name, model.runner) for model in found.members)

    def names_pool(self, name: str) -> bool:
        """Whether models name this pool, so that it is not just the implicit pool of one model."""
        return self._core.mesh.pools.is_explicit(name)

    def incarnation_of(self, runner: str) -> str | None:
        """Returns the incarnation of an active runner, otherwise None."""
        member = self._core.mesh.of_runner(runner)
        return member.profile.incarnation if member is not None and member.pulse.active else None

    def active_runners(self) -> list[str]:
        """Returns the names of active runners, sorted."""
        return sorted(member.profile.name for member in self._core.mesh if member.pulse.active)

    def is_active(self, runner: str) -> bool:
        """Whether a runner is active."""
        return self.incarnation_of(runner) is not None

    def adding_runners(self, *, joined: bool = False) -> list[str]:
        """Returns the names of active runners that serve models by source, sorted; `joined`: also joined machines."""
        return sorted(each.profile.name for each in self._active(joined) if each.capability.message().adds_models)

    def attaching_runners(self) -> list[str]:
        """Returns the names of active runners that attach servers, sorted; joined machines attach none."""
        return sorted(each.profile.name for each in self._active() if each.capability.message().attaches_servers)

    def runner_of_server(self, server: str) -> str | None:
        """Returns the active runner that has attached a server, or None."""
        found = (each for each in self._active() if server in each.capability.message().attached_servers)
        return next((each.profile.name for each in found), None)

    def added_models(self) -> list[AddedModelView]:
        """Returns the models that active runners serve by source."""
        return [
            AddedModelView(instance.model, instance.added_source, each.profile.name, each.profile.dial_out)
            for each in self._active(joined=True)
            for instance in each.capability.message().instances
            if instance.added_source
        ]

    def known_names(self) -> Iterable[str]:
        """Returns the names of all models and pools."""
        mesh = self._core.mesh
        return {*mesh.names_of(ResourceKind.MODEL), *mesh.names_of(ResourceKind.POOL)}

    def runner_names(self) -> Iterable[str]:
        """Returns the names of all runners, including inactive ones."""
        return self._core.mesh.names_of(ResourceKind.RUNNER)

    def is_taken(self, name: str) -> bool:
        """Whether a resource has a name, so that a runner cannot publish a model with it."""
        mesh = self._core.mesh
        return bool(owners_of_name(mesh, ResourceKind.MODEL, name).owners or mesh.pools.is_explicit(name))

    def _active(self, joined: bool = False) -> Iterator[SessionState]:
        """Yields active runners; `joined`: also machines that joined, which may report what they like."""
        return (each for each in self._core.mesh if each.pulse.active and (joined or not each.profile.dial_out))

    def _pool_member(self, model: str, runner: str) -> PoolMember:
        member = self._core.mesh.of_runner(runner) if runner else None
        instances = () if member is None else member.capability.message().instances
        instance = next((each for each in instances if each.model == model), None)
        return PoolMember(
            model=model,
            reachable=member is not None and member.pulse.active,
            loaded=instance is not None and instance.phase in _LOADED,
            slots_used=0 if instance is None else instance.slots_used,
        )


def require_known(action: operation_pb2.OperationAction, directory: RunnerDirectory) -> None:
    """Raises MODEL_NOT_FOUND or NOT_FOUND for unknown names, INVALID_ARGUMENT for names that do not fit together."""
    match action.WhichOneof("kind"):
        case "load_model":
            _require_loadable(action.load_model, "action.load_model", directory)
        case "unload_model":
            _require_unloadable(action.unload_model.model, "action.unload_model.model", directory)
        case "pull_model":
            choose_runner(action.pull_model.runner, "action.pull_model.runner", directory)
        case "remove_model":
            _require_removable(action.remove_model.model, "action.remove_model.model", directory)
        case _:
            _require_flushable(action.flush_cache, "action.flush_cache", directory)


def subjects_of(action: operation_pb2.OperationAction, directory: RunnerDirectory) -> frozenset[str]:
    """Returns the names that an action changes. Operations on the same name do not run concurrently."""
    match action.WhichOneof("kind"):
        case "load_model":
            load = action.load_model
            if load.source:
                return frozenset({_name_of(load, directory), *([load.evict_model] if load.evict_model else [])})
            pool = () if is_single(load, directory) else _member_names(load.model, directory)
            return frozenset({load.model, *pool, *([load.evict_model] if load.evict_model else [])})
        case "unload_model":
            return frozenset({action.unload_model.model, *models_to_unload(action.unload_model.model, directory)})
        case "pull_model":
            return frozenset()
        case "remove_model":
            return frozenset({action.remove_model.model})
        case _:
            model = action.flush_cache.model
            return frozenset({model, *models_named(model, directory)} if model else ())


def _name_of(load: operation_pb2.LoadModel, directory: RunnerDirectory) -> str:
    """Returns the name of a load by source; the source if its runner is not active, for example after a restart."""
    try:
        return load_target(load, directory).model
    except WeftError:
        return load.model or load.source


def models_named(name: str, directory: RunnerDirectory) -> list[str]:
    """Returns the models that an unload or flush of `name` affects: all of the pool, or the model with this name."""
    if directory.names_pool(name) or directory.runner_of(name) is None:
        return _member_names(name, directory)
    return [name]


def models_to_unload(name: str, directory: RunnerDirectory) -> list[str]:
    """As `models_named`, but also returns a model that its runner has loaded but no longer publishes."""
    named = models_named(name, directory)
    return named if named or directory.holder_of(name) is None else [name]


def is_single(load: operation_pb2.LoadModel, directory: RunnerDirectory) -> bool:
    """Whether a load is for one model, not for members of a pool."""
    return bool(load.source) or (not load.replicas and directory.runner_of(load.model) is not None)


def _require_model(name: str, field: str, directory: RunnerDirectory) -> None:
    if directory.runner_of(name) is None and not directory.pool(name):
        raise _unknown(MODEL_OR_POOL, name, field, directory)


def _require_unloadable(name: str, field: str, directory: RunnerDirectory) -> None:
    if directory.holder_of(name) is None:
        _require_model(name, field, directory)


def _require_removable(name: str, field: str, directory: RunnerDirectory) -> None:
    if any(each.model == name for each in directory.added_models()) or directory.runner_of_server(name) is not None:
        return
    runner = directory.runner_of(name)
    if runner is None:
        raise _unknown(MODEL, name, field, directory)
    if runner and not directory.is_active(runner):
        raise WeftError(
            Reason.NO_RUNNER_AVAILABLE,
            f"the runner {runner!r} of {name} is not there; start it",
            metadata={"field": field},
        )
    raise invalid_field(field, f"{name} was not loaded by its source: its runner's configuration names it")


def _require_loadable(load: operation_pb2.LoadModel, field: str, directory: RunnerDirectory) -> None:
    if load.source:
        members = [load_target(load, directory).model]
    else:
        _require_model(load.model, f"{field}.model", directory)
        members = [load.model] if is_single(load, directory) else _member_names(load.model, directory)
    if load.replicas and not members:
        raise invalid_field(f"{field}.replicas", "must be 0 for a model that is in a pool of another name")
    if load.replicas > len(members):
        raise invalid_field(f"{field}.replicas", f"must be at most {len(members)}: the pool has so many members")
    if load.evict_model in members:
        raise invalid_field(f"{field}.evict_model", "must not be what is to be loaded")
    if load.evict_model and directory.runner_of(load.evict_model) is None:
        raise _unknown(MODEL, load.evict_model, f"{field}.evict_model", directory)


def _require_flushable(flush: operation_pb2.FlushCache, field: str, directory: RunnerDirectory) -> None:
    if flush.model:
        _require_model(flush.model, f"{field}.model", directory)
    if not flush.runner:
        return
    _require_runner(flush.runner, f"{field}.runner", directory)
    served_by = {directory.runner_of(model) for model in models_named(flush.model, directory)} if flush.model else set()
    if flush.model and flush.runner not in served_by:
        raise invalid_field(f"{field}.runner", "must be the runner of `model`, or empty")


def _require_runner(name: str, field: str, directory: RunnerDirectory) -> None:
    if name not in directory.runner_names():
        raise _unknown(RUNNER, name, field, directory)


def _unknown(kind: str, name: str, field: str, directory: RunnerDirectory) -> WeftError:
    known = directory.runner_names() if kind == RUNNER else visible_names(caller(), directory.known_names())
    return unknown_name(kind, name, known, field=field)


def _member_names(pool: str, directory: RunnerDirectory) -> list[str]:
    return [member.model for member in directory.pool(pool)]


def load_target(load: operation_pb2.LoadModel, directory: RunnerDirectory) -> SourceTarget:
    """Returns the name and runner for a load by source.

    Raises ALREADY_EXISTS if another resource has the name, INVALID_ARGUMENT naming `runner` if several runners could do
    it, and NO_RUNNER_AVAILABLE if none can.
    """
    server = server_source(load.source, "action.load_model.source")
    source = server or asked_source(load.source, "action.load_model.source")
    if isinstance(source, ServerSource):
        runner = _attaching_runner(load.runner, "action.load_model.runner", directory)
        is_attached = directory.runner_of_server(load.model) is not None
    else:
        served = _served(shown_source(source), load, directory)
        if served is not None:
            return SourceTarget(model=served.model, runner=served.runner, is_served=True)
        runner = choose_runner(load.runner, "action.load_model.runner", directory)
        is_attached = False
    if load.model and not is_attached:
        _require_free(load.model, directory)
    try:
        name = load.model or free_name(suggested_name(source), directory.is_taken)
    except ValueError as error:
        raise invalid_field("action.load_model.model", f"must be given: {error}") from None
    return SourceTarget(model=name, runner=runner, is_server=server is not None)


def _attaching_runner(named: str, field: str, directory: RunnerDirectory) -> str:
    """Returns the runner that attaches a server; see `choose_runner`."""
    able = directory.attaching_runners()
    if named:
        _require_runner(named, field, directory)
        if named not in able and directory.is_active(named):
            raise FieldError(field, f"the runner {named} attaches no servers{_choices(able)}")
        return named
    # Prefer the runner that serves models by their source: a mesh of one machine has one such runner.
    preferred = [name for name in directory.adding_runners() if name in able]
    return _only(preferred if len(preferred) == 1 else able, field, "no runner can attach servers; start one (weft up)")


def choose_runner(named: str, field: str, directory: RunnerDirectory) -> str:
    """Returns the runner that pulls or adds a model: the named one, or the only one that can.

    Raises NOT_FOUND, INVALID_ARGUMENT listing the runners that could do it, and NO_RUNNER_AVAILABLE if none can.
    """
    able = directory.adding_runners(joined=bool(named))
    if named:
        _require_runner(named, field, directory)
        if named not in able and directory.is_active(named):
            raise FieldError(field, f"the runner {named} serves what its configuration names alone{_choices(able)}")
        return named
    return _only(
        able,
        field,
        "no runner of the mesh can add models by their source; start one (weft up), or name a machine that joined "
        "with --accept-models",
    )


def _only(able: list[str], field: str, none_can: str) -> str:
    if not able:
        raise WeftError(Reason.NO_RUNNER_AVAILABLE, none_can)
    if len(able) > 1:
        raise invalid_field(field, f"must say which runner: {', '.join(able)}")
    return able[0]


def _served(shown: str, load: operation_pb2.LoadModel, directory: RunnerDirectory) -> AddedModelView | None:
    """Returns the model that is already served from this source and matches the load, or None."""
    return next(
        (
            each
            for each in directory.added_models()
            if each.source == shown and load.model in ("", each.model)
            if each.runner == load.runner or not (load.runner or each.is_joined)
        ),
        None,
    )


def _require_free(name: str, directory: RunnerDirectory) -> None:
    if not directory.is_taken(name):
        return
    holder = next((each for each in directory.added_models() if each.model == name), None)
    what = f"it is served from {holder.source}" if holder is not None else "it is that of another resource"
    raise WeftError(
        Reason.ALREADY_EXISTS,
        f"the name {name!r} is taken: {what}; choose another name",
        metadata={"field": "action.load_model.model"},
    )


def _choices(able: list[str]) -> str:
    return f"; there is: {', '.join(able)}" if able else ""
