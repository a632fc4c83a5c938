"""/v1/files and /v1/batches: upload and read files; create, list, get and cancel batches of requests."""

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import encode_json
from gateway.answers.binary import BinaryAnswer, Headers
from gateway.answers.unary import JsonAnswer, UnaryAnswer, json_response
from gateway.batches.chunks import each_in_time, in_chunks, in_time
from gateway.batches.creation import BatchCreator
from gateway.batches.documents import BatchRequest, batch_json, batch_status, file_json, list_json
from gateway.batches.finishing import BatchFinisher, FinishingJobs
from gateway.deps import InferenceDeps
from gateway.intake.body import body_chunks, multipart_boundary, read_model
from gateway.intake.headers import tenant_of
from gateway.intake.multipart import MultipartStream, Part
from gateway.intake.query import Query, begin_read
from gateway.intake.request_model import MAX_ID_CHARS
from gateway.request_facts import facts_of
from gateway.tasks.task_apis import TaskApis
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.durable.batches import (
    BATCH_INPUT,
    BATCH_OUTPUT,
    MAX_FILE_NAME_CHARS,
    BatchPort,
    FilePort,
)
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import require_token
from weft.kernel.reasons import Reason


class ConcurrencyLimit:
    """A limit on how many blocks run at once."""

    def __init__(self, size: int, what: str) -> None:
        """`what` completes the error message, such as "files are being uploaded (max_uploads)"."""
        self._size = size
        self._what = what
        self._taken = 0

    @contextmanager
    def slot(self) -> Generator[None]:
        """Hold one of the slots. Raises RATE_LIMIT_EXCEEDED where all are taken."""
        if self._taken >= self._size:
            message = f"{self._taken} {self._what}; try again"
            raise WeftError(Reason.RATE_LIMIT_EXCEEDED, message, retry_after_seconds=1)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDeps:
    """The file store, and the limit of concurrent uploads."""

    deps: InferenceDeps
    port: FilePort
    uploads: ConcurrencyLimit

    @property
    def timeout_seconds(self) -> float:
        """How long the store may take to answer."""
        return self.deps.config.batches.store_timeout_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDeps:
    """The batch store, creation and finishing of batches, and the limit of concurrent creations."""

    deps: InferenceDeps
    port: BatchPort
    maker: BatchCreator
    finisher: BatchFinisher
    creations: ConcurrencyLimit

    @property
    def timeout_seconds(self) -> float:
        """How long the store may take to answer."""
        return self.deps.config.batches.store_timeout_seconds


def file_deps(deps: InferenceDeps, files: FilePort) -> FileDeps:
    """Returns the collaborators of the file endpoints of one gateway."""
    bounds = deps.config.batches
    return FileDeps(
        deps=deps,
        port=files,
        uploads=ConcurrencyLimit(bounds.max_uploads, "files are being uploaded already (max_uploads)"),
    )


def batch_deps(
    deps: InferenceDeps, files: FilePort, batches: BatchPort, task_apis: TaskApis, jobs: FinishingJobs
) -> BatchDeps:
    """Returns the collaborators of the batch endpoints of one gateway; `jobs` end with it."""
    bounds = deps.config.batches
    return BatchDeps(
        deps=deps,
        port=batches,
        maker=BatchCreator(files, batches, task_apis, config=deps.config, clock=deps.clock),
        finisher=BatchFinisher(files, batches, task_apis, jobs=jobs, config=bounds),
        creations=ConcurrencyLimit(bounds.max_creations, "batches are being created already (max_creations)"),
    )


MAX_LISTED = 100
DEFAULT_LISTED = 20
_BATCHES = "batches"
BATCH_LIST_PARAMETERS = ("limit", "after")
_AT_THEIR_END = frozenset({"failed", "completed", "expired"})


async def create_batch(batches: BatchDeps, request: Request) -> Response:
    """Creates a batch of the requests in a file, to run within a window."""
    facts_of(request.scope).surface = _BATCHES
    config, scope = batches.deps.config, request.scope
    params = await read_model(request, BatchRequest, config)
    require_token(params.input_file_id, "input_file_id", MAX_ID_CHARS)
    tenant = tenant_of(scope)
    if batches.deps.rate_limits is not None:
        batches.deps.rate_limits.take(tenant)

    async def produce() -> JsonAnswer:
        with batches.creations.slot():
            batch = await batches.maker.make(scope, tenant, params)
        return JsonAnswer(encode_json(batch_json(batch)), [])

    return UnaryAnswer(produce, cut_off_seconds=config.request_timeout_seconds + config.deadline_slack_seconds)


async def list_batches(batches: BatchDeps, request: Request) -> Response:
    """Lists batches, newest first."""
    query = begin_read(request, _BATCHES, BATCH_LIST_PARAMETERS)
    limit = query.count("limit", MAX_LISTED) or DEFAULT_LISTED
    after = require_token(query.text("after"), "after", MAX_ID_CHARS) if "after" in query else ""
    tenant = tenant_of(request.scope)
    page = await in_time(batches.port.list_page(tenant, after=after, limit=limit), batches.timeout_seconds)
    for batch in page.batches:
        batches.finisher.begin(batch)
    return json_response(list_json([batch_json(batch) for batch in page.batches], has_more=page.has_more))


async def get_batch(batches: BatchDeps, request: Request) -> Response:
    """Returns a batch with its current counts."""
    tenant, batch_id = _tenant_and_batch(request)
    batch = await in_time(batches.port.get(tenant, batch_id), batches.timeout_seconds)
    settled = await batches.finisher.settle(batch)
    return json_response(batch_json(settled.batch, settled.problem))


async def cancel_batch(batches: BatchDeps, request: Request) -> Response:
    """Cancels every unfinished request of a batch; finished answers are kept."""
    tenant, batch_id = _tenant_and_batch(request)
    batch = await in_time(batches.port.cancel(tenant, batch_id), batches.timeout_seconds)
    status = batch_status(batch)
    if status in _AT_THEIR_END:
        raise invalid_field("batch_id", f"batch {batch_id} is {status} and cannot be cancelled")
    batches.finisher.begin(batch)
    return json_response(batch_json(batch))


def _tenant_and_batch(request: Request) -> tuple[str, str]:
    facts_of(request.scope).surface = _BATCHES
    batch_id = require_token(request.path_params["batch_id"], "batch_id", MAX_ID_CHARS)
    return tenant_of(request.scope), batch_id


FORM_BYTES = 64 * 1024
"""Maximum size of a form without its file."""


class FileUpload:
    """The one file of a form, with the purpose `batch`. Other fields are accepted and not used."""

    def __init__(self, form: MultipartStream, *, max_bytes: int) -> None:
        self._form = form
        self._max_bytes = max_bytes
        self._purposes = 0
        self.failure: WeftError | None = None
        """The error in the form, once there is one."""

    async def name(self) -> str:
        """Returns the file's name. Raises INVALID_ARGUMENT naming the invalid part of the form before the file."""
        while (part := await self._form.next_part()) is not None:
            if part.name == "file":
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
            raise invalid_field("purpose", f"must be {BATCH_INPUT!r}: files are used for batches only")


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
_PURPOSES = (BATCH_INPUT, BATCH_OUTPUT)


async def create_file(files: FileDeps, request: Request) -> Response:
    """Uploads a file of requests, one per line, for a batch."""
    facts_of(request.scope).surface = _FILES
    tenant = tenant_of(request.scope)
    with files.uploads.slot():
        return json_response(file_json(await _received(request, files, tenant)))


async def list_files(files: FileDeps, request: Request) -> Response:
    """Lists files, newest first."""
    query = begin_read(request, _FILES, FILE_LIST_PARAMETERS)
    found, has_more = await _listed(files, tenant_of(request.scope), query, files.timeout_seconds)
    return json_response(list_json([file_json(file) for file in found], has_more=has_more))


async def get_file(files: FileDeps, request: Request) -> Response:
    """Returns the properties of a file."""
    tenant, file_id = _tenant_and_file(request)
    return json_response(file_json(await in_time(files.port.get(tenant, file_id), files.timeout_seconds)))


async def get_content(files: FileDeps, request: Request) -> Response:
    """Returns the content of a file."""
    tenant, file_id = _tenant_and_file(request)
    file = await in_time(files.port.get(tenant, file_id), files.timeout_seconds)
    content = each_in_time(files.port.read(tenant, file_id), files.timeout_seconds)
    return BinaryAnswer(
        _exactly(content, file.byte_count),
        lambda: _file_headers(file),
        kind="file",
        write_timeout_seconds=files.deps.config.write_timeout_seconds,
    )


async def _exactly(content: AsyncGenerator[bytes], size: int) -> AsyncGenerator[bytes]:
    """Yields the content of a file. Raises SERVICE_UNAVAILABLE where its size is not `size` bytes."""
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
    # A browser must save the file and not display it, whatever its content and name.
    name = quote(file.name, safe="")
    return [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(file.byte_count).encode()),
        (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode()),
        (b"x-content-type-options", b"nosniff"),
    ]


async def delete_file(files: FileDeps, request: Request) -> Response:
    """Deletes a file."""
    tenant, file_id = _tenant_and_file(request)
    await in_time(files.port.delete(tenant, file_id), files.timeout_seconds)
    return json_response({"id": file_id, "object": "file", "deleted": True})


def _tenant_and_file(request: Request) -> tuple[str, str]:
    facts_of(request.scope).surface = _FILES
    file_id = require_token(request.path_params["file_id"], "file_id", MAX_ID_CHARS)
    return tenant_of(request.scope), file_id


async def _received(request: Request, files: FileDeps, tenant: str) -> file_pb.File:
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
        new = file_pb.File(tenant=tenant, name=await upload.name(), purpose=BATCH_INPUT)
        try:
            return await files.port.save(new, in_chunks(upload.content()))
        except WeftError:
            # The store's own error follows from the invalid upload, which is the cause.
            if upload.failure is not None:
                raise upload.failure from None
            raise


async def _listed(files: FileDeps, tenant: str, query: Query, timeout: float) -> tuple[list[file_pb.File], bool]:
    """Returns a page of files, and whether there are more. Raises INVALID_ARGUMENT, NOT_FOUND for `after`."""
    purpose, order = query.text("purpose"), query.text("order") or "desc"
    if "purpose" in query and purpose not in _PURPOSES:
        raise invalid_field("purpose", f"must be one of {', '.join(_PURPOSES)}")
    if order not in {"asc", "desc"}:
        raise invalid_field("order", "must be 'asc' or 'desc'")
    limit = query.count("limit", MAX_LISTED_FILES) or MAX_LISTED_FILES
    after = require_token(query.text("after"), "after", MAX_ID_CHARS) if "after" in query else ""
    if order == "desc":
        return await _newest(files, tenant, purpose, after, limit, timeout=timeout)
    # Stores list the newest first; the other order needs the whole list.
    everything, _ = await _newest(files, tenant, purpose, "", MAX_LISTED_FILES, timeout=timeout)
    everything.reverse()
    ids = [file.id for file in everything]
    if after and after not in ids:
        raise invalid_field("after", "names no file of this list")
    start = ids.index(after) + 1 if after else 0
    return everything[start : start + limit], start + limit < len(everything)


async def _newest(
    files: FileDeps, tenant: str, purpose: str, after: str, limit: int, *, timeout: float
) -> tuple[list[file_pb.File], bool]:
    found: list[file_pb.File] = []
    has_more = True
    while has_more and len(found) < limit:
        size = min(_STORE_PAGE, limit - len(found))
        page = await in_time(files.port.list_page(tenant, purpose=purpose, after=after, limit=size), timeout)
        found += page.files
        # An empty page is the last one.
        has_more = page.has_more and bool(page.files)
        after = found[-1].id if found else after
    return found, has_more
