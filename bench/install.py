"""Environments of peers: made on request, kept, never shared with weft's own."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.contender import Contender, environment_folder

INSTALL_SECONDS = 900.0
_STAMP = "bench-packages"


class InstallError(Exception):
    """A peer cannot be installed here."""


def ensure_installed(contender: Contender, root: Path) -> None:
    """Make the contender's environment unless it is there with these very packages. Raises InstallError."""
    folder = environment_folder(contender, root)
    if folder is None:
        return
    stamp, wanted = folder / _STAMP, "\n".join(contender.packages)
    if stamp.is_file() and stamp.read_text("utf-8") == wanted:
        return
    _run(contender, [sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run(contender, [*pip, "--no-input", *contender.packages])
    stamp.write_text(wanted, "utf-8")


def package_version(name: str) -> str:
    """The version of a package of this environment, or "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _run(contender: Contender, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{contender.name} was not installed: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise InstallError(f"{contender.name} was not installed: {lines[-1] if lines else 'pip failed'}")
