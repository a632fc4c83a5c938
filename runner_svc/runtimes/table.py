"""The table of runtimes and their environments: those in the folders here, and those of other packages.

Another package adds a runtime with an entry point from the runtime's name to its descriptor:

    [project.entry-points."weft.runtimes"]
    my_engine = "my_package.runtime:RUNTIME"
"""

import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runner_svc.environments.environment import EngineEnvironment
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.runtimes.runtime import Runtime
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import close_names

DEFAULT_RUNTIME = "llama_server"
"""Runtime of a runner whose configuration names none."""
ATTACHED_RUNTIME = "openai_http"
"""Runtime of a server that is specified only by its address."""
RUNTIME_OF_FORMAT = MappingProxyType(
    {
        WeightFormat.GGUF: DEFAULT_RUNTIME,
        WeightFormat.SAFETENSORS: "vllm",
        WeightFormat.EXL3: "exllamav3",
        WeightFormat.CTRANSLATE2: "ctranslate2",
        WeightFormat.WHISPER: "faster_whisper",
        WeightFormat.PIPELINE: "diffusers",
    }
)
"""Runtime of a runner whose configuration names weights but no runtime."""
ENTRY_POINT_GROUP = "weft.runtimes"
AnyRuntime = Runtime[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledRuntime:
    """A runtime of another package."""

    name: str
    package: str
    """The package and its version, such as "weft-echo 0.1.0"; the entry point's value if unknown."""
    runtime: AnyRuntime | None
    """Descriptor; None: the runtime is unusable."""
    fault: str = ""
    """Why it is unusable."""


def built_in_names() -> tuple[str, ...]:
    """Returns the names of weft's own runtimes: the folders here that contain a descriptor."""
    here = Path(__file__).parent
    folders = (module.name for module in pkgutil.iter_modules([str(here)]) if module.ispkg)
    return tuple(sorted(name for name in folders if (here / name / "runtime.py").is_file()))


def built_in() -> tuple[AnyRuntime, ...]:
    """Returns weft's own runtimes."""
    return tuple(_load_built_in(name) for name in built_in_names())


@lru_cache
def installed() -> tuple[InstalledRuntime, ...]:
    """Returns the runtimes of other packages, including unusable ones. Imports them; never raises."""
    found = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: (each.name, _package_of(each)))
    packages: dict[str, list[str]] = {}
    for each in found:
        packages.setdefault(each.name, []).append(_package_of(each))
    return tuple(_inspect(each, packages[each.name]) for each in found)


def find_runtime(name: str) -> AnyRuntime | None:
    """Returns a runtime by name, weft's own first; None: there is no usable one."""
    if name in built_in_names():
        return _load_built_in(name)
    others = (each.runtime for each in installed() if each.name == name)
    return next((each for each in built_in() if name in each.other_names), None) or next(others, None)


def require_runtime(name: str, field: str = "runtime") -> AnyRuntime:
    """Returns a runtime by name. Raises INVALID_ARGUMENT with the reason if there is none."""
    found = find_runtime(name)
    if found is not None:
        return found
    for each in installed():
        if each.name == name:
            raise invalid_field(field, f"the runtime {name} of {each.package} cannot be used: {each.fault}")
    close = close_names(name, usable_names(), most=2)
    raise invalid_field(field, f"must be one of: {', '.join(usable_names())}" + (f"; {close}" if close else ""))


def usable_names() -> tuple[str, ...]:
    """Returns the names of all usable runtimes: weft's own, then those of other packages."""
    return (*built_in_names(), *(each.name for each in installed() if each.runtime is not None))


@lru_cache
def _load_built_in(name: str) -> AnyRuntime:
    runtime = import_module(f"runner_svc.runtimes.{name}.runtime").RUNTIME
    if not isinstance(runtime, Runtime) or runtime.name != name:
        raise WeftError(Reason.INTERNAL, f"runner_svc/runtimes/{name} does not describe a runtime of that name")
    return runtime


def _package_of(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _inspect(point: EntryPoint, packages: list[str]) -> InstalledRuntime:
    package = _package_of(point)
    try:
        return InstalledRuntime(name=point.name, package=package, runtime=_load(point, packages))
    except FieldError as refused:
        fault = refused.message.removeprefix(f"{refused.field}: ")
        return InstalledRuntime(name=point.name, package=package, runtime=None, fault=fault)


def _load(point: EntryPoint, packages: list[str]) -> AnyRuntime:
    if point.name in built_in_names():
        raise invalid_field(point.name, "weft has a runtime of this name; the package must choose another")
    if len(packages) > 1:
        raise invalid_field(point.name, f"{' and '.join(packages)} declare it; uninstall all but one")
    try:
        runtime = point.load()
    except Exception as error:  # importing another package may raise anything
        why = " ".join(str(error).split())
        raise invalid_field(point.name, f"{point.value} cannot be imported: {type(error).__name__}: {why}") from error
    for problem in _problems(runtime, point):
        raise invalid_field(point.name, problem)
    assert isinstance(runtime, Runtime)
    return runtime


def _problems(runtime: object, point: EntryPoint) -> Iterator[str]:
    if not isinstance(runtime, Runtime):
        yield f"{point.value} is a {type(runtime).__name__}, and must be a runner_svc.runtimes.runtime.Runtime"
    elif runtime.name != point.name:
        yield f"{point.value} calls itself {runtime.name}; the entry point must have the same name"


def environments() -> tuple[EngineEnvironment, ...]:
    """Returns the environments of weft's runtimes and those of other packages, by name."""
    found = {each.environment.name: each.environment for each in reversed(_runtimes()) if each.environment is not None}
    return tuple(found[name] for name in sorted(found))


def require_environment(name: str) -> EngineEnvironment:
    """Returns an environment by name. Raises NOT_FOUND with the known names."""
    found = {environment.name: environment for environment in environments()}
    if name not in found:
        hint = close_names(name, found) or f"there are {', '.join(found)}"
        raise WeftError(Reason.NOT_FOUND, f"there is no environment {name[:64]!r}; {hint}")
    return found[name]


def users_of(environment: EngineEnvironment) -> tuple[AnyRuntime, ...]:
    """Returns the runtimes with engines in an environment."""
    return tuple(
        each for each in _runtimes() if each.environment is not None and each.environment.name == environment.name
    )


def _runtimes() -> list[AnyRuntime]:
    return [*built_in(), *(each.runtime for each in installed() if each.runtime is not None)]
