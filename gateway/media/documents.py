"""The text of PDFs and web pages, whose authors are unknown: read by a process with limits, `document_worker`."""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

WALL_SECONDS = 60.0
_WORKER = str(Path(__file__).with_name("document_worker.py"))
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "SYSTEMROOT")


async def document_text(data: bytes, kind: str, *arguments: str) -> dict[str, Any]:
    """Returns what the worker says of a file of this kind: its `text`, or an `error`. Raises INTERNAL.

    `kind`, `arguments`: see `document_worker`.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", _WORKER, kind, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
    except OSError as error:
        words = f"the process that reads documents cannot be started: {error.strerror}"
        raise WeftError(Reason.INTERNAL, words) from error
    answer = b""
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(WALL_SECONDS):
                answer, _ = await process.communicate(data)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if answer:
        found: dict[str, Any] = json.loads(answer)
        return found
    if process.returncode in (-signal.SIGPROF, -signal.SIGKILL):
        return {"error": "takes too long to read: print it to a new PDF, or attach only the pages that you need"}
    raise WeftError(Reason.INTERNAL, f"the process that reads documents ended with {process.returncode}")
