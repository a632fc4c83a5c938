"""Actions on model sources: choice of the runner, and of the model's name."""

from dataclasses import dataclass

from registry_svc.operations.runner_presence import AddedModelView, RunnerDirectory
from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.load_parameters import API_KEY_ENV, REMOTE
from weft.kernel.model_source import (
    ModelSource,
    ServerSource,
    UrlSource,
    asked_source,
    free_name,
    server_source,
    shown_source,
    suggested_name,
    suggested_server_name,
)
from weft.kernel.reasons import Reason
from weft.kernel.unknown_names import RUNNER, unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTarget:
    """The model and runner of a load by source."""

    model: str
    """Name of the model in the mesh."""
    runner: str
    is_served: bool
    """Whether the runner already serves this model from this source."""


def source_of(action: operation_pb2.OperationAction) -> tuple[ModelSource | ServerSource, str] | None:
    """Returns the source in an action, and its field; None if it has none. Raises INVALID_ARGUMENT."""
    match action.WhichOneof("kind"):
        case "load_model" if action.load_model.source:
            text, field = action.load_model.source, "action.load_model.source"
            server = server_source(text, field)
            if server is not None:
                _check_attach(action.load_model)
                return server, field
        case "pull_model":
            text, field = action.pull_model.source, "action.pull_model.source"
        case _:
            return None
    source = asked_source(text, field)
    if isinstance(source, UrlSource) and source.shown != str(source):
        # The query may contain a credential, and operations are shown, logged and audited unchanged.
        raise invalid_field(
            field, "must not have a query in the URL, because operations are shown; use weft pull on that machine"
        )
    return source, field


def _check_attach(load: operation_pb2.LoadModel) -> None:
    """Raises INVALID_ARGUMENT for options that a load that attaches a server cannot have."""
    options, field = load.options, "action.load_model"
    parameters = options.parameters
    unknown = sorted(parameters.keys() - {API_KEY_ENV, REMOTE})
    if unknown:
        raise invalid_field(f"{field}.options.parameters.{unknown[0]}", f"is not {API_KEY_ENV} or {REMOTE}")
    if API_KEY_ENV in parameters and parameters[API_KEY_ENV].WhichOneof("kind") != "word":
        raise invalid_field(f"{field}.options.parameters.{API_KEY_ENV}", "must be the name of a variable")
    if REMOTE in parameters and parameters[REMOTE].WhichOneof("kind") != "flag":
        raise invalid_field(f"{field}.options.parameters.{REMOTE}", "must be true or false")
    for given, _ in options.ListFields():
        if given.name != "parameters":
            raise invalid_field(
                f"{field}.options.{given.name}", "cannot be set: weft does not load the models of external servers"
            )


def load_target(load: operation_pb2.LoadModel, directory: RunnerDirectory) -> SourceTarget:
    """Returns the name and runner for a load by source.

    Raises ALREADY_EXISTS if another resource has the name, INVALID_ARGUMENT naming `runner` if several runners could do
    it, and NO_RUNNER_AVAILABLE if none can.
    """
    server = server_source(load.source, "action.load_model.source")
    if server is not None:
        return _attach_target(server, load, directory)
    source = asked_source(load.source, "action.load_model.source")
    shown = shown_source(source)
    served = _served(shown, load, directory)
    if served is not None:
        return SourceTarget(model=served.model, runner=served.runner, is_served=True)
    runner = choose_runner(load.runner, "action.load_model.runner", directory)
    if load.model:
        _require_free(load.model, directory)
        return SourceTarget(model=load.model, runner=runner, is_served=False)
    try:
        name = free_name(suggested_name(source), directory.is_taken)
    except ValueError as error:
        raise invalid_field("action.load_model.model", f"must be given: {error}") from None
    return SourceTarget(model=name, runner=runner, is_served=False)


def _attach_target(server: ServerSource, load: operation_pb2.LoadModel, directory: RunnerDirectory) -> SourceTarget:
    """Returns the name and runner for a server to attach; see `load_target`."""
    field = "action.load_model.runner"
    able = directory.attaching_runners()
    # Prefer the runner that serves models by their source: a mesh of one machine has one such runner.
    preferred = [name for name in directory.adding_runners() if name in able]
    choices = preferred if len(preferred) == 1 else able
    if load.runner:
        if load.runner not in directory.runner_names():
            raise unknown_name(RUNNER, load.runner, directory.runner_names(), field=field)
        if load.runner not in able and directory.is_active(load.runner):
            raise FieldError(field, f"the runner {load.runner} attaches no servers{_choices(able)}")
        choices = [load.runner]
    if not choices:
        raise WeftError(Reason.NO_RUNNER_AVAILABLE, "no runner can attach servers; start one (weft up)")
    if len(choices) > 1:
        raise invalid_field(field, f"must say which runner: {', '.join(choices)}")
    if load.model:
        if directory.runner_of_server(load.model) is None:
            _require_free(load.model, directory)
        return SourceTarget(model=load.model, runner=choices[0], is_served=False)
    name = free_name(suggested_server_name(server), directory.is_taken)
    return SourceTarget(model=name, runner=choices[0], is_served=False)


def choose_runner(named: str, field: str, directory: RunnerDirectory) -> str:
    """Returns the runner that pulls or adds a model: the named one, or the only one that can.

    Raises NOT_FOUND, INVALID_ARGUMENT listing the runners that could do it, and NO_RUNNER_AVAILABLE if none can.
    """
    able = directory.adding_runners(joined=bool(named))
    if named:
        if named not in directory.runner_names():
            raise unknown_name(RUNNER, named, directory.runner_names(), field=field)
        if named not in able and directory.is_active(named):
            raise FieldError(field, f"the runner {named} serves what its configuration names alone{_choices(able)}")
        return named
    if not able:
        raise WeftError(
            Reason.NO_RUNNER_AVAILABLE,
            "no runner of the mesh can add models by their source; start one (weft up), or name a machine that joined "
            "with --accept-models",
        )
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
