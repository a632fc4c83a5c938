"""The descriptor of a runtime: everything that weft knows about one kind of engine, in one value.

`runner_svc.runtimes.table` finds the descriptors: those of the folders beside this file, and those that other packages
declare in the entry point group `weft.runtimes`. Loading a descriptor is cheap; `build` imports what the engine needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from runner_svc.policy.memory_estimate import EngineHabits
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.settings import ModelSettings

if TYPE_CHECKING:
    from runner_svc.policy.load_plan import LoadValue
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine

Settings = TypeVar("Settings", bound=ModelSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFault:
    """Why a model cannot be served as things stand, with what to do about it."""

    message: str
    remedy: str
    is_there: bool = False
    """Whether its server answers: then a mesh starts without this one model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A program or library that must be installed; a check of `weft doctor`."""

    name: str
    """The check's name, such as "llama.cpp server"."""
    find: Callable[[tuple[str, ...] | None], str]
    """Returns what was found, given the runner's `command`. Raises WeftError when it is missing."""
    remedy: str
    """What to run when it is missing."""


def _no_load_values(_: ModelSettings) -> "Mapping[str, LoadValue]":
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime(Generic[Settings]):
    """One kind of engine."""

    name: str
    """As `runtime` of a runner in weft.yaml; letters, digits and underscores."""
    summary: str
    """One line for `weft doctor` and the docs."""
    docs: str
    """Where it is described: a path in weft's docs, or a URL."""
    settings: type[Settings]
    """A frozen dataclass: what a model of this runtime may have in weft.yaml."""
    build: "Callable[[Settings, ModelContext], ModelEngine]"
    """Makes what serves one model. Raises INVALID_ARGUMENT naming a setting that does not fit its neighbours."""
    parameters: EngineParameters
    """Which request parameters its engine takes."""
    starts_engines: bool = True
    """Whether weft starts and ends the engines, rather than using servers that run already."""
    habits: EngineHabits = field(default_factory=EngineHabits)
    """What its engine does about memory where nothing is set; for estimates from model files."""
    load_values: "Callable[[Settings], Mapping[str, LoadValue]]" = _no_load_values
    """What a model's settings say about memory, by the names of load parameters."""
    requirement: Requirement | None = None
    """What must be installed."""
    find_fault: Callable[[Settings, Mapping[str, str]], ModelFault | None] | None = None
    """Looks, within seconds, whether a model's server has it; the mapping is the environment. None: there is no server
    to look at before a start."""
    no_output: str = ""
    """Why there is no output of the engine to show; empty: there is."""
    advice: Mapping[str, str] = field(default_factory=dict)
    """What to do instead, by names of settings that only other runtimes have; shown when one is refused."""
