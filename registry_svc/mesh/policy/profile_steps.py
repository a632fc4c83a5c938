"""The order in which a switch to a profile unloads and loads models."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto


class StepKind(Enum):
    """Kind of step."""

    UNLOAD = auto()
    LOAD = auto()


@dataclass(frozen=True, slots=True)
class Step:
    """The unload or load of a model."""

    kind: StepKind
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedModels:
    """The models of a profile."""

    load: Sequence[str]
    unload: Sequence[str] = ()
    unload_others: bool = False
    """Whether to unload all other models."""


def plan_steps(wanted: WantedModels, loaded: Mapping[str, str], as_wanted: Container[str]) -> list[Step]:
    """Returns the steps to a profile: unloads to free memory, then loads in the profile's order.

    `loaded` maps loaded models to the model that provides their engine, "" for a separate engine. `as_wanted` are
    models loaded with the profile's settings. A model that shares its engine with a wanted one is not unloaded.
    """
    needed = {*wanted.load, *(loaded[model] for model in wanted.load if loaded.get(model))}
    unwanted = set(loaded) if wanted.unload_others else set(wanted.unload) & set(loaded)
    unloads = [model for model in sorted(unwanted - needed) if loaded[model] not in needed]
    loads = [model for model in wanted.load if model not in loaded or model not in as_wanted]
    return [*(Step(StepKind.UNLOAD, model) for model in unloads), *(Step(StepKind.LOAD, model) for model in loads)]


def differences(wanted: WantedModels, loaded: Mapping[str, str]) -> list[str]:
    """Returns the differences between a profile and the loaded models, in words."""
    as_wanted = frozenset(wanted.load)
    words = {StepKind.UNLOAD: "is loaded", StepKind.LOAD: "is not loaded"}
    return [f"model/{step.model} {words[step.kind]}" for step in plan_steps(wanted, loaded, as_wanted)]
