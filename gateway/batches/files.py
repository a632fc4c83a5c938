"""/v1/files: input and output files of batches."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.file import FileAnswer
from gateway.answers.unary import json_response
from gateway.batches.chunks import each_in_time, in_chunks, in_time
from gateway.batches.deps import FileDeps
from gateway.batches.documents import file_json, list_json
from gateway.intake.body import body_chunks, multipart_boundary
from gateway.intake.headers import tenant_of
from gateway.intake.multipart import MultipartStream, Part
from gateway.intake.query import Query
from gateway.request_facts import facts_of
from gateway.responses.schema import MAX_ID_CHARS
from weft.durable.batches import BATCH_INPUT, BATCH_OUTPUT, MAX_FILE_NAME_CHARS, NewFile, StoredFile
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import require_token
from weft.kernel.reasons import Reason

FORM_BYTES = 64 * 1024
"""Maximum size of a form without its file."""


class FileUpload:
    """The one file of a form, with the purpose `batch`. Other fields are accepted and not used."""

    def __init__(self, form: MultipartStream, *, max_bytes: int) -> None:
        self._form = form
        self._max_bytes = max_bytes
        self._purposes = 0
        self.failure: WeftError | None = None
        """Why the content broke off."""

    async def name(self) -> str:
        """Returns the file's name. Raises INVALID_ARGUMENT naming what is wrong in the form before the file."""
        while (part := await self._form.next_part()) is not None:
            if part.name == "file":
                return _name_of(part)
            await self._take(part)
        raise invalid_field("file", "must be one file")

    async def content(self) -> AsyncGenerator[bytes]:
        """Yields the file's content. Ends once the whole form is valid; raises what is wrong with it."""
        try:
            async for piece in self._file():
                yield piece
            while (part := await self._form.next_part()) is not None:
                if part.name == "file":
                    raise invalid_field("file", "must be one file")
                await self._take(part)
            if not self._purposes:
                raise invalid_field("purpose", f"must be {BATCH_INPUT!r}")
        except WeftError as error:
            self.failure = error
            raise

    async def _file(self) -> AsyncGenerator[bytes]:
        size = 0
        async for piece in self._form.data():
            size += len(piece)
            if size > self._max_bytes:
                raise WeftError(Reason.REQUEST_TOO_LARGE, f"the file is larger than {self._max_bytes} bytes")
            yield piece
        if not size:
            raise invalid_field("file", "must not be empty")

    async def _take(self, part: Part) -> None:
        """Reads a field beside the file."""
        value = Part(name=part.name, data=await self._form.value(), filename=part.filename)
        if part.name != "purpose":
            return
        self._purposes += 1
        if self._purposes > 1:
            raise invalid_field("purpose", "is given twice")
        if value.text() != BATCH_INPUT:
            raise invalid_field("purpose", f"must be {BATCH_INPUT!r}: files are for batches here")


def _name_of(part: Part) -> str:
    if part.filename is None:
        raise invalid_field("file", "must be a file")
    if not 0 < len(part.filename) <= MAX_FILE_NAME_CHARS:
        raise invalid_field("file", f"must have a name of 1 to {MAX_FILE_NAME_CHARS} characters")
    return part.filename


MAX_LISTED = 10_000
_PAGE = 1_000
"""Page size of requests to the file store."""
_SURFACE = "files"
_PATH = "/v1/files/{file_id}"
LIST_PARAMETERS = ("purpose", "limit", "order", "after")
_PURPOSES = (BATCH_INPUT, BATCH_OUTPUT)


async def create_file(files: FileDeps, request: Request) -> Response:
    """Keep a file of requests, one per line, for a batch."""
    facts_of(request.scope).surface = _SURFACE
    tenant = tenant_of(request.scope)
    with files.uploads.slot():
        return json_response(file_json(await _received(request, files, tenant)))


async def list_files(files: FileDeps, request: Request) -> Response:
    """Files, the newest first."""
    facts_of(request.scope).surface = _SURFACE
    query = Query(request.scope, frozenset(LIST_PARAMETERS))
    found, has_more = await _listed(files, tenant_of(request.scope), query, files.timeout_seconds)
    return json_response(list_json([file_json(file) for file in found], has_more=has_more))


async def get_file(files: FileDeps, request: Request) -> Response:
    """What is known of a file."""
    tenant, file_id = _tenant_and_id(request)
    return json_response(file_json(await in_time(files.port.get(tenant, file_id), files.timeout_seconds)))


async def get_content(files: FileDeps, request: Request) -> Response:
    """What is in a file."""
    tenant, file_id = _tenant_and_id(request)
    file = await in_time(files.port.get(tenant, file_id), files.timeout_seconds)
    content = each_in_time(files.port.read(tenant, file_id), files.timeout_seconds)
    return FileAnswer(file, content, write_timeout_seconds=files.deps.config.write_timeout_seconds)


async def delete_file(files: FileDeps, request: Request) -> Response:
    """Forget a file."""
    tenant, file_id = _tenant_and_id(request)
    await in_time(files.port.delete(tenant, file_id), files.timeout_seconds)
    return json_response({"id": file_id, "object": "file", "deleted": True})


def _tenant_and_id(request: Request) -> tuple[str, str]:
    facts_of(request.scope).surface = _SURFACE
    file_id = require_token(request.path_params["file_id"], "file_id", MAX_ID_CHARS)
    return tenant_of(request.scope), file_id


async def _received(request: Request, files: FileDeps, tenant: str) -> StoredFile:
    config, bounds = files.deps.config, files.deps.config.batches
    boundary = multipart_boundary(request.scope, config.limits)
    body = body_chunks(
        request.scope,
        request.receive,
        config,
        max_bytes=bounds.max_file_bytes + FORM_BYTES,
        timeout_seconds=bounds.upload_timeout_seconds,
    )
    async with aclosing(body):
        upload = FileUpload(MultipartStream(body, boundary, config.limits), max_bytes=bounds.max_file_bytes)
        new = NewFile(tenant=tenant, name=await upload.name(), purpose=BATCH_INPUT)
        try:
            return await files.port.save(new, in_chunks(upload.content()))
        except WeftError:
            # The store's own error follows from the broken upload; this is its cause.
            if upload.failure is not None:
                raise upload.failure from None
            raise


async def _listed(files: FileDeps, tenant: str, query: Query, timeout: float) -> tuple[list[StoredFile], bool]:
    """Returns a page of files, and whether there are more. Raises INVALID_ARGUMENT, NOT_FOUND for `after`."""
    purpose, order = query.text("purpose"), query.text("order") or "desc"
    if "purpose" in query and purpose not in _PURPOSES:
        raise invalid_field("purpose", f"must be one of {', '.join(_PURPOSES)}")
    if order not in {"asc", "desc"}:
        raise invalid_field("order", "must be 'asc' or 'desc'")
    limit = query.count("limit", MAX_LISTED) or MAX_LISTED
    after = require_token(query.text("after"), "after", MAX_ID_CHARS) if "after" in query else ""
    if order == "desc":
        return await _newest(files, tenant, purpose, after, limit, timeout=timeout)
    # Stores list the newest first; the other order needs the whole list.
    everything, _ = await _newest(files, tenant, purpose, "", MAX_LISTED, timeout=timeout)
    everything.reverse()
    ids = [file.id for file in everything]
    if after and after not in ids:
        raise invalid_field("after", "names no file of this list")
    start = ids.index(after) + 1 if after else 0
    return everything[start : start + limit], start + limit < len(everything)


async def _newest(
    files: FileDeps, tenant: str, purpose: str, after: str, limit: int, *, timeout: float
) -> tuple[list[StoredFile], bool]:
    found: list[StoredFile] = []
    has_more = True
    while has_more and len(found) < limit:
        size = min(_PAGE, limit - len(found))
        page = await in_time(files.port.list_page(tenant, purpose=purpose, after=after, limit=size), timeout)
        found += page.files
        # An empty page is the last one.
        has_more = page.has_more and bool(page.files)
        after = found[-1].id if found else after
    return found, has_more
