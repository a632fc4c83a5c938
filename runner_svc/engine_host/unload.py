"""Frees the weights of a model in a process that continues."""

import ctypes
import time
from contextlib import suppress
from typing import Any

from runner_svc.engine_host.http_server import BUSY, RefusedError

UNLOAD_SECONDS = 2.0
"""The library unloads nothing while a thread of it works, which continues for some ms after the last answer: how long
to ask it again ..."""
UNLOAD_POLL_SECONDS = 0.01
"""... and how often."""


def unload(model: Any) -> None:
    """Frees the memory of a model's weights. Raises RefusedError where the library is still at work."""
    deadline = time.monotonic() + UNLOAD_SECONDS
    model.unload_model()
    while model.model_is_loaded and time.monotonic() < deadline:
        time.sleep(UNLOAD_POLL_SECONDS)
        model.unload_model()
    if model.model_is_loaded:
        raise RefusedError("the engine is at work; its memory cannot be freed now", BUSY)
    with suppress(AttributeError, OSError):
        # Freed memory goes back to the system; glibc keeps it for itself otherwise, others have no such call.
        ctypes.CDLL(None).malloc_trim(0)
