"""The check that the environments of configured engines are installed, before a mesh is started."""

from collections.abc import Iterable

from runner_svc.settings import RunnerSettings
from weft.kernel.errors import WeftError, invalid_field
from weft_app.compose.home import WeftHome


def require_environments(runners: Iterable[RunnerSettings], home: WeftHome) -> None:
    """Checks that the environments of the runners' engines are installed.

    Raises INVALID_ARGUMENT naming the runner, with the command that installs what is missing.
    """
    for section in runners:
        environment = section.engine.environment
        if environment is None or section.command or not section.engine.needs_environment:
            continue
        try:
            home.environments.environment_python(environment)
        except WeftError as error:
            raise invalid_field(f"runners.{section.name}", error.message) from error
