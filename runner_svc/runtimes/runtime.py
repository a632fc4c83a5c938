"""The descriptor of a runtime: all facts about one kind of engine.

`runner_svc.runtimes.table` finds the descriptors in the folders next to this file, and those of extensions by their
`RuntimeHook`. Loading a descriptor is cheap; `build` imports the engine's modules.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from runner_svc.environments.environment import EngineEnvironment, Variant
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.engine_variables import DEVICE_VARIABLES
from runner_svc.policy.memory_estimate import EngineHabits
from runner_svc.policy.model_sizing import EngineLocations
from runner_svc.policy.parameters import EngineParameters
from runner_svc.policy.tuning import TunedParameter
from runner_svc.runtimes.runtime_settings import ModelSettings

if TYPE_CHECKING:
    from runner_svc.environments.folder import EnvironmentFolder
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
    from weft.kernel.models.load_parameters import LoadValue

    EngineReport = Callable[[tuple[str, ...] | None, EnvironmentFolder, Iterable[Variant]], tuple[str, str]]

Settings = TypeVar("Settings", bound=ModelSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFault:
    """Why a model cannot be served now, and how to fix it."""

    message: str
    remedy: str
    is_reachable: bool = False
    """Whether its server responds: then a mesh starts without this model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A program or library that must be installed; a check of `weft doctor`."""

    name: str
    """Name of the check, such as "llama.cpp server"."""
    find: Callable[[tuple[str, ...] | None], str]
    """Returns its description, given the runner's `command`. Raises WeftError if it is missing."""
    remedy: str
    """Command that installs it."""


def deferred(path: str) -> "Callable[..., Any]":
    """Returns a function that imports `module:name` at its first call, so that descriptors load quickly."""

    def call(*arguments: Any) -> Any:
        module, _, name = path.partition(":")
        return getattr(import_module(module), name)(*arguments)

    return call


def _no_load_values(_: ModelSettings) -> "Mapping[str, LoadValue]":
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime(Generic[Settings]):
    """One kind of engine."""

    name: str
    """Value of `runtime` of a runner in weft.yaml; letters, digits and underscores."""
    other_names: tuple[str, ...] = ()
    """Alternative names in configurations; only `name` is shown."""
    summary: str
    """One-line description for `weft doctor` and the docs."""
    docs: str
    """Documentation: a path in weft's docs, or a URL."""
    settings: type[Settings]
    """Frozen dataclass of the settings of a model in weft.yaml."""
    build: "Callable[[Settings, ModelContext], ModelEngine]"
    """Builds the engine of one model. Raises INVALID_ARGUMENT naming a setting that contradicts another."""
    parameters: EngineParameters
    """Request parameters that its engine supports."""
    formats: frozenset[WeightFormat] = frozenset()
    """Weight formats that its engine loads, for models with a source; empty: it serves none of those."""
    locations: EngineLocations = field(default_factory=EngineLocations)
    """Where its engine can compute, to choose the size of such models."""
    starts_engines: bool = True
    """Whether weft starts and stops the engines; False: it uses external servers."""
    habits: EngineHabits = field(default_factory=EngineHabits)
    """Memory defaults of its engine, for estimates from model files."""
    load_values: "Callable[[Settings], Mapping[str, LoadValue]]" = _no_load_values
    """Returns the load parameters in a model's settings, by name, for estimates."""
    tuned_parameters: Sequence[TunedParameter] = ()
    """Load parameters that `weft models tune` varies; empty: its models cannot be tuned."""
    requirement: Requirement | None = None
    """Program or library that must be installed."""
    environment: EngineEnvironment | None = None
    """Environment of its engines if the runner has no `command`; None: weft's own."""
    needs_environment: bool = True
    """Whether its engines require that environment; False: they also run in weft's own, with fewer features."""
    engine_report: "EngineReport | None" = None
    """Returns the engine that would start with a runner's `command` and the reason for it, and the advice for a faster
    one on these devices (empty: none). None: there is no choice."""
    find_fault: Callable[[Settings, Mapping[str, str]], ModelFault | None] | None = None
    """Checks within seconds whether a model's server has it; the mapping is the environment. None: there is no server
    to check before a start."""
    find_program_fault: Callable[[Settings, tuple[str, ...] | None, Mapping[str, str]], ModelFault | None] | None = None
    """Checks within seconds whether a model's program is installed, given the runner's `command` and the environment.
    None: its models have no program."""
    variables: Sequence[str] = DEVICE_VARIABLES
    """The runner's environment variables that its engines get, in addition to `engine_variables.COMMON_VARIABLES`."""
    no_output: str = ""
    """Why weft cannot show the engine's output; empty: it can."""
    advice: Mapping[str, str] = field(default_factory=dict)
    """Advice by name of settings that only other runtimes have, shown if such a setting is rejected."""
