"""/v1/files and /v1/batches: upload and read files; create, list, get and cancel batches of requests."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Annotated
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import MAX_NOTICES, with_warnings
from gateway.answers.binary import BinaryAnswer, Headers
from gateway.answers.unary import JsonAnswer, UnaryAnswer, json_response, list_after, list_json
from gateway.batches.chunks import in_chunks
from gateway.batches.creation import BatchCreator
from gateway.batches.documents import BatchRequest, batch_json, file_json
from gateway.deps import Inference, InferenceDeps
from gateway.intake.body import body_chunks, multipart_boundary, read_model
from gateway.intake.concurrency_limit import ConcurrencyLimit
from gateway.intake.headers import tenant_of
from gateway.intake.multipart import MultipartStream, Part
from gateway.intake.query import Query, begin_owned, begin_read, naming
from gateway.intake.request_model import MAX_ID_CHARS
from gateway.openai.extension_fields import unsupported
from gateway.request_facts import facts_of
from gateway.routing import collaborator
from weft.api.common.v1 import warning_pb2
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.durable.batches import (
    BATCH_INPUT,
    BATCH_OUTPUT,
    MAX_FILE_NAME_CHARS,
    MEDIA_INPUTS,
    BatchClient,
    FileClient,
    batch_status,
)
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.names import require_token

UPLOAD_TIMEOUT_SECONDS = 3600.0
"""Maximum duration of an upload; the minimum rate of `connections` applies as well."""

Files = Annotated[FileClient, collaborator(FileClient)]
Uploads = Annotated[ConcurrencyLimit, collaborator("uploads")]
Batches = Annotated[BatchClient, collaborator(BatchClient)]
Creator = Annotated[BatchCreator, collaborator(BatchCreator)]
Creations = Annotated[ConcurrencyLimit, collaborator("creations")]


MAX_LISTED = 100
DEFAULT_LISTED = 20
_BATCHES = "batches"
BATCH_LIST_PARAMETERS = ("limit", "after")
_AT_THEIR_END = frozenset({"failed", "completed", "expired"})


async def create_batch(deps: Inference, creator: Creator, creations: Creations, request: Request) -> Response:
    """Creates a batch from the requests in a file, which run within a time window."""
    facts_of(request.scope).surface = _BATCHES
    config, scope = deps.config, request.scope
    params = await read_model(request, BatchRequest, config)
    require_token(params.input_file_id, "input_file_id", MAX_ID_CHARS)
    tenant = tenant_of(scope)
    if deps.rate_limits is not None:
        deps.rate_limits.take(tenant)

    async def produce() -> JsonAnswer:
        with creations.slot():
            batch, warnings = await creator.make(scope, tenant, params)
        return JsonAnswer(with_warnings(encode_json(batch_json(batch)), warnings), [])

    return UnaryAnswer(produce, cut_off_seconds=config.request_timeout_seconds + config.deadline_slack_seconds)


async def list_batches(batches: Batches, request: Request) -> Response:
    """Lists batches, newest first."""
    query = begin_read(request, _BATCHES, BATCH_LIST_PARAMETERS)
    limit = query.count("limit", MAX_LISTED) or DEFAULT_LISTED
    with naming("after"):
        page = await batches.list_page(tenant_of(request.scope), after=query.token("after"), limit=limit)
    return json_response(list_json([batch_json(batch) for batch in page.batches], has_more=page.has_more))


async def get_batch(batches: Batches, request: Request) -> Response:
    """Returns a batch with its current progress."""
    tenant, batch_id = begin_owned(request, _BATCHES, "batch_id")
    return json_response(batch_json(await batches.get(tenant, batch_id)))


async def cancel_batch(batches: Batches, request: Request) -> Response:
    """Cancels all unfinished requests of a batch. Finished answers are kept."""
    tenant, batch_id = begin_owned(request, _BATCHES, "batch_id")
    batch = await batches.cancel(tenant, batch_id)
    status = batch_status(batch)
    if status in _AT_THEIR_END:
        raise invalid_field("batch_id", f"batch {batch_id} is {status} and cannot be cancelled")
    return json_response(batch_json(batch))


_UPLOADED = (BATCH_INPUT, *MEDIA_INPUTS)
_BY_SUFFIX = MappingProxyType(
    {
        "flac": "audio/flac",
        "jpeg": "image/jpeg",
        "jpg": "image/jpeg",
        "m4a": "audio/x-m4a",
        "mp3": "audio/mpeg",
        "mp4": "audio/mp4",
        "oga": "audio/ogg",
        "ogg": "audio/ogg",
        "png": "image/png",
        "wav": "audio/wav",
        "webm": "audio/webm",
        "webp": "image/webp",
    }
)
FORM_BYTES = 64 * 1024
"""Maximum size of a form without its file."""


class FileUpload:
    """The only file of a form, with its purpose. Other fields are not used, with a warning each."""

    def __init__(self, form: MultipartStream, *, max_bytes: int) -> None:
        self._form = form
        self._max_bytes = max_bytes
        self._purposes = 0
        self._has_begun = False
        self.purpose = BATCH_INPUT
        """From the field before the file; a field after it must be the same."""
        self.media_type = ""
        """The file's type, by the form or its name; empty: unknown."""
        self.warnings: list[warning_pb2.Warning] = []
        self.failure: WeftError | None = None
        """The error in the form; None: none so far."""

    async def name(self) -> str:
        """Returns the file's name. Raises INVALID_ARGUMENT naming the invalid part of the form before the file."""
        while (part := await self._form.next_part()) is not None:
            if part.name == "file":
                self._has_begun = True
                self.media_type = _media_type_of(part)
                return _name_of(part)
            await self._take(part)
        raise invalid_field("file", "must be one file")

    async def content(self) -> AsyncGenerator[bytes]:
        """Yields the file's content. Ends once the whole form is valid; raises the error in it."""
        try:
            async for piece in self._file():
                yield piece
            while (part := await self._form.next_part()) is not None:
                if part.name == "file":
                    raise invalid_field("file", "must be one file")
                await self._take(part)
            if not self._purposes:
                raise invalid_field("purpose", f"must be one of {', '.join(_UPLOADED)}")
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
        value = Part(name=part.name, data=await self._form.value(), filename=part.filename)
        if part.name != "purpose":
            if len(self.warnings) < MAX_NOTICES:
                self.warnings.append(unsupported(part.name[:MAX_ID_CHARS], "is unknown; it was not used"))
            return
        self._purposes += 1
        if self._purposes > 1:
            raise invalid_field("purpose", "is given twice")
        if value.text() not in _UPLOADED:
            raise invalid_field("purpose", f"must be one of {', '.join(_UPLOADED)}")
        if self._has_begun and value.text() != self.purpose:
            raise invalid_field("purpose", "must precede the file in the form")
        self.purpose = value.text()


def _media_type_of(part: Part) -> str:
    """Returns the type of an image or a recording, by the form or by the file's name; empty: unknown."""
    if part.media_type.partition("/")[0] in {"audio", "image"}:
        return part.media_type
    return _BY_SUFFIX.get((part.filename or "").rpartition(".")[2].lower(), "")


def _name_of(part: Part) -> str:
    if part.filename is None:
        raise invalid_field("file", "must be a file")
    if not 0 < len(part.filename) <= MAX_FILE_NAME_CHARS:
        raise invalid_field("file", f"must have a name of 1 to {MAX_FILE_NAME_CHARS} characters")
    return part.filename


MAX_LISTED_FILES = 10_000
_STORE_PAGE = 1_000
"""Page size of requests to the file store."""
_FILES = "files"
FILE_LIST_PARAMETERS = ("purpose", "limit", "order", "after")
_PURPOSES = (BATCH_INPUT, BATCH_OUTPUT, *MEDIA_INPUTS)


async def create_file(deps: Inference, files: Files, uploads: Uploads, request: Request) -> Response:
    """Uploads a file: the requests of a batch, one per line, or an image or a recording for a task."""
    facts_of(request.scope).surface = _FILES
    tenant = tenant_of(request.scope)
    with uploads.slot():
        file, warnings = await _received(request, deps, files, tenant)
    return json_response(file_json(file), warnings=warnings)


async def list_files(files: Files, request: Request) -> Response:
    """Lists files, newest first."""
    query = begin_read(request, _FILES, FILE_LIST_PARAMETERS)
    with naming("after"):
        return json_response(await _listed(files, tenant_of(request.scope), query))


async def get_file(files: Files, request: Request) -> Response:
    """Returns the properties of a file."""
    tenant, file_id = begin_owned(request, _FILES, "file_id")
    return json_response(file_json(await files.get(tenant, file_id)))


async def get_content(deps: Inference, files: Files, request: Request) -> Response:
    """Returns the content of a file."""
    tenant, file_id = begin_owned(request, _FILES, "file_id")
    file = await files.get(tenant, file_id)
    return BinaryAnswer(
        exactly(files.read(tenant, file_id), file.byte_count),
        lambda: _file_headers(file),
        kind="file",
        write_timeout_seconds=deps.config.write_timeout_seconds,
    )


async def exactly(content: AsyncGenerator[bytes], size: int) -> AsyncGenerator[bytes]:
    """Yields the content of a file. Raises SERVICE_UNAVAILABLE if its size is not `size` bytes."""
    sent = 0
    async with aclosing(content):
        async for piece in content:
            sent += len(piece)
            if sent > size:
                raise _other_size()
            yield piece
    if sent != size:
        raise _other_size()


def _other_size() -> WeftError:
    return WeftError(Reason.SERVICE_UNAVAILABLE, "the stored content of this file differs in size from its upload")


def _file_headers(file: file_pb.File) -> Headers:
    # Browsers must save the file instead of displaying it, whatever its content and name.
    name = quote(file.name, safe="")
    return [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(file.byte_count).encode()),
        (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode()),
    ]


async def delete_file(files: Files, request: Request) -> Response:
    """Deletes a file."""
    tenant, file_id = begin_owned(request, _FILES, "file_id")
    await files.delete(tenant, file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def _received(
    request: Request, deps: InferenceDeps, files: FileClient, tenant: str
) -> tuple[file_pb.File, Sequence[warning_pb2.Warning]]:
    config, bounds = deps.config, deps.config.batches
    boundary = multipart_boundary(request.scope)
    body = body_chunks(
        request.scope,
        request.receive,
        config,
        max_bytes=bounds.max_file_bytes + FORM_BYTES,
        timeout_seconds=UPLOAD_TIMEOUT_SECONDS,
    )
    async with aclosing(body):
        upload = FileUpload(MultipartStream(body, boundary, config.limits), max_bytes=bounds.max_file_bytes)
        name = await upload.name()
        new = file_pb.File(tenant=tenant, name=name, purpose=upload.purpose, media_type=upload.media_type)
        try:
            return await files.save(new, in_chunks(upload.content())), upload.warnings
        except WeftError:
            # The store's own error follows from the invalid upload.
            if upload.failure is not None:
                raise upload.failure from None
            raise


async def _listed(files: FileClient, tenant: str, query: Query) -> dict[str, object]:
    """Returns a page of files. Raises INVALID_ARGUMENT, NOT_FOUND for `after`."""
    purpose = query.text("purpose")
    if "purpose" in query and purpose not in _PURPOSES:
        raise invalid_field("purpose", f"must be one of {', '.join(_PURPOSES)}")
    is_ascending = query.is_ascending()
    limit, after = query.count("limit", MAX_LISTED_FILES) or MAX_LISTED_FILES, query.token("after")
    if not is_ascending:
        found, has_more = await _newest(files, tenant, purpose, after, limit)
        return list_json([file_json(file) for file in found], has_more=has_more)
    # Stores list the newest first, so the other order needs the whole list.
    everything, _ = await _newest(files, tenant, purpose, "", MAX_LISTED_FILES)
    ordered = [file_json(file) for file in reversed(everything)]
    return list_after(ordered, after or None, limit, "names no file of this list")


async def _newest(
    files: FileClient, tenant: str, purpose: str, after: str, limit: int
) -> tuple[list[file_pb.File], bool]:
    found: list[file_pb.File] = []
    has_more = True
    while has_more and len(found) < limit:
        size = min(_STORE_PAGE, limit - len(found))
        page = await files.list_page(tenant, purpose=purpose, after=after, limit=size)
        found += page.files
        # An empty page is the last one.
        has_more = page.has_more and bool(page.files)
        after = found[-1].id if found else after
    return found, has_more
