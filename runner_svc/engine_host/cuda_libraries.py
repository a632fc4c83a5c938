"""CUDA libraries installed as packages of an environment, such as `nvidia-cublas-cu12`.

They are not on any loader path, but an engine that loads one by name gets the copy already loaded in the process.
"""

import ctypes
from contextlib import suppress
from pathlib import Path


def cuda_libraries(prefix: Path) -> list[Path]:
    """Returns the libraries in the packages of the environment at `prefix`; empty: it has none."""
    return sorted(prefix.glob("lib/python3.*/site-packages/nvidia/*/lib/lib*.so.*"))


def load_cuda_libraries(prefix: Path) -> int:
    """Loads them into the process, and returns how many were loaded."""
    loaded = 0
    for library in cuda_libraries(prefix):
        # If the engine needs a library that cannot be loaded, it reports that itself.
        with suppress(OSError):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            loaded += 1
    return loaded
