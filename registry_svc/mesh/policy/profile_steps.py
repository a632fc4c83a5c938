"""What a switch to a profile unloads and loads, and in which order."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto


class StepKind(Enum):
    """What is done with a model."""

    UNLOAD = auto()
    LOAD = auto()


@dataclass(frozen=True, slots=True)
class Step:
    """One model that a switch unloads or loads."""

    kind: StepKind
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedModels:
    """The models of a profile."""

    load: Sequence[str]
    unload: Sequence[str] = ()
    unload_others: bool = False
    """Whether models that are not named are unloaded as well."""


def plan_steps(wanted: WantedModels, loaded: Mapping[str, str], as_wanted: Container[str]) -> list[Step]:
    """Returns the steps to what a profile wants: first what frees memory, then the loads in the profile's order.

    `loaded`: what is loaded, and the model whose engine serves it, empty for one of its own. `as_wanted`: models that
    are loaded with the profile's settings. A model whose engine stays loaded for a wanted one is not unloaded: they
    share the engine.
    """
    needed = {*wanted.load, *(loaded[model] for model in wanted.load if loaded.get(model))}
    unwanted = set(loaded) if wanted.unload_others else set(wanted.unload) & set(loaded)
    unloads = [model for model in sorted(unwanted - needed) if loaded[model] not in needed]
    loads = [model for model in wanted.load if model not in loaded or model not in as_wanted]
    return [*(Step(StepKind.UNLOAD, model) for model in unloads), *(Step(StepKind.LOAD, model) for model in loads)]


def differences(wanted: WantedModels, loaded: Mapping[str, str]) -> list[str]:
    """Returns what is loaded and should not be, and what should be and is not, in words."""
    as_wanted = frozenset(wanted.load)
    words = {StepKind.UNLOAD: "is loaded", StepKind.LOAD: "is not loaded"}
    return [f"model/{step.model} {words[step.kind]}" for step in plan_steps(wanted, loaded, as_wanted)]
