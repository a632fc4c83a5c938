"""Installs the previous release of weft in a separate environment, for tests with two releases in one mesh.

Its wheel is built from the commit in `requirements/previous-release`, which the clone must contain, or is the file in
WEFT_PREVIOUS_WHEEL. It uses the dependencies of this checkout, since only weft is compared, and what this checkout no
longer depends on.
"""

import io
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "requirements" / "previous-release"
WHEEL_VARIABLE = "WEFT_PREVIOUS_WHEEL"
BUILD_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class PreviousRelease:
    """An environment with the previous release."""

    python: Path

    @property
    def weft(self) -> tuple[str, ...]:
        """The start of its command line. The tests' folder is not on its path because it contains this release."""
        return (str(self.python), "-P", "-m", "weft_app.cli.main")

    def evaluate(self, imports: str, expression: str) -> str:
        """Evaluates an expression with the release's code; returns the result as text."""
        program = f"{imports}\nprint({expression})"
        found = subprocess.run([self.python, "-P", "-c", program], check=True, capture_output=True, text=True)
        return found.stdout.strip()


def recorded_commit() -> str:
    lines = [line.strip() for line in RECORD.read_text("utf-8").splitlines()]
    (commit,) = [line for line in lines if line and not line.startswith("#")]
    return commit


def install_previous_release(folder: Path) -> PreviousRelease:
    """Builds and installs it in `folder`. Skips the test if neither the commit nor a wheel is available."""
    named = os.environ.get(WHEEL_VARIABLE)
    wheel = Path(named) if named else _built(folder)
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # Its own packages take precedence, and the .pth file that makes this checkout importable is not processed.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n", "utf-8")
    release = PreviousRelease(environment / "bin" / "python")
    assert release.evaluate("import weft", "weft.__file__").startswith(str(packages))
    needed = release.evaluate("import importlib.metadata", r"'\n'.join(importlib.metadata.requires('weft') or ())")
    pip = [sys.executable, "-m", "pip", "--python", str(release.python), "install", "--quiet", *needed.splitlines()]
    subprocess.run(pip, check=True, timeout=BUILD_SECONDS)
    return release


def _built(folder: Path) -> Path:
    commit = recorded_commit()
    if _git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        shallow = _git("rev-parse", "--is-shallow-repository").stdout.decode().strip() == "true"
        why = "this clone is shallow; git fetch --unshallow" if shallow else "this is no clone of the repository"
        pytest.skip(f"the previous release, {commit[:12]}, is not here ({why}), and {WHEEL_VARIABLE} names no wheel")
    source = folder / "source"
    archive = _git("archive", "--format=tar", commit)
    archive.check_returncode()
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(source, filter="data")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=BUILD_SECONDS)
    return next((folder / "dist").glob("*.whl"))


def _git(*arguments: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
