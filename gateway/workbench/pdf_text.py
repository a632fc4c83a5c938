"""`POST /api/v1/pdf-text`: the text of a PDF, which the page sends to models like that of a text file."""

from typing import Annotated

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.deps import Gateway
from gateway.intake.body import media_type_of, read_body
from gateway.intake.concurrency_limit import ConcurrencyLimit
from gateway.media.documents import document_text
from gateway.request_facts import facts_of
from gateway.routing import collaborator
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json

MAX_BYTES = 20 * 1024 * 1024
"""Maximum size of a file."""
MAX_CONCURRENT = 4
"""Files whose text is extracted concurrently; one more is refused."""
PDF = "application/pdf"

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
        found = await document_text(data, "pdf")
    if "error" in found:
        raise WeftError(Reason.INVALID_ARGUMENT, f"the PDF {found['error']}")
    return Response(encode_json(found), media_type="application/json", headers={"cache-control": "no-store"})
