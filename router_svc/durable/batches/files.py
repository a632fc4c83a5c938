"""Files: the quotas of tenants, uploads in chunks, and the removal of incomplete files.

Every method raises SERVICE_UNAVAILABLE when the database fails. An incomplete file is not visible: it is being
uploaded, its upload failed, or it is being deleted.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Row, true
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from router_svc.durable import statements
from router_svc.durable.batches.uploads import UPLOAD_LIMIT_SECONDS, Uploads, upload_timed_out
from router_svc.durable.limits import BatchLimits
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import files
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.durable.batches import (
    BATCH_INPUT,
    BATCH_OUTPUT,
    FILE_PREFIX,
    MAX_FILE_NAME_CHARS,
    MAX_PIECE_BYTES,
    FilePort,
    file_not_found,
)
from weft.kernel.clock import Clock
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, is_token, new_id
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import stamp_of
from weft.sql.moments import BoundedMoment, bring_back

REMOVED_AT_ONCE = 16
"""Chunks that one transaction deletes; other writes run in between."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Files of a tenant, including those being uploaded."""

    count: int
    size: int
    """Bytes."""


class FileChunk(NamedTuple):
    """Consecutive bytes of a file."""

    place: int
    """Its number, counted from 0."""
    data: bytes


async def is_kept(connection: AsyncConnection, tenant: str, file_id: str, purpose: str) -> bool:
    """Whether a tenant has a file of this id and purpose."""
    found = (await connection.execute(statements.FILE, {"the_id": file_id, "the_tenant": tenant})).first()
    return found is not None and found.purpose == purpose


def _usage_of(row: Row[tuple[Any, ...]] | None, *, further: int = 0) -> Usage:
    """Returns the usage of a tenant and `further` bytes."""
    assert row is not None, "a count without groups is one row"
    return Usage(row.number, int(row.bytes) + further)


def _file_of(row: Row[tuple[Any, ...]]) -> file_pb.File:
    return file_pb.File(
        id=row.id,
        tenant=row.tenant,
        name=row.name,
        purpose=row.purpose,
        byte_count=row.size,
        create_time=stamp_of(row.created_at),
        expire_time=stamp_of(row.expires_at),
    )


MAX_LISTED = 1_000
MAX_UPLOADS = 64
"""Concurrent uploads; two chunks of each are held in memory at most."""
SWEPT_AT_ONCE = 100
_PURPOSES = (BATCH_INPUT, BATCH_OUTPUT)


class FileManager(FilePort):
    """The file port of a router, with the quotas of tenants."""

    def __init__(self, database: RouterDatabase, limits: BatchLimits, clock: Clock) -> None:
        self._database = database
        self._limits = limits
        self._clock = clock
        self._uploads = Uploads("files", MAX_UPLOADS)

    async def save(self, new: file_pb.File, content: AsyncIterator[bytes]) -> file_pb.File:
        """Stores a file. Also raises INVALID_ARGUMENT, and DEADLINE_EXCEEDED if the upload is not complete in time."""
        _check(new)
        file_id, now = new_id(FILE_PREFIX), self._now()
        async with self._uploads.slot(lambda: self._remove(file_id)):
            self._require_room(await self._begin(file_id, new, now))
            return await self._receive(new, file_id, content)

    @override
    async def get(self, tenant: str, file_id: str) -> file_pb.File:
        return _file_of(await self._row(tenant, file_id))

    async def list_page(
        self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100
    ) -> file_pb.ListFilesResponse:
        """Returns a page of files. Also raises INVALID_ARGUMENT."""
        if not 1 <= limit <= MAX_LISTED:
            raise invalid_field("limit", f"must be 1 to {MAX_LISTED}")
        if purpose and purpose not in _PURPOSES:
            raise invalid_field("purpose", f"must be one of {', '.join(_PURPOSES)}")
        before = (await self._row(tenant, after)).seq if after else None
        page = statements.files_page(before, purpose)
        found = await self._database.rows(page, the_tenant=tenant, the_limit=limit + 1)
        return file_pb.ListFilesResponse(files=map(_file_of, found[:limit]), has_more=len(found) > limit)

    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        """Yields the content. NOT_FOUND may also come in the middle, if the file is deleted meanwhile."""
        left, place = (await self.get(tenant, file_id)).byte_count, 0
        while left > 0:
            piece = await self._database.first(statements.FILE_PIECE, the_id=file_id, the_place=place)
            if piece is None or not piece.data:
                raise file_not_found(file_id)
            yield piece.data
            left, place = left - len(piece.data), place + 1

    async def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file: it is hidden at once, and its chunks are deleted in several transactions."""
        is_id = is_token(file_id, MAX_REQUEST_ID_CHARS)
        if not is_id or not await self._database.change(statements.HIDE_FILE, the_id=file_id, the_tenant=tenant):
            raise file_not_found(file_id)
        await self._remove(file_id)

    async def sweep(self, *, all_incomplete: bool = False) -> None:
        """Purges expired and incomplete files.

        `all_incomplete`: every incomplete file is abandoned, because only this router uploads and it just started.
        """
        now = self._now()
        while await self._bring_back(now):
            pass
        await self._database.change(statements.HIDE_EXPIRED_FILES, the_time=now)
        before = now if all_incomplete else now - UPLOAD_LIMIT_SECONDS
        more = True
        while more:
            found = await self._database.rows(
                statements.INCOMPLETE_FILES, the_begin=before, the_time=now, the_limit=SWEPT_AT_ONCE
            )
            for row in found:
                await self._remove(row.id)
            more = len(found) == SWEPT_AT_ONCE

    async def stop(self, grace_seconds: float) -> None:
        """Waits for the removal of failed uploads."""
        await self._uploads.stop(grace_seconds)

    async def _receive(self, new: file_pb.File, file_id: str, content: AsyncIterator[bytes]) -> file_pb.File:
        file, size = None, 0
        async with aclosing(_chunks(content)) as chunks:
            async for chunk, is_last in chunks:
                size += len(chunk.data)
                if new.purpose == BATCH_INPUT:
                    # Result files are not limited: a batch whose results do not fit would never finish.
                    self._require_size(size)
                usage = await self._database.first(statements.FILE_USAGE, the_tenant=new.tenant)
                self._require_room(_usage_of(usage, further=len(chunk.data)))
                file = await self._append(file_id, chunk, is_last=is_last)
        assert file is not None, "there is always a last chunk"
        return file

    async def _row(self, tenant: str, file_id: str) -> Row[tuple[Any, ...]]:
        """Returns the row of a complete file. Raises NOT_FOUND."""
        found = None
        if is_token(file_id, MAX_REQUEST_ID_CHARS):
            found = await self._database.first(statements.FILE, the_id=file_id, the_tenant=tenant)
        if found is None:
            raise file_not_found(file_id)
        return found

    async def _begin(self, file_id: str, new: file_pb.File, now: float) -> Usage:
        """Inserts an incomplete file; returns the usage of its tenant, this file included."""
        values = {
            "id": file_id,
            "tenant": new.tenant,
            "name": new.name,
            "purpose": new.purpose,
            "size": 0,
            "created_at": now,
            "expires_at": now + self._limits.keep_file_seconds,
            "is_whole": False,
        }
        async with self._database.writing() as connection:
            await connection.execute(statements.BEGIN_FILE, values)
            return _usage_of((await connection.execute(statements.FILE_USAGE, {"the_tenant": new.tenant})).first())

    async def _append(self, file_id: str, chunk: FileChunk, *, is_last: bool) -> file_pb.File:
        """Appends a chunk to an incomplete file; the last one completes it. Raises DEADLINE_EXCEEDED if it is gone."""
        values = {"the_id": file_id, "the_length": len(chunk.data), "the_end": is_last}
        async with self._database.writing() as connection:
            found = (await connection.execute(statements.EXTEND_FILE, values)).first()
            if found is None:
                raise upload_timed_out("file")
            if chunk.data:
                piece = {"file_id": file_id, "place": chunk.place, "data": chunk.data}
                await connection.execute(statements.ADD_FILE_PIECE, piece)
            return _file_of(found)

    async def _remove(self, file_id: str) -> None:
        """Deletes an incomplete file, some chunks at a time; a complete one stays."""
        some = {"the_id": file_id, "the_limit": REMOVED_AT_ONCE}
        more = True
        while more:
            async with self._database.writing() as connection:
                if (await connection.execute(statements.LOCK_INCOMPLETE_FILE, {"the_id": file_id})).first() is None:
                    return
                more = (await connection.execute(statements.DELETE_FILE_PIECES, some)).rowcount == REMOVED_AT_ONCE
                if not more:
                    await connection.execute(statements.DELETE_FILE, {"the_id": file_id})

    async def _bring_back(self, now: float) -> int:
        """Moves creation times in the future, from before a clock was set back, to now; returns how many."""
        made = BoundedMoment(
            key=files.c.seq, column=files.c.created_at, latest=now, where=true(), along=(files.c.expires_at,)
        )
        async with self._database.writing() as connection:
            return await bring_back(connection, [made], SWEPT_AT_ONCE)

    def _require_size(self, size: int) -> None:
        if size > self._limits.max_file_bytes:
            raise FieldError("file", f"must have at most {self._limits.max_file_bytes} bytes", Reason.REQUEST_TOO_LARGE)

    def _require_room(self, usage: Usage) -> None:
        """Raises TOO_MANY_RESOURCES if the usage exceeds the tenant's quota."""
        limits = self._limits
        if usage.count > limits.max_files_per_tenant:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the tenant has {limits.max_files_per_tenant} files, its limit; delete some",
            )
        if usage.size > limits.max_tenant_file_bytes:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the tenant has {limits.max_tenant_file_bytes} bytes of files, its limit; delete some",
            )

    def _now(self) -> float:
        return self._clock.utc_now().timestamp()


def _check(new: file_pb.File) -> None:
    name = new.name
    if not 1 <= len(name) <= MAX_FILE_NAME_CHARS or not name.isprintable():
        raise invalid_field("file.name", f"must be 1 to {MAX_FILE_NAME_CHARS} printable characters")
    if "/" in name or "\\" in name or name in {".", ".."}:
        # A download may be written to a folder under this name.
        raise invalid_field("file.name", "must be a name, not a path")
    if new.purpose not in _PURPOSES:
        raise invalid_field("file.purpose", f"must be one of {', '.join(_PURPOSES)}")


async def _chunks(content: AsyncIterator[bytes]) -> AsyncGenerator[tuple[FileChunk, bool]]:
    """Yields the content in chunks of MAX_PIECE_BYTES, each with whether it is the last one."""
    buffer, place = bytearray(), 0
    async for data in content:
        buffer += data
        while len(buffer) > MAX_PIECE_BYTES:
            yield FileChunk(place, bytes(buffer[:MAX_PIECE_BYTES])), False
            del buffer[:MAX_PIECE_BYTES]
            place += 1
    yield FileChunk(place, bytes(buffer)), True
