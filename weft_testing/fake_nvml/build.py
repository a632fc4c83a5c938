"""Builds the library."""

import shutil
import subprocess
from pathlib import Path

LIBRARY_NAME = "libnvidia-ml.so.1"
BUILD_SECONDS = 60.0
_SOURCE = Path(__file__).with_name("nvml.c")


def compiler() -> str | None:
    """The C compiler of this machine; None where there is none: then there is no fake either."""
    return shutil.which("cc")


def build_fake_nvml(folder: Path) -> Path:
    """Build the library into `folder`, which then belongs on LD_LIBRARY_PATH; returns the library's path.

    Raises FileNotFoundError where there is no compiler, RuntimeError with its words when it fails.
    """
    found = compiler()
    if found is None:
        raise FileNotFoundError("there is no C compiler (cc)")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / LIBRARY_NAME
    command = [found, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(_SOURCE)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)  # noqa: S603 - fixed arguments
    if built.returncode:
        raise RuntimeError(f"the fake library cannot be built:\n{built.stderr}")
    return library
