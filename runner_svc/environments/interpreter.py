"""The interpreter that an environment is created with."""

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from runner_svc.environments.environment import EngineEnvironment, PythonVersion
from weft.kernel.errors import invalid_field

ASK_SECONDS = 30.0
_ASK = "import platform, sys; print(sys.implementation.name, platform.python_version())"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python on this machine."""

    path: Path
    version: str
    """Such as "3.11.7"."""

    @property
    def minor_version(self) -> PythonVersion:
        """Its major and minor version."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def find_interpreter(environment: EngineEnvironment, chosen: Path | None) -> Interpreter:
    """Returns the first Python that fits the lock files: the chosen one, weft's, or one on PATH.

    Raises INVALID_ARGUMENT if none fits, or if the lock files are for another machine.
    """
    machine = f"{platform.system()} {platform.machine()}"
    if machine != environment.machine:
        raise invalid_field("NAME", f"{environment.name} has packages for {environment.machine}, this is {machine}")
    oldest, newest = environment.oldest_python, environment.newest_python
    wanted = f"Python {_text(oldest)} to {_text(newest)}"
    if chosen is not None:
        return _fitting(environment, chosen, wanted)
    if sys.implementation.name == "cpython" and environment.supports_python(sys.version_info[:2]):
        return Interpreter(Path(sys.executable), platform.python_version())
    for minor in range(newest[1], oldest[1] - 1, -1):
        found = shutil.which(f"python{oldest[0]}.{minor}")
        if found is not None:
            return _fitting(environment, Path(found), wanted)
    raise invalid_field(
        "--python", f"{environment.name} needs {wanted}, and weft runs on {platform.python_version()}; name one"
    )


def _fitting(environment: EngineEnvironment, path: Path, wanted: str) -> Interpreter:
    try:
        asked = subprocess.run(  # noqa: S603 - the user's choice
            [str(path), "-I", "-c", _ASK], capture_output=True, text=True, timeout=ASK_SECONDS, check=True
        )
        implementation, version = asked.stdout.split()
        found = Interpreter(path, version)
        fits = implementation == "cpython" and environment.supports_python(found.minor_version)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise invalid_field("--python", f"{path} is not a Python that runs: {error}") from error
    if not fits:
        raise invalid_field("--python", f"{environment.name} needs {wanted}, and {path} is {implementation} {version}")
    return found


def _text(version: PythonVersion) -> str:
    return f"{version[0]}.{version[1]}"
