"""The environments of all runtimes, including those of other packages."""

from runner_svc.environments.environment import EngineEnvironment
from runner_svc.runtimes.table import AnyRuntime, built_in, installed
from weft.kernel.errors import WeftError
from weft.kernel.names import close_names
from weft.kernel.reasons import Reason


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
