"""GET /v1/results/{id}: an image or a recording by its signed URL, without a key."""

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.binary import BinaryAnswer, Headers
from gateway.batches.batch_handlers import Files, exactly
from gateway.deps import Inference
from gateway.intake.query import Query
from gateway.request_facts import facts_of
from gateway.result_links import ResultLinks, SignedResult
from gateway.routing import collaborator
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.durable.batches import RESULT, file_not_found

SURFACE = "results"
PARAMETERS = ("tenant", "expires", "signature")
_SHOWN = frozenset(
    {
        "audio/flac",
        "audio/mpeg",
        "audio/ogg",
        "audio/opus",
        "audio/aac",
        "audio/wav",
        "audio/x-wav",
        "image/jpeg",
        "image/png",
        "image/webp",
    }
)
"""Media types that a browser may display; others are saved."""


Links = Annotated[ResultLinks, collaborator(ResultLinks)]


async def get_result(deps: Inference, files: Files, links: Links, request: Request) -> Response:
    """Returns a generated image or recording. The signed URL replaces an API key.

    Answers 404 for a wrong signature or a deleted result, and 410 for an expired URL.
    """
    scope = request.scope
    facts_of(scope).surface = SURFACE
    query = Query(scope, frozenset(PARAMETERS))
    asked = SignedResult(
        tenant=query.text("tenant"),
        file_id=request.path_params["id"],
        expires=query.text("expires"),
        signature=query.text("signature"),
    )
    links.require_valid(asked)
    file = await files.get(asked.tenant, asked.file_id)
    if file.purpose != RESULT:
        raise file_not_found(asked.file_id)
    return BinaryAnswer(
        exactly(files.read(asked.tenant, asked.file_id), file.byte_count),
        lambda: _headers(file),
        kind="result",
        write_timeout_seconds=deps.config.write_timeout_seconds,
    )


def _headers(file: file_pb.File) -> Headers:
    is_shown = file.media_type in _SHOWN
    media_type = file.media_type if is_shown else "application/octet-stream"
    return [
        (b"content-type", media_type.encode()),
        (b"content-length", str(file.byte_count).encode()),
        (b"content-disposition", b"inline" if is_shown else b"attachment"),
        (b"content-security-policy", b"default-src 'none'; sandbox"),
        # The URL is the permission, so it must not reach shared caches or other sites.
        (b"cache-control", b"private, max-age=3600"),
        (b"referrer-policy", b"no-referrer"),
    ]
