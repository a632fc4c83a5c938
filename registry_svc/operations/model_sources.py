"""Actions on sources of models: the runner that carries them out, and the name of the model that a source becomes."""

from dataclasses import dataclass

from registry_svc.operations.runner_presence import AddedModelView, RunnerDirectory
from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.model_source import (
    ModelSource,
    UrlSource,
    asked_source,
    free_name,
    reaches_anywhere,
    shown_source,
    suggested_name,
)
from weft.kernel.principal import ANY_SOURCE, Access
from weft.kernel.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTarget:
    """What a load by source is carried out on."""

    model: str
    """Name of the model in the mesh."""
    runner: str
    is_served: bool
    """Whether the runner serves this model already, from this source."""


def source_of(action: operation_pb2.OperationAction) -> tuple[ModelSource, str] | None:
    """Returns the source that an action names, and its field; None: it names none. Raises INVALID_ARGUMENT."""
    match action.WhichOneof("kind"):
        case "load_model" if action.load_model.source:
            text, field = action.load_model.source, "action.load_model.source"
        case "pull_model":
            text, field = action.pull_model.source, "action.pull_model.source"
        case _:
            return None
    source = asked_source(text, field)
    if isinstance(source, UrlSource) and source.shown != str(source):
        # It may be a credential, and operations are shown, logged and audited as they are.
        raise invalid_field(
            field, "a URL with a query is not taken by operations, which are shown; use weft pull there"
        )
    return source, field


def needed_access(action: operation_pb2.OperationAction) -> Access | None:
    """Returns the scope that an action needs besides that of all operations; None: none. The action is valid."""
    found = source_of(action)
    return ANY_SOURCE if found is not None and reaches_anywhere(found[0]) else None


def load_target(load: operation_pb2.LoadModel, directory: RunnerDirectory) -> SourceTarget:
    """Returns the name and the runner of a load by source.

    Raises ALREADY_EXISTS for a name that something else has, INVALID_ARGUMENT naming `runner` where several could, and
    NO_RUNNER_AVAILABLE where none can.
    """
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


def choose_runner(named: str, field: str, directory: RunnerDirectory) -> str:
    """Returns the runner that pulls or adds a model: the named one, or the only one that can.

    Raises NOT_FOUND, INVALID_ARGUMENT with the runners that could, and NO_RUNNER_AVAILABLE where none can.
    """
    able = directory.adding_runners()
    if named:
        if directory.runner(named) is None:
            raise WeftError(Reason.NOT_FOUND, f"no runner {named!r} is known", metadata={"field": field})
        if named not in able and directory.is_active(named):
            raise FieldError(field, f"the runner {named} serves what its configuration names alone{_choices(able)}")
        return named
    if not able:
        raise WeftError(
            Reason.NO_RUNNER_AVAILABLE,
            "no runner is there that serves models by their source; start one (weft up)",
        )
    if len(able) > 1:
        raise invalid_field(field, f"must say which runner: {', '.join(able)}")
    return able[0]


def _served(shown: str, load: operation_pb2.LoadModel, directory: RunnerDirectory) -> AddedModelView | None:
    """Returns the model that is served from this source already, as far as the load would take it."""
    return next(
        (
            each
            for each in directory.added_models()
            if each.source == shown and load.model in ("", each.model) and load.runner in ("", each.runner)
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
