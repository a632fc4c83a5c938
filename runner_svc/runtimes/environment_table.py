"""The table of environments: the folders in `runner_svc/environments`, and those of runtimes of other packages."""

import pkgutil
from importlib import import_module

import runner_svc.environments
from runner_svc.environments.environment import EngineEnvironment
from runner_svc.runtimes.table import AnyRuntime, built_in, installed
from weft.kernel.errors import WeftError
from weft.kernel.names import close_names
from weft.kernel.reasons import Reason


def environments() -> tuple[EngineEnvironment, ...]:
    """Returns all environments by name: weft's own, and those of runtimes of other packages."""
    folders = pkgutil.iter_modules(runner_svc.environments.__path__)
    found = {module.name: _load(module.name) for module in folders if module.ispkg}
    for each in installed():
        if each.runtime is not None and (environment := each.runtime.environment) is not None:
            found.setdefault(environment.name, environment)
    return tuple(found[name] for name in sorted(found))


def require_environment(name: str) -> EngineEnvironment:
    """Returns the environment of this name. Raises NOT_FOUND with the names that there are."""
    found = {environment.name: environment for environment in environments()}
    if name not in found:
        hint = close_names(name, found) or f"there are {', '.join(found)}"
        raise WeftError(Reason.NOT_FOUND, f"there is no environment {name[:64]!r}; {hint}")
    return found[name]


def users_of(environment: EngineEnvironment) -> tuple[AnyRuntime, ...]:
    """Returns the runtimes whose engines run in an environment."""
    others = [each.runtime for each in installed() if each.runtime is not None]
    runtimes = [*built_in(), *others]
    return tuple(
        each for each in runtimes if each.environment is not None and each.environment.name == environment.name
    )


def _load(name: str) -> EngineEnvironment:
    environment = import_module(f"runner_svc.environments.{name}.environment").ENVIRONMENT
    if not isinstance(environment, EngineEnvironment) or environment.name != name:
        raise WeftError(Reason.INTERNAL, f"runner_svc/environments/{name} does not describe an environment")
    return environment
