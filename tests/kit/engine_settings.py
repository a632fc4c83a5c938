"""The settings with which tests build a backend without a configuration file."""

from typing import Any, TypeVar

from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.settings import ModelSettings

Model = TypeVar("Model", bound=ModelSettings)


def engine_settings(settings: type[Model], **given: Any) -> tuple[Model, ModelContext]:
    """Returns the settings of a model and the context of its engine: what a backend is built with.

    `given`: fields of either one. The model is called "m" and has one thread where nothing else is said.
    """
    model: dict[str, Any] = {"name": "m"}
    if "threads" in settings.__dataclass_fields__:
        model["threads"] = 1
    context: dict[str, Any] = {"where": "model"}
    for name, value in given.items():
        (context if name in ModelContext.__dataclass_fields__ else model)[name] = value
    return settings(**model), ModelContext(**context)
