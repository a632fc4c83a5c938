"""What the server programs around CTranslate2 share: CUDA libraries, and freeing the memory of the weights.

CUDA libraries installed as packages of an environment, such as `nvidia-cublas-cu12`, are not on any loader path, but an
engine that loads one by name gets the copy already loaded in the process.
"""

import ctypes
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft_extensions.engines.engine_host.http_server import BUSY, RefusedError


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


UNLOAD_SECONDS = 2.0
"""Maximum time for an unload: the library ignores it while one of its threads works, for some ms after an answer."""
UNLOAD_POLL_SECONDS = 0.01


def unload(model: Any) -> None:
    """Frees the memory of a model's weights. Raises RefusedError if the library is still working."""
    deadline = time.monotonic() + UNLOAD_SECONDS
    model.unload_model()
    while model.model_is_loaded and time.monotonic() < deadline:
        time.sleep(UNLOAD_POLL_SECONDS)
        model.unload_model()
    if model.model_is_loaded:
        raise RefusedError("the engine is busy; its memory cannot be freed now", BUSY)
    with suppress(AttributeError, OSError):
        # Returns freed memory to the system, which glibc would keep; other C libraries lack this call.
        ctypes.CDLL(None).malloc_trim(0)
