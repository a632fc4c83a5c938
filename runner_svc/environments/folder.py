"""The folder with the installed environments of a home, and the programs in them.

`<root>/<name>` is a symbolic link to the installed version, so that an update replaces it atomically. Engines are
started by the path of a version, which shows the version in use.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from runner_svc.environments.environment import EngineEnvironment
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

NO_FOLDER = Path("/dev/null/runtimes")
"""A folder that cannot exist, for uses without a home."""
PYTHON = "python"
_VERSIONS = ".versions"
_USUAL_HOME = Path("~/.weft")


@dataclass(frozen=True, slots=True)
class EnvironmentFolder:
    """The folder of environments, `<home>/runtimes`."""

    root: Path = NO_FOLDER

    def environment_python(self, environment: EngineEnvironment) -> Path:
        """Returns the interpreter of an environment. Raises as `environment_program`."""
        return self.environment_program(environment, PYTHON)

    def environment_program(self, environment: EngineEnvironment, program: str) -> Path:
        """Returns a program in an environment, such as "vllm", by the path of the installed version.

        Raises INVALID_ARGUMENT with the install command if the environment is not installed.
        """
        link, command = self.link(environment), self.install_command(environment.name)
        if not link.exists():
            raise WeftError(
                Reason.INVALID_ARGUMENT, f"the environment {environment.name} is not installed; run: {command}"
            )
        found = link.resolve() / "bin" / program
        if not found.exists():
            raise WeftError(
                Reason.INVALID_ARGUMENT,
                f"the environment {environment.name} is damaged: there is no {found}; run: {command} --reinstall",
            )
        return found

    def description(self, environment: EngineEnvironment) -> str:
        """Returns a description of an installed environment. Raises as `environment_program`."""
        self.environment_python(environment)
        return f"{environment.name}: {self.link(environment)}"

    def link(self, environment: EngineEnvironment) -> Path:
        """Returns the path of an environment, installed or not."""
        return self.root / environment.name

    def point(self, environment: EngineEnvironment, version: Path) -> None:
        """Switches an environment's link to a version atomically."""
        link = self.link(environment)
        new = link.with_name(f".{link.name}.link")
        new.unlink(missing_ok=True)
        # Relative, so that the link of a moved home still resolves, and its receipt shows the move.
        new.symlink_to(Path(os.path.relpath(version, link.parent.resolve())))
        new.replace(link)

    def versions(self, environment: EngineEnvironment) -> Path:
        """Returns the folder of an environment's versions; those other than the link's target are leftovers."""
        return self.root / _VERSIONS / environment.name

    def work(self, environment: EngineEnvironment) -> Path:
        """Returns the folder of unfinished builds, which a later installation continues."""
        return self.root / _VERSIONS / f"{environment.name}.build"

    def lock_file(self, environment: EngineEnvironment) -> Path:
        """Returns the file that is locked while an environment changes."""
        return self.root / _VERSIONS / f"{environment.name}.lock"

    def install_command(self, name: str) -> str:
        """Returns the command that installs an environment."""
        command = f"weft runtime install {name}"
        usual = self.root in (NO_FOLDER, _USUAL_HOME.expanduser() / self.root.name)
        return command if usual else f"{command} --home {self.root.parent}"
