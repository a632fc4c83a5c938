"""An account on which nothing is installed: an empty home, and Python on its PATH with what launchers need."""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-dist" / "bin"
"""What `make dist` installs: build, twine, pipx, pex and uv."""
# uv's launchers are shell scripts.
PROGRAMS = ("sh", "bash", "dirname", "realpath", "readlink", "uname")
PASSED = ("PIP_", "UV_", "SSL_CERT_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""How this machine reaches its package index."""
SECONDS = 170.0


def interpreter() -> str:
    """The Python under the environment of these tests, by its own name: version managers put scripts on PATH."""
    folder = sysconfig.get_config_var("BINDIR")
    return str(Path(folder) / f"python{sysconfig.get_python_version()}")


def index_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which packages are found here; uv and httpx take roots from another one than pip."""
    found = {name: value for name, value in environment.items() if name.upper().startswith(PASSED)}
    if "PIP_CERT" in found:
        found.setdefault("SSL_CERT_FILE", found["PIP_CERT"])
    return found


@dataclass(frozen=True, slots=True)
class BareAccount:
    """A home with nothing in it but links to the programs of every system."""

    home: Path
    path: Path
    packages: Path
    """The cache of uv."""

    @classmethod
    def create(cls, folder: Path, packages: Path) -> "BareAccount":
        """Makes it in an empty folder."""
        home, path = folder / "home", folder / "path"
        home.mkdir()
        path.mkdir()
        (path / "python3").symlink_to(interpreter())
        for name in PROGRAMS:
            found = shutil.which(name)
            assert found is not None, f"this machine has no {name}"
            (path / name).symlink_to(found)
        return cls(home, path, packages)

    @property
    def environment(self) -> dict[str, str]:
        """All variables that its programs get."""
        local = self.home / ".local" / "bin"
        own = {"HOME": str(self.home), "PATH": f"{local}:{self.path}", "UV_CACHE_DIR": str(self.packages)}
        return {**index_variables(os.environ), **own}

    def run(self, *command: str | Path, rc: int = 0) -> str:
        """Runs a program of this account to its end, and returns what it printed."""
        ended = subprocess.run(
            [str(part) for part in command],
            env=self.environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
        )
        output = ended.stdout.decode()
        assert ended.returncode == rc, f"{command} ended with {ended.returncode}:\n{output[-4_000:]}"
        return output

    def tool(self, name: str, *arguments: str | Path) -> str:
        """Runs pipx or uvx, which a user has from elsewhere, on this account."""
        return self.run(TOOLS / name, *arguments)

    def weft(self, *arguments: str | Path, rc: int = 0) -> str:
        """Runs the installed weft, as PATH finds it."""
        found = shutil.which("weft", path=self.environment["PATH"])
        assert found is not None, "weft is not on PATH"
        return self.run(found, *arguments, rc=rc)

    def files(self) -> set[str]:
        """What lies in the home, without the folders that pipx and uv keep for themselves."""
        own = {".cache", ".local/share/pipx", ".local/state/pipx", ".local/share/uv", ".local/share/man"}
        found = (path.relative_to(self.home) for path in self.home.rglob("*") if not path.is_dir() or path.is_symlink())
        return {str(path) for path in found if not any(path.is_relative_to(folder) for folder in own)}
