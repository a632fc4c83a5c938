"""The table of runtimes and their environments: those in the folders here, and those of extensions.

An extension adds one by a `weft.extension.RuntimeHook`, which names the place of its descriptor.
"""

import pkgutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from runner_svc.environments.environment import EngineEnvironment
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.runtimes.runtime import Runtime
from weft.extension import (
    Extension,
    RuntimeHook,
    all_extensions,
    disabled_extensions,
    installed_extensions,
    own_extensions,
)
from weft.kernel.errors.error_tree import WeftError, invalid_field
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


@lru_cache
def _places() -> Mapping[str, str]:
    """Returns the places of the descriptors of weft's own runtimes, by name: in the folders here, and in extensions."""
    here = Path(__file__).parent
    folders = (module.name for module in pkgutil.iter_modules([str(here)]) if module.ispkg)
    names = [name for name in folders if (here / name / "runtime.py").is_file()]
    places = {name: f"runner_svc.runtimes.{name}.runtime:RUNTIME" for name in names}
    places |= {hook.name: hook.place for each in own_extensions() for hook in each.runtimes}
    return {name: places[name] for name in sorted(places)}


def built_in_names() -> tuple[str, ...]:
    """Returns the names of weft's own runtimes, those of its extensions included."""
    return tuple(_places())


def built_in() -> tuple[AnyRuntime, ...]:
    """Returns weft's own runtimes."""
    return tuple(_load_built_in(name) for name in built_in_names())


@lru_cache
def installed() -> tuple[InstalledRuntime, ...]:
    """Returns the runtimes of other packages, including unusable ones. Imports them; never raises."""
    found = [
        (each.package, hook) for each in installed_extensions() if each.extension for hook in each.extension.runtimes
    ]
    packages: dict[str, list[str]] = {}
    for package, hook in found:
        packages.setdefault(hook.name, []).append(package)
    return tuple(_inspect(hook, package, packages[hook.name]) for package, hook in found)


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
    unusable = [
        f"the extension of {each.package} cannot be used: {each.fault}" for each in installed_extensions() if each.fault
    ]
    close = close_names(name, usable_names(), most=2)
    raise invalid_field(
        field, "; ".join([f"must be one of: {', '.join(usable_names())}", *filter(None, [close, *unusable])])
    )


def usable_names() -> tuple[str, ...]:
    """Returns the names of all usable runtimes: weft's own, then those of other packages."""
    return (*built_in_names(), *(each.name for each in installed() if each.runtime is not None))


def why_off(name: str, disabled: Collection[str]) -> str:
    """Returns why a runtime cannot be used if these extensions are disabled; empty: it can."""
    if _places().get(name, "").startswith("runner_svc."):
        return ""
    found = all_extensions()
    off = disabled_extensions(found, disabled)
    for each in found:
        if each.name in off and name in _names_of(each):
            return f"the runtime {name} belongs to the extension {each.name}, which is off: {off[each.name]}"
    return ""


def _names_of(extension: Extension) -> list[str]:
    return [hook.name for hook in extension.runtimes]


@lru_cache
def _load_built_in(name: str) -> AnyRuntime:
    runtime = _load(_places()[name])
    if not isinstance(runtime, Runtime) or runtime.name != name:
        raise WeftError(Reason.INTERNAL, f"{_places()[name]} does not describe a runtime named {name}")
    return runtime


def _load(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _inspect(hook: RuntimeHook, package: str, packages: list[str]) -> InstalledRuntime:
    if hook.name in built_in_names():
        fault, found = "weft has a runtime of this name; the package must choose another", None
    elif len(packages) > 1:
        fault, found = f"{' and '.join(packages)} have it; uninstall all but one", None
    else:
        fault, found = _loaded(hook)
    return InstalledRuntime(name=hook.name, package=package, runtime=found, fault=fault)


def _loaded(hook: RuntimeHook) -> tuple[str, AnyRuntime | None]:
    try:
        runtime = _load(hook.place)
    except Exception as error:  # noqa: BLE001 - importing another package may raise anything
        why = " ".join(str(error).split())
        return f"{hook.place} cannot be imported: {type(error).__name__}: {why}", None
    if not isinstance(runtime, Runtime):
        return f"{hook.place} is a {type(runtime).__name__}, and must be a runner_svc.runtimes.runtime.Runtime", None
    if runtime.name != hook.name:
        return f"{hook.place} calls itself {runtime.name}; the hook must have the same name", None
    return "", runtime


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
