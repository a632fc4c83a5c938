"""The runners of the configuration file: their models, parsed by the runtime's settings, and replicas."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import any_schema, with_info_plain_validator_function

from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.runtime_settings import (
    ModelSettings,
    SourcedModelSettings,
    StartedModelSettings,
    settings_fields,
)
from runner_svc.runtimes.table import built_in, find_runtime, why_off
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.settings.setting_annotations import PUBLIC
from weft.kernel.values.names import require_name_of_model

if TYPE_CHECKING:
    AnyModel = ModelSettings
else:
    # For the reference and the schema. Models of another package's runtime are parsed by its own settings.
    AnyModel = Union[tuple(runtime.settings for runtime in built_in())]  # noqa: UP007 - made at run time

Section = TypeVar("Section", bound=RunnerSettings)
MAX_MODELS = 64
"""Maximum number of models per runner."""
OF_RUNTIME = "runtime"
"""Error type for a setting that the runtime does not have, or a missing one that it requires."""
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""Validation of every section: unknown names are rejected, and nothing is converted."""


def read_models(value: Any, info: ValidationInfo) -> tuple[ModelSettings, ...]:
    """Parses the models of a runner by its runtime's settings; the runtime is parsed first.

    Raises ValidationError naming each setting that the runtime does not have, and each one with a wrong value.
    """
    runtime = find_runtime(info.data.get("runtime", ""))
    if runtime is None:
        return ()  # the error of `runtime` is reported
    misplaced = list(_misplaced(value, runtime))
    settings: Any = runtime.settings
    least = 0 if info.data.get("url") is not None else 1
    try:
        read = _adapter(settings, least).validate_json(json.dumps(value))
    except ValidationError as error:
        if not misplaced:
            raise
        known = {each["loc"] for each in misplaced}
        misplaced += [_as_given(each) for each in error.errors(include_url=False) if each["loc"] not in known]
    if misplaced:
        raise ValidationError.from_exception_data("models", misplaced)
    return read


@dataclass(frozen=True, slots=True)
class _ReadByRuntime:
    """Parses models with `read_models` only, to avoid building the validators of all runtimes, a third of a start."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> Any:
        return with_info_plain_validator_function(read_models, json_schema_input_schema=any_schema())


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredRunner(RunnerSettings):
    """One runner process."""

    __pydantic_config__ = STRICT

    models: Annotated[tuple[AnyModel, ...], _ReadByRuntime(), PUBLIC]
    """Models of the runner, each in its own process. The runtime decides which settings a model has. Optional with
    `url`."""


@cache
def _adapter(settings: Any, least: int) -> TypeAdapter[tuple[ModelSettings, ...]]:
    models: Any = Annotated[tuple[settings, ...], Field(min_length=least, max_length=MAX_MODELS)]
    return TypeAdapter(models, config=STRICT)


def _misplaced(value: Any, runtime: Runtime[Any]) -> Iterator[InitErrorDetails]:
    """Yields errors for settings of other runtimes, and for missing settings that this runtime requires."""
    needed = [field.name for field in fields(runtime.settings) if field.default is field.default_factory is MISSING]
    for index, model in enumerate(value if isinstance(value, Sequence) else ()):
        if not isinstance(model, Mapping) or "name" not in model:
            continue
        for name in sorted(map(str, model.keys() - settings_fields(runtime.settings))):
            if name in _known_elsewhere():
                yield _refused((index, name), _foreign(model["name"], name, runtime), model[name])
        for name in needed:
            if name not in model:
                message = f"model {model['name']} needs {name}, because the runtime is {runtime.name}"
                yield _refused((index, name), message, model)
        if issubclass(runtime.settings, SourcedModelSettings):
            files = runtime.settings.files_setting
            if model.keys().isdisjoint({files, "source", *runtime.settings.other_files_settings}):
                message = f"model {model['name']} needs {files}, because the runtime is {runtime.name}; or a source"
                yield _refused((index, files), message, model)


def _foreign(model: Any, setting: str, runtime: Runtime[Any]) -> str:
    advice = runtime.advice.get(setting)
    refused = f"model {model} cannot have {setting}, because the runtime is {runtime.name}"
    return refused if advice is None else f"{refused}: {advice}"


def _as_given(error: ErrorDetails) -> InitErrorDetails:
    """Converts an error of one validation for the ValidationError of another."""
    return InitErrorDetails(type=error["type"], loc=error["loc"], input=error["input"], ctx=error.get("ctx", {}))


def _refused(steps: tuple[int | str, ...], message: str, value: Any) -> InitErrorDetails:
    escaped = message.replace("{", "{{").replace("}", "}}")
    return InitErrorDetails(type=PydanticCustomError(OF_RUNTIME, escaped), loc=steps, input=value)


@cache
def _known_elsewhere() -> frozenset[str]:
    return frozenset().union(*(settings_fields(runtime.settings) for runtime in built_in()))


def with_engines(runners: Iterable[Section], disabled: Collection[str]) -> list[Section]:
    """Returns the runners whose runtimes do not belong to an extension that is off."""
    return [runner for runner in runners if not why_off(runner.runtime, disabled)]


def with_replicas(section: RunnerSettings, models: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
    """Returns a runner's models, each followed by its replicas: "qwen", "qwen-2", "qwen-3".

    Models beyond `replicas` start hibernating. Raises INVALID_ARGUMENT naming the field.
    """
    taken = {name for model in section.models for name in model.served_names}
    taken |= {agent.name for agent in section.agents}
    expanded: list[ModelSettings] = []
    for model in models:
        replicas = _replicas(section, model)
        for name in (name for replica in replicas[1:] for name in replica.served_names):
            if name in taken:
                raise invalid_field(
                    f"runners.{section.name}.models.{model.name}.replicas",
                    f"the replica {name} would have the name of another model or agent; rename that one",
                )
            taken.add(name)
        expanded += replicas
    return tuple(expanded)


def replica_names(model: ModelSettings) -> tuple[str, ...]:
    """Returns the names of a model and its replicas: "qwen", "qwen-2", "qwen-3"."""
    return model.name, *(f"{model.name}-{number}" for number in range(2, _count(model) + 1))


def adapter_names(model: ModelSettings) -> tuple[str, ...]:
    """Returns the names of a model's adapters and their replicas: "pirate", "pirate-2"."""
    numbers = range(1, _count(model) + 1)
    return tuple(_numbered(adapter.name, number) for adapter in model.served_adapters for number in numbers)


def pool_names(model: ModelSettings) -> frozenset[str]:
    """Returns the pools of a model and its adapters, except those that replicas create from their names."""
    return frozenset(pool for pool in (model.pool, *(each.pool for each in model.served_adapters)) if pool)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _with_adapters(replica: ModelSettings, number: int, where: str) -> ModelSettings:
    """Numbers the adapters of a replica; each shares a pool with its copies on other replicas."""
    if not replica.served_adapters:
        return replica
    adapters: Any = tuple(
        replace(
            adapter,
            pool=adapter.pool or adapter.name,
            name=require_name_of_model(_numbered(adapter.name, number), f"{where}.replicas"),
        )
        for adapter in replica.served_adapters
    )
    settings: Any = replica
    replaced: ModelSettings = replace(settings, adapters=adapters)
    return replaced


def _count(model: ModelSettings) -> int:
    if not isinstance(model, StartedModelSettings):
        return 1
    return model.replicas if model.replica_max is None else model.replica_max


def _replicas(section: RunnerSettings, model: ModelSettings) -> list[ModelSettings]:
    where = f"runners.{section.name}.models.{model.name}"
    count = _count(model)
    if not isinstance(model, StartedModelSettings):
        return [model]
    if count < model.replicas:
        raise invalid_field(f"{where}.replica_max", f"must be at least {model.replicas}, which is `replicas`")
    if count == 1:
        return [model]
    return [
        _with_adapters(
            replace(
                model,
                replicas=1,
                replica_max=None,
                pool=model.pool or model.name,
                name=require_name_of_model(name, f"{where}.replicas"),
                start_asleep=model.start_asleep or number > model.replicas,
            ),
            number,
            where,
        )
        for number, name in enumerate(replica_names(model), 1)
    ]
