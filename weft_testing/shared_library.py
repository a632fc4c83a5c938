"""Shared libraries that tests build from the C files beside this module."""

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

BUILD_SECONDS = 60.0


def compiler() -> str | None:
    """Returns the path of the C compiler; None: there is none, so no library can be built."""
    return shutil.which("cc")


@cache
def built_once(source: Path, name: str) -> Path:
    """Returns the library's path in a folder that other users can read and that is removed with this process.

    Raises as `build_library`.
    """
    folder = Path(tempfile.mkdtemp(prefix="weft-library-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    return build_library(source, folder / name)


def build_library(source: Path, library: Path) -> Path:
    """Builds a library; returns its path.

    Raises FileNotFoundError without a compiler, RuntimeError with the compiler's output if it fails.
    """
    found = compiler()
    if found is None:
        raise FileNotFoundError("there is no C compiler (cc)")
    library.parent.mkdir(parents=True, exist_ok=True)
    command = [found, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)  # noqa: S603 - fixed arguments
    if built.returncode:
        raise RuntimeError(f"the library cannot be built:\n{built.stderr}")
    return library
