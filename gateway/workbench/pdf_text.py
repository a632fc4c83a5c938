"""`POST /api/v1/pdf-text`: the text of a PDF, which the page sends to models like that of a text file."""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.deps import Gateway
from gateway.intake.body import media_type_of, read_body
from gateway.intake.concurrency_limit import ConcurrencyLimit
from gateway.request_facts import facts_of
from gateway.routing import collaborator
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json

MAX_BYTES = 20 * 1024 * 1024
"""Maximum size of a file."""
MAX_CONCURRENT = 4
"""Files whose text is extracted concurrently; one more is refused."""
WALL_SECONDS = 60.0
PDF = "application/pdf"
_WORKER = str(Path(__file__).with_name("pdf_worker.py"))
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "SYSTEMROOT")

Extractions = Annotated[ConcurrencyLimit, collaborator("pdf_texts")]


class PdfText(BaseModel):
    """The text of a PDF."""

    text: str
    """Of all pages, with a blank line between them."""
    pages: int


async def extract_pdf_text(deps: Gateway, extractions: Extractions, request: Request) -> Response:
    """Returns the text of the PDF in the body. Nothing of it is stored.

    A PDF that is encrypted, damaged, too large or without text is refused with the next step.
    """
    facts_of(request.scope).surface = "workbench"
    if media_type_of(request.scope) != PDF.encode():
        raise WeftError(Reason.MALFORMED_REQUEST, f"the Content-Type must be {PDF}")
    with extractions.slot():
        data = await read_body(request.scope, request.receive, deps.config, max_bytes=MAX_BYTES)
        found = await _extracted(data)
    if "error" in found:
        raise WeftError(Reason.INVALID_ARGUMENT, f"the PDF {found['error']}")
    return Response(encode_json(found), media_type="application/json", headers={"cache-control": "no-store"})


async def _extracted(data: bytes) -> dict[str, Any]:
    """Returns what the worker says of a file."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", _WORKER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
            start_new_session=True,
        )
    except OSError as error:
        words = f"the process that reads PDFs cannot be started: {error.strerror}"
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
    raise WeftError(Reason.INTERNAL, f"the process that reads PDFs ended with {process.returncode}")
