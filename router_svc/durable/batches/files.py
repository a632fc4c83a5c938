"""Files: the table on SQL, and the manager with the quotas, uploads in chunks, and the removal of incomplete files.

Every method of the table raises SERVICE_UNAVAILABLE. An incomplete file is not visible: it is being uploaded, its
upload failed, or it is being deleted.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Row, Select, delete, false, func, insert, or_, select, true, update
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from router_svc.durable.batches.uploads import UPLOAD_LIMIT_SECONDS, Uploads, upload_timed_out
from router_svc.durable.limits import BatchLimits
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import file_pieces, files
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


class FileTable:
    """The tables of files."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database

    async def usage(self, tenant: str) -> Usage:
        """Returns the count and the bytes of a tenant's files."""
        async with self._database.reading() as connection:
            return await _usage(connection, tenant)

    async def begin(self, file_id: str, new: file_pb.File, now: float, expires_at: float) -> Usage:
        """Inserts an incomplete file; returns the usage of its tenant, this file included."""
        values = {
            "id": file_id,
            "tenant": new.tenant,
            "name": new.name,
            "purpose": new.purpose,
            "size": 0,
            "created_at": now,
            "expires_at": expires_at,
            "is_whole": False,
        }
        async with self._database.writing() as connection:
            await connection.execute(insert(files), values)
            return await _usage(connection, new.tenant)

    async def append(self, file_id: str, chunk: FileChunk, *, is_last: bool) -> file_pb.File | None:
        """Appends a chunk to an incomplete file; the last one completes it. None: the file was removed."""
        async with self._database.writing() as connection:
            done = await connection.execute(
                update(files)
                .where(files.c.id == file_id, files.c.is_whole == false())
                .values(size=files.c.size + len(chunk.data), is_whole=is_last)
            )
            if not done.rowcount:
                return None
            if chunk.data:
                values = {"file_id": file_id, "place": chunk.place, "data": chunk.data}
                await connection.execute(insert(file_pieces), values)
            found = (await connection.execute(select(files).where(files.c.id == file_id))).one()
            return _file_of(found)

    async def get(self, tenant: str, file_id: str) -> file_pb.File | None:
        """Returns a complete file."""
        async with self._database.reading() as connection:
            found = (await connection.execute(_one(tenant, file_id))).first()
        return None if found is None else _file_of(found)

    async def list_page(self, tenant: str, purpose: str, after: str, limit: int) -> Sequence[file_pb.File] | None:
        """Returns files, newest first, of a purpose (empty: any), older than `after` (empty: all).

        None: the tenant has no file `after`.
        """
        query = select(files).where(files.c.tenant == tenant, files.c.is_whole == true())
        async with self._database.reading() as connection:
            if after:
                place = (await connection.execute(_one(tenant, after))).first()
                if place is None:
                    return None
                query = query.where(files.c.seq < place.seq)
            if purpose:
                query = query.where(files.c.purpose == purpose)
            found = await connection.execute(query.order_by(files.c.seq.desc()).limit(limit))
            return [_file_of(row) for row in found]

    async def chunk(self, file_id: str, place: int) -> bytes | None:
        """Returns a chunk of a file; None: there is none."""
        query = select(file_pieces.c.data).where(file_pieces.c.file_id == file_id, file_pieces.c.place == place)
        async with self._database.reading() as connection:
            data: bytes | None = (await connection.execute(query)).scalar_one_or_none()
            return data

    async def hide(self, tenant: str, file_id: str) -> bool:
        """Marks a file as incomplete, which hides it; returns whether it was there."""
        async with self._database.writing() as connection:
            done = await connection.execute(
                update(files)
                .where(files.c.id == file_id, files.c.tenant == tenant, files.c.is_whole == true())
                .values(is_whole=False)
            )
            return done.rowcount > 0

    async def bring_back(self, now: float, limit: int) -> int:
        """Moves creation times in the future, from before a clock was set back, to now; returns how many."""
        made = BoundedMoment(
            key=files.c.seq, column=files.c.created_at, latest=now, where=true(), along=(files.c.expires_at,)
        )
        async with self._database.writing() as connection:
            return await bring_back(connection, [made], limit)

    async def hide_expired(self, now: float) -> int:
        """Hides expired files; returns how many."""
        async with self._database.writing() as connection:
            done = await connection.execute(
                update(files).where(files.c.expires_at <= now, files.c.is_whole == true()).values(is_whole=False)
            )
            return done.rowcount

    async def incomplete(self, before: float, now: float, limit: int) -> Sequence[str]:
        """Returns ids of incomplete files that were begun before a time or are expired, oldest first."""
        query = (
            select(files.c.id)
            .where(files.c.is_whole == false(), or_(files.c.created_at < before, files.c.expires_at <= now))
            .order_by(files.c.seq)
            .limit(limit)
        )
        async with self._database.reading() as connection:
            return [row.id for row in await connection.execute(query)]

    async def remove(self, file_id: str) -> None:
        """Deletes an incomplete file, some chunks at a time; a complete one stays."""
        incomplete = select(files.c.id).where(files.c.id == file_id, files.c.is_whole == false())
        some = (
            select(file_pieces.c.place)
            .where(file_pieces.c.file_id == file_id)
            .order_by(file_pieces.c.place)
            .limit(REMOVED_AT_ONCE)
        )
        more = True
        while more:
            async with self._database.writing() as connection:
                if (await connection.execute(incomplete.with_for_update())).first() is None:
                    return
                done = await connection.execute(
                    delete(file_pieces).where(file_pieces.c.file_id == file_id, file_pieces.c.place.in_(some))
                )
                more = done.rowcount == REMOVED_AT_ONCE
                if not more:
                    await connection.execute(delete(files).where(files.c.id == file_id))


async def is_kept(connection: AsyncConnection, tenant: str, file_id: str, purpose: str) -> bool:
    """Whether a tenant has a file of this id and purpose."""
    found = (await connection.execute(_one(tenant, file_id))).first()
    return found is not None and found.purpose == purpose


def _one(tenant: str, file_id: str) -> Select[tuple[object, ...]]:
    return select(files).where(files.c.id == file_id, files.c.tenant == tenant, files.c.is_whole == true())


async def _usage(connection: AsyncConnection, tenant: str) -> Usage:
    query = select(func.count(), func.coalesce(func.sum(files.c.size), 0)).where(files.c.tenant == tenant)
    count, size = (await connection.execute(query)).one()
    return Usage(count, int(size))


def _file_of(row: Row[tuple[object, ...]]) -> file_pb.File:
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

    def __init__(self, table: FileTable, limits: BatchLimits, clock: Clock) -> None:
        self._table = table
        self._limits = limits
        self._clock = clock
        self._uploads = Uploads("files", MAX_UPLOADS)

    async def save(self, new: file_pb.File, content: AsyncIterator[bytes]) -> file_pb.File:
        """Stores a file. Also raises INVALID_ARGUMENT, and DEADLINE_EXCEEDED if the upload is not complete in time."""
        _check(new)
        file_id, now = new_id(FILE_PREFIX), self._now()
        async with self._uploads.slot(lambda: self._table.remove(file_id)):
            usage = await self._table.begin(file_id, new, now, now + self._limits.keep_file_seconds)
            self._require_room(usage)
            return await self._receive(new, file_id, content)

    @override
    async def get(self, tenant: str, file_id: str) -> file_pb.File:
        found = await self._table.get(tenant, file_id) if is_token(file_id, MAX_REQUEST_ID_CHARS) else None
        if found is None:
            raise file_not_found(file_id)
        return found

    async def list_page(
        self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100
    ) -> file_pb.ListFilesResponse:
        """Returns a page of files. Also raises INVALID_ARGUMENT."""
        if not 1 <= limit <= MAX_LISTED:
            raise invalid_field("limit", f"must be 1 to {MAX_LISTED}")
        if purpose and purpose not in _PURPOSES:
            raise invalid_field("purpose", f"must be one of {', '.join(_PURPOSES)}")
        if after and not is_token(after, MAX_REQUEST_ID_CHARS):
            raise file_not_found(after)
        found = await self._table.list_page(tenant, purpose, after, limit + 1)
        if found is None:
            raise file_not_found(after)
        return file_pb.ListFilesResponse(files=found[:limit], has_more=len(found) > limit)

    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        """Yields the content. NOT_FOUND may also come in the middle, if the file is deleted meanwhile."""
        left, place = (await self.get(tenant, file_id)).byte_count, 0
        while left > 0:
            data = await self._table.chunk(file_id, place)
            if not data:
                raise file_not_found(file_id)
            yield data
            left, place = left - len(data), place + 1

    async def delete(self, tenant: str, file_id: str) -> None:
        """Deletes a file: it is hidden at once, and its chunks are deleted in several transactions."""
        if not is_token(file_id, MAX_REQUEST_ID_CHARS) or not await self._table.hide(tenant, file_id):
            raise file_not_found(file_id)
        await self._table.remove(file_id)

    async def sweep(self, *, all_incomplete: bool = False) -> None:
        """Purges expired and incomplete files.

        `all_incomplete`: every incomplete file is abandoned, because only this router uploads and it just started.
        """
        now = self._now()
        while await self._table.bring_back(now, SWEPT_AT_ONCE):
            pass
        await self._table.hide_expired(now)
        before = now if all_incomplete else now - UPLOAD_LIMIT_SECONDS
        more = True
        while more:
            found = await self._table.incomplete(before, now, SWEPT_AT_ONCE)
            for file_id in found:
                await self._table.remove(file_id)
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
                usage = await self._table.usage(new.tenant)
                self._require_room(Usage(usage.count, usage.size + len(chunk.data)))
                file = await self._table.append(file_id, chunk, is_last=is_last)
                if file is None:
                    raise upload_timed_out("file")
        assert file is not None, "there is always a last chunk"
        return file

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
