"""Files of batches and tasks: quotas, uploads in chunks, and the removal of incomplete files.

Every method raises SERVICE_UNAVAILABLE if the database fails. A file is incomplete and invisible while it is uploaded
or deleted, and after a failed upload.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Container
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from typing_extensions import override

from router_svc.call_metadata import id_in, tenant_in
from router_svc.durable.clock_clamp import BoundedMoment, bring_back
from router_svc.durable.limits import BatchLimits, ResultLimits
from router_svc.durable.uploads import (
    IDLE_SECONDS,
    UPLOAD_LIMIT_SECONDS,
    Uploads,
    incomplete_stream,
    received,
    upload_timed_out,
)
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.api.router.v1 import file_service_pb2_grpc
from weft.durable.batches import (
    BATCH_INPUT,
    BATCH_OUTPUT,
    FILE_PREFIX,
    MAX_FILE_NAME_CHARS,
    MAX_PIECE_BYTES,
    MEDIA_INPUTS,
    RESULT,
    TASK_INPUT,
    file_not_found,
)
from weft.kernel.access.principal import MESH_ACCESS
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer, answering
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import stamp_of
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, is_token, new_id
from weft.sql.connections import Row, Tx

Context = grpc.aio.ServicerContext[Any, Any]

MAX_MEDIA_TYPE_CHARS = 128
_NO_SEQ = 2**63 - 1
"""Above every existing `seq`."""
REMOVED_AT_ONCE = 16
"""Maximum chunks deleted per transaction, so that other writes run in between."""

_CREATED = BoundedMoment("files", "seq", "created_at", along=("expires_at",))
_FILE = "SELECT * FROM files WHERE id = :id AND tenant = :tenant AND is_whole"
_USAGE = "SELECT count(*) AS number, COALESCE(sum(size), 0) AS bytes FROM files WHERE purpose IN :purposes"
_TENANT_USAGE = f"{_USAGE} AND tenant = :tenant"
_TASK_IS_OPEN = "EXISTS (SELECT 1 FROM tasks WHERE tasks.id = files.task_id AND tasks.state <= 2)"
_IS_OF_ATTEMPT = """EXISTS (SELECT 1 FROM tasks WHERE tasks.id = files.task_id AND files.attempt > 0
    AND files.attempt = tasks.attempt AND tasks.state IN (2, 3))"""


def is_kept(tx: Tx, tenant: str, file_id: str, purpose: str) -> bool:
    """Whether a tenant has a file with this id and purpose."""
    found = tx.row(_FILE, id=file_id, tenant=tenant)
    return found is not None and found.purpose == purpose


def _file_of(row: Row) -> file_pb.File:
    return file_pb.File(
        id=row.id,
        tenant=row.tenant,
        name=row.name,
        purpose=row.purpose,
        byte_count=row.size,
        create_time=stamp_of(row.created_at),
        expire_time=stamp_of(row.expires_at),
        media_type=row.media_type,
        task=row.task_id,
        attempt=row.attempt,
    )


MAX_LISTED = 1_000
DEFAULT_LISTED = 100
MAX_UPLOADS = 64
"""Maximum concurrent uploads; at most two chunks of each are in memory."""
SWEPT_AT_ONCE = 100
MAX_OF_TASK = 1_000
"""Maximum files of a task released at a time; a sweep releases the rest."""
ALL_ATTEMPTS: Container[int] = range(2**31)
"""A task's inputs and the results of all attempts."""
_FILES = (BATCH_INPUT, BATCH_OUTPUT, *MEDIA_INPUTS)
_RESULTS = (TASK_INPUT, RESULT)
_OF_SERVICES = frozenset({BATCH_OUTPUT, RESULT})
"""Purposes of files that only services of the mesh may write."""
_PURPOSES = (*_FILES, *_RESULTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    """Purposes that share their bounds."""

    purposes: tuple[str, ...]
    what: str
    """Name of the files, for messages."""
    section: str
    """Where the bounds are set, for messages."""
    max_count: int
    max_tenant_bytes: int
    max_total_bytes: int | None
    """None: only tenants have a bound."""
    keep_seconds: float

    def require_room(self, tx: Tx, tenant: str, *, files: int = 0, size: int = 0) -> None:
        """Raises TOO_MANY_RESOURCES if these files and bytes exceed the quota of the tenant or of all."""
        (usage,) = tx.rows(_TENANT_USAGE, tenant=tenant, purposes=self.purposes)
        if usage.number + files > self.max_count:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the tenant has {self.max_count} {self.what}, its limit; delete some",
            )
        if usage.bytes + size > self.max_tenant_bytes:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the tenant has {self.max_tenant_bytes} bytes of {self.what}, its limit ({self.section}); delete some",
            )
        if self.max_total_bytes is None:
            return
        (total,) = tx.rows(_USAGE, purposes=self.purposes)
        if total.bytes + size > self.max_total_bytes:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the mesh has {self.max_total_bytes} bytes of {self.what}, its limit ({self.section}); "
                "delete tasks, or wait until some expire",
            )


class FileServicer(AnsweringServicer, file_service_pb2_grpc.FileServiceServicer):
    """FileService of a router, with tenant quotas; tasks in this process also use the other methods."""

    def __init__(
        self,
        database: RouterDatabase,
        limits: BatchLimits,
        clock: Clock,
        *,
        results: ResultLimits | None = None,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._idle_seconds = idle_seconds
        self._database = database
        self._limits = limits
        self._results = results or ResultLimits()
        self._clock = clock
        self._uploads = Uploads("files", MAX_UPLOADS)
        shelves = _shelves(limits, self._results)
        self._shelves = {purpose: shelf for shelf in shelves for purpose in shelf.purposes}
        self._began_at = self._now()
        """Incomplete files from before this time belong to a router that ended."""

    @property
    def results(self) -> ResultLimits:
        """Bounds of tasks' images and recordings."""
        return self._results

    @override
    async def UploadFile(
        self, request_iterator: AsyncIterator[file_pb.UploadFileRequest], context: Context
    ) -> file_pb.UploadFileResponse:
        tenant = tenant_in(context)
        async with received(request_iterator, idle_seconds=self._idle_seconds) as (first, messages):
            if first.file.purpose in _OF_SERVICES:
                caller().require(MESH_ACCESS)
            if first.file.purpose == TASK_INPUT:
                raise invalid_field("file.purpose", "is that of what is submitted with a task")
            new = file_pb.File(
                tenant=tenant,
                name=first.file.name,
                purpose=first.file.purpose,
                media_type=first.file.media_type,
            )
            async with aclosing(_content(first, messages)) as content:
                file = await self.save(new, content)
        return file_pb.UploadFileResponse(file=file)

    @override
    async def GetFile(self, request: file_pb.GetFileRequest, context: Context) -> file_pb.GetFileResponse:
        file = await self.get(tenant_in(context), id_in(request.id))
        return file_pb.GetFileResponse(file=file)

    @override
    async def ListFiles(self, request: file_pb.ListFilesRequest, context: Context) -> file_pb.ListFilesResponse:
        tenant, purpose, limit = tenant_in(context), request.purpose, request.limit or DEFAULT_LISTED
        if not 1 <= limit <= MAX_LISTED:
            raise invalid_field("limit", f"must be 1 to {MAX_LISTED}")
        if purpose and purpose not in _PURPOSES:
            raise invalid_field("purpose", f"must be one of {', '.join(_PURPOSES)}")
        before = (await self._row(tenant, id_in(request.after, "after"))).seq if request.after else _NO_SEQ
        found = await self._database.rows(
            """SELECT * FROM files WHERE tenant = :tenant AND is_whole AND seq < :before AND purpose IN :purposes
            ORDER BY seq DESC LIMIT :limit""",
            tenant=tenant,
            before=before,
            purposes=[purpose] if purpose else _FILES,
            limit=limit + 1,
        )
        return file_pb.ListFilesResponse(files=map(_file_of, found[:limit]), has_more=len(found) > limit)

    @override
    async def ReadFile(
        self, request: file_pb.ReadFileRequest, context: Context
    ) -> AsyncGenerator[file_pb.ReadFileResponse]:
        async with answering(context), aclosing(self.read(tenant_in(context), id_in(request.id))) as content:
            async for data in content:
                yield file_pb.ReadFileResponse(data=data)

    @override
    async def DeleteFile(self, request: file_pb.DeleteFileRequest, context: Context) -> file_pb.DeleteFileResponse:
        """Hides a file immediately, and deletes its chunks in several transactions."""
        if not await self._delete(tenant_in(context), id_in(request.id)):
            raise file_not_found(request.id)
        return file_pb.DeleteFileResponse()

    async def save(self, new: file_pb.File, content: AsyncIterator[bytes]) -> file_pb.File:
        """Stores a file. Raises as `FileClient.save`, and DEADLINE_EXCEEDED if the upload is not complete in time."""
        _check(new)
        file_id, now = new_id(FILE_PREFIX), self._now()
        async with self._uploads.slot(lambda: self._remove(file_id)):
            await self._begin(file_id, new, now)
            return await self._receive(new, file_id, content)

    async def require_room(self, tenant: str, purpose: str, size: int) -> None:
        """Raises TOO_MANY_RESOURCES if another file with this size would not fit."""
        shelf = self._shelves[purpose]
        await self._database.read(lambda tx: shelf.require_room(tx, tenant, files=1, size=size))

    async def get(self, tenant: str, file_id: str) -> file_pb.File:
        """Returns a file's metadata. Raises NOT_FOUND."""
        return _file_of(await self._row(tenant, file_id))

    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        """Yields the content. Also raises NOT_FOUND in the middle if the file is deleted meanwhile."""
        left, place = (await self.get(tenant, file_id)).byte_count, 0
        while left > 0:
            piece = await self._database.row(
                "SELECT data FROM file_pieces WHERE file_id = :id AND place = :place", id=file_id, place=place
            )
            if piece is None or not piece.data:
                raise file_not_found(file_id)
            yield piece.data
            left, place = left - len(piece.data), place + 1

    async def release(self, tenant: str, task_id: str, attempts: Container[int] = ALL_ATTEMPTS) -> None:
        """Deletes a task's inputs (attempt 0) and results of these attempts."""
        for row in await self._database.rows(
            """SELECT id, attempt FROM files WHERE task_id = :id AND tenant = :tenant AND is_whole
            ORDER BY seq LIMIT :limit""",
            id=task_id,
            tenant=tenant,
            limit=MAX_OF_TASK,
        ):
            if row.attempt in attempts:
                await self._delete(tenant, row.id)

    async def sweep(self) -> None:
        """Purges expired, abandoned and incomplete files."""
        now = self._now()
        while await self._database.run(lambda tx: bring_back(tx, [_CREATED], now, SWEPT_AT_ONCE)):
            pass
        await self._database.change(
            f"UPDATE files SET is_whole = FALSE WHERE expires_at <= :now AND is_whole AND NOT {_TASK_IS_OPEN}", now=now
        )
        # Inputs of ended tasks, results of lost attempts, and remains of deleted tasks. A task may be stored later than
        # its inputs, hence the slack.
        late = now - UPLOAD_LIMIT_SECONDS
        while found := await self._database.rows(
            f"""SELECT id, tenant FROM files WHERE task_id <> '' AND is_whole AND created_at < :before
            AND NOT (attempt = 0 AND {_TASK_IS_OPEN}) AND NOT {_IS_OF_ATTEMPT} ORDER BY seq LIMIT :limit""",
            before=late,
            limit=SWEPT_AT_ONCE,
        ):
            for row in found:
                await self._delete(row.tenant, row.id)
        while found := await self._database.rows(
            """SELECT id FROM files WHERE NOT is_whole AND (created_at < :before OR expires_at <= :now)
            ORDER BY seq LIMIT :limit""",
            before=max(self._began_at, late),
            now=now,
            limit=SWEPT_AT_ONCE,
        ):
            for row in found:
                await self._remove(row.id)

    async def stop(self, grace_seconds: float) -> None:
        """Waits for the removal of failed uploads."""
        await self._uploads.stop(grace_seconds)

    async def _delete(self, tenant: str, file_id: str) -> bool:
        """Returns whether the file existed."""
        hide = "UPDATE files SET is_whole = FALSE WHERE id = :id AND tenant = :tenant AND is_whole"
        if not await self._database.change(hide, id=file_id, tenant=tenant):
            return False
        await self._remove(file_id)
        return True

    async def _receive(self, new: file_pb.File, file_id: str, content: AsyncIterator[bytes]) -> file_pb.File:
        file, size = None, 0
        async with aclosing(_chunks(content)) as chunks:
            async for place, data, is_last in chunks:
                size += len(data)
                self._require_size(new.purpose, size)
                file = await self._append(new, file_id, place, data, is_last=is_last)
        assert file is not None, "there is always a last chunk"
        return file

    async def _row(self, tenant: str, file_id: str) -> Row:
        """Returns the row of a complete file. Raises NOT_FOUND."""
        found = None
        if is_token(file_id, MAX_REQUEST_ID_CHARS):
            found = await self._database.row(_FILE, id=file_id, tenant=tenant)
        if found is None or (found.purpose == RESULT and found.expires_at <= self._now()):
            raise file_not_found(file_id)
        return found

    async def _begin(self, file_id: str, new: file_pb.File, now: float) -> None:
        """Inserts an incomplete file if its tenant has room."""
        shelf = self._shelves[new.purpose]
        values: dict[str, Any] = {
            "id": file_id,
            "tenant": new.tenant,
            "name": new.name,
            "purpose": new.purpose,
            "size": 0,
            "created_at": now,
            "expires_at": now + shelf.keep_seconds,
            "is_whole": False,
            "media_type": new.media_type,
            "task_id": new.task,
            "attempt": new.attempt,
        }

        def add(tx: Tx) -> None:
            tx.insert("files", values)
            shelf.require_room(tx, new.tenant)

        await self._database.run(add)

    async def _append(self, new: file_pb.File, file_id: str, place: int, data: bytes, *, is_last: bool) -> file_pb.File:
        """Appends a chunk to an incomplete file; the last one completes it.

        Raises TOO_MANY_RESOURCES, and DEADLINE_EXCEEDED if the file is gone.
        """
        extend = """UPDATE files SET size = size + :length, is_whole = :is_last WHERE id = :id AND NOT is_whole
            RETURNING *"""

        shelf, tenant = self._shelves[new.purpose], new.tenant

        def add(tx: Tx) -> file_pb.File:
            # In the same transaction, as concurrent uploads would otherwise exceed the quota together.
            shelf.require_room(tx, tenant, size=len(data))
            found = tx.row(extend, id=file_id, length=len(data), is_last=is_last)
            if found is None:
                raise upload_timed_out("file")
            if data:
                tx.insert("file_pieces", {"file_id": file_id, "place": place, "data": data})
            return _file_of(found)

        return await self._database.run(add)

    async def _remove(self, file_id: str) -> None:
        """Deletes an incomplete file in several transactions; a complete one stays."""
        some = """DELETE FROM file_pieces WHERE file_id = :id AND place IN
            (SELECT place FROM file_pieces WHERE file_id = :id ORDER BY place LIMIT :limit)"""

        def remove(tx: Tx) -> bool:
            if tx.value("SELECT id FROM files WHERE id = :id AND NOT is_whole", id=file_id) is None:
                return False
            if tx.execute(some, id=file_id, limit=REMOVED_AT_ONCE) == REMOVED_AT_ONCE:
                return True
            tx.execute("DELETE FROM files WHERE id = :id", id=file_id)
            return False

        while await self._database.run(remove):
            pass

    def _require_size(self, purpose: str, size: int) -> None:
        """Raises REQUEST_TOO_LARGE. Batch results are unbounded: a batch whose results do not fit would not end."""
        if purpose == BATCH_OUTPUT:
            return
        results = self._results
        most = {RESULT: results.max_bytes, TASK_INPUT: results.max_input_bytes}.get(
            purpose, self._limits.max_file_bytes
        )
        if size > most:
            raise FieldError("file", f"must have at most {most} bytes", Reason.REQUEST_TOO_LARGE)

    def _now(self) -> float:
        return self._clock.utc_now().timestamp()


def _shelves(limits: BatchLimits, results: ResultLimits) -> tuple[Shelf, Shelf]:
    uploaded = Shelf(
        purposes=_FILES,
        what="files",
        section="router.batches",
        max_count=limits.max_files_per_tenant,
        max_tenant_bytes=limits.max_tenant_file_bytes,
        max_total_bytes=None,
        keep_seconds=limits.keep_file_seconds,
    )
    made = Shelf(
        purposes=_RESULTS,
        what="images and recordings of tasks",
        section="router.results",
        max_count=results.max_per_tenant,
        max_tenant_bytes=results.max_tenant_bytes,
        max_total_bytes=results.max_total_bytes,
        keep_seconds=results.keep_seconds,
    )
    return uploaded, made


def _check(new: file_pb.File) -> None:
    name = new.name
    if not 1 <= len(name) <= MAX_FILE_NAME_CHARS or not name.isprintable():
        raise invalid_field("file.name", f"must be 1 to {MAX_FILE_NAME_CHARS} printable characters")
    if "/" in name or "\\" in name or name in {".", ".."}:
        # A download may be written to a folder under this name.
        raise invalid_field("file.name", "must be a name, not a path")
    if new.purpose not in _PURPOSES:
        raise invalid_field("file.purpose", f"must be one of {', '.join(_PURPOSES)}")
    if len(new.media_type) > MAX_MEDIA_TYPE_CHARS or (new.media_type and not new.media_type.isprintable()):
        raise invalid_field("file.media_type", f"must have at most {MAX_MEDIA_TYPE_CHARS} printable characters")


async def _content(
    first: file_pb.UploadFileRequest, messages: AsyncIterator[file_pb.UploadFileRequest]
) -> AsyncGenerator[bytes]:
    """Yields the content; the last message has its length, as a broken connection may look like an end."""
    yield _data(first)
    size = len(first.data)
    is_whole = 0 < size == first.file.byte_count
    async for message in messages:
        size += len(_data(message))
        is_whole = message.HasField("file")
        if is_whole and message.file.byte_count != size:
            raise invalid_field("file.byte_count", f"must be the number of bytes that were sent, which is {size}")
        yield message.data
    if not is_whole:
        raise incomplete_stream()


def _data(message: file_pb.UploadFileRequest) -> bytes:
    if len(message.data) > MAX_PIECE_BYTES:
        raise invalid_field("data", f"must have at most {MAX_PIECE_BYTES} bytes")
    return message.data


async def _chunks(content: AsyncIterator[bytes]) -> AsyncGenerator[tuple[int, bytes, bool]]:
    """Yields the content in chunks of MAX_PIECE_BYTES, with their number from 0 and whether they are the last."""
    buffer, place = bytearray(), 0
    async for data in content:
        buffer += data
        while len(buffer) > MAX_PIECE_BYTES:
            yield place, bytes(buffer[:MAX_PIECE_BYTES]), False
            del buffer[:MAX_PIECE_BYTES]
            place += 1
    yield place, bytes(buffer), True
