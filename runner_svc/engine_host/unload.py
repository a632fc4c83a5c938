"""Frees the memory of a model's weights without ending the process."""

import ctypes
import time
from contextlib import suppress
from typing import Any

from runner_svc.engine_host.http_server import BUSY, RefusedError

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
        raise RefusedError("the engine is at work; its memory cannot be freed now", BUSY)
    with suppress(AttributeError, OSError):
        # Returns freed memory to the system, which glibc would keep; other C libraries lack this call.
        ctypes.CDLL(None).malloc_trim(0)
