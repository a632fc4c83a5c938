"""CUDA's libraries that are packages of an environment, such as `nvidia-cublas-cu12`.

They lie where no loader looks. An engine that loads one by its name gets the one that the process has loaded already.
"""

import ctypes
from contextlib import suppress
from pathlib import Path


def cuda_libraries(prefix: Path) -> list[Path]:
    """Returns the libraries in the packages of the environment at `prefix`; empty: it has none."""
    return sorted(prefix.glob("lib/python3.*/site-packages/nvidia/*/lib/lib*.so.*"))


def load_cuda_libraries(prefix: Path) -> int:
    """Loads them for the engine's library, and returns how many were loaded."""
    loaded = 0
    for library in cuda_libraries(prefix):
        # What cannot be loaded, the engine's library names itself where it needs it.
        with suppress(OSError):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            loaded += 1
    return loaded
