"""The models of a runner in the configuration file: a union of what the runtimes declare, selected by `runtime`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.settings import ModelSettings, settings_fields
from runner_svc.runtimes.table import built_in, find_runtime

if TYPE_CHECKING:
    AnyModel = ModelSettings
else:
    # What the reference and the schema show; a runtime of another package is read by its own settings, too.
    AnyModel = Union[tuple(runtime.settings for runtime in built_in())]  # noqa: UP007 - made at run time

MAX_MODELS = 64
"""Of one runner."""
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def read_models(value: Any, info: ValidationInfo) -> tuple[ModelSettings, ...]:
    """Returns the models of a runner by the settings of its runtime, which has been read before them.

    Raises ValidationError naming each setting that the runtime does not have, and each one with a wrong value.
    """
    runtime = find_runtime(info.data.get("runtime", ""))
    if runtime is None:
        return ()  # that the runtime is unknown has been said
    if _are_settings(value, runtime):
        return tuple(value)
    if misplaced := list(_misplaced(value, runtime)):
        raise ValidationError.from_exception_data("models", misplaced)
    settings: Any = runtime.settings
    return _adapter(settings).validate_json(json.dumps(value, default=_as_json))


def _are_settings(value: Any, runtime: Runtime[Any]) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(it, runtime.settings) for it in value)


@cache
def _adapter(settings: Any) -> TypeAdapter[tuple[ModelSettings, ...]]:
    models: Any = Annotated[tuple[settings, ...], Field(min_length=1, max_length=MAX_MODELS)]
    return TypeAdapter(models, config=_STRICT)


def _as_json(value: Any) -> Any:
    """YAML has dates and bytes, which no setting takes."""
    return str(value) if isinstance(value, Path) else {type(value).__name__: str(value)}


def _misplaced(value: Any, runtime: Runtime[Any]) -> Iterator[InitErrorDetails]:
    """The settings that other runtimes have and this one has not, and those that it cannot do without."""
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


def _foreign(model: Any, setting: str, runtime: Runtime[Any]) -> str:
    advice = runtime.advice.get(setting)
    refused = f"model {model} cannot have {setting}, because the runtime is {runtime.name}"
    return refused if advice is None else f"{refused}: {advice}"


def _refused(steps: tuple[int | str, ...], message: str, value: Any) -> InitErrorDetails:
    escaped = message.replace("{", "{{").replace("}", "}}")
    return InitErrorDetails(type=PydanticCustomError("runtime", escaped), loc=steps, input=value)


@cache
def _known_elsewhere() -> frozenset[str]:
    return frozenset().union(*(settings_fields(runtime.settings) for runtime in built_in()))
