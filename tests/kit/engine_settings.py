"""Settings for building a backend without a configuration file."""

from typing import Any, TypeVar

from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.runtime_settings import ModelSettings

Model = TypeVar("Model", bound=ModelSettings)


def engine_settings(settings: type[Model], **given: Any) -> tuple[Model, ModelContext]:
    """Returns the arguments for building a backend: a model's settings and its engine context.

    `given`: fields of either. By default the model is called "m" and has one thread.
    """
    model: dict[str, Any] = {"name": "m"}
    if "threads" in settings.__dataclass_fields__:
        model["threads"] = 1
    context: dict[str, Any] = {"where": "model"}
    for name, value in given.items():
        (context if name in ModelContext.__dataclass_fields__ else model)[name] = value
    return settings(**model), ModelContext(**context)
