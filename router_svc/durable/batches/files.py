"""Who keeps files: the limits around the table, uploads cut into pieces, and what broke off forgotten."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Row, Select, delete, false, func, insert, or_, select, true, update
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from router_svc.durable.batches.config import BatchLimits
from router_svc.durable.batches.uploads import INTAKE_LIMIT_SECONDS, Uploads, upload_timed_out
from router_svc.durable.tasks.sql_rows import utc
from router_svc.store.database import RouterDatabase
from router_svc.store.tables import file_pieces, files
from weft.durable.files import (
    BATCH_INPUT,
    BATCH_OUTPUT,
    FILE_PREFIX,
    MAX_FILE_NAME_CHARS,
    MAX_PIECE_BYTES,
    FilePage,
    FilePort,
    NewFile,
    StoredFile,
    file_not_found,
)
from weft.kernel.clock import Clock
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, is_token, new_id
from weft.kernel.reasons import Reason
from weft.sql.moments import BoundedMoment, bring_back

REMOVED_AT_ONCE = 16
"""Pieces that one transaction deletes: others have their turn in between."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How much a tenant keeps, what is being uploaded included."""

    count: int
    size: int
    """Bytes."""


class Piece(NamedTuple):
    """What continues a file."""

    place: int
    """Which one it is, counted from 0."""
    data: bytes


class FileTable:
    """The tables of files."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database

    async def kept(self, tenant: str) -> Usage:
        """How much a tenant keeps."""
        async with self._database.reading() as connection:
            return await _kept(connection, tenant)

    async def begin(self, file_id: str, new: NewFile, now: float, expires_at: float) -> Usage:
        """A file that is not whole; returns what its tenant keeps with it."""
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
            return await _kept(connection, new.tenant)

    async def append(self, file_id: str, piece: Piece, *, is_last: bool) -> StoredFile | None:
        """What continues a file that is not whole, and with the last piece is. None: the file is gone."""
        async with self._database.writing() as connection:
            done = await connection.execute(
                update(files)
                .where(files.c.id == file_id, files.c.is_whole == false())
                .values(size=files.c.size + len(piece.data), is_whole=is_last)
            )
            if not done.rowcount:
                return None
            if piece.data:
                values = {"file_id": file_id, "place": piece.place, "data": piece.data}
                await connection.execute(insert(file_pieces), values)
            found = (await connection.execute(select(files).where(files.c.id == file_id))).one()
            return _file_of(found)

    async def get(self, tenant: str, file_id: str) -> StoredFile | None:
        """One file."""
        async with self._database.reading() as connection:
            found = (await connection.execute(_one(tenant, file_id))).first()
        return None if found is None else _file_of(found)

    async def list_page(self, tenant: str, purpose: str, after: str, limit: int) -> Sequence[StoredFile] | None:
        """The newest first, of a purpose (empty: of all), older than one (empty: from the newest on).

        None: the tenant has none of that id.
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

    async def piece(self, file_id: str, place: int) -> bytes | None:
        """One piece of a file; None: it is not there, or no more."""
        query = select(file_pieces.c.data).where(file_pieces.c.file_id == file_id, file_pieces.c.place == place)
        async with self._database.reading() as connection:
            data: bytes | None = (await connection.execute(query)).scalar_one_or_none()
            return data

    async def hide(self, tenant: str, file_id: str) -> bool:
        """Make it one that is not whole, which is over for whoever asks; whether it was there."""
        async with self._database.writing() as connection:
            done = await connection.execute(
                update(files)
                .where(files.c.id == file_id, files.c.tenant == tenant, files.c.is_whole == true())
                .values(is_whole=False)
            )
            return done.rowcount > 0

    async def bring_back(self, now: float, limit: int) -> int:
        """Those that were begun later than now, before a clock was set back, begin now; how many, at most `limit`."""
        made = BoundedMoment(
            key=files.c.seq, column=files.c.created_at, latest=now, where=true(), along=(files.c.expires_at,)
        )
        async with self._database.writing() as connection:
            return await bring_back(connection, [made], limit)

    async def hide_expired(self, now: float) -> int:
        """Hide those whose time is over; how many."""
        async with self._database.writing() as connection:
            done = await connection.execute(
                update(files).where(files.c.expires_at <= now, files.c.is_whole == true()).values(is_whole=False)
            )
            return done.rowcount

    async def broken(self, before: float, now: float, limit: int) -> Sequence[str]:
        """Ids of those that are not whole and were begun before, or whose time is over; the oldest first."""
        query = (
            select(files.c.id)
            .where(files.c.is_whole == false(), or_(files.c.created_at < before, files.c.expires_at <= now))
            .order_by(files.c.seq)
            .limit(limit)
        )
        async with self._database.reading() as connection:
            return [row.id for row in await connection.execute(query)]

    async def remove(self, file_id: str) -> None:
        """Forget one that is not whole, some pieces at a time; one that is whole stays."""
        broken = select(files.c.id).where(files.c.id == file_id, files.c.is_whole == false())
        some = (
            select(file_pieces.c.place)
            .where(file_pieces.c.file_id == file_id)
            .order_by(file_pieces.c.place)
            .limit(REMOVED_AT_ONCE)
        )
        more = True
        while more:
            async with self._database.writing() as connection:
                if (await connection.execute(broken.with_for_update())).first() is None:
                    return
                done = await connection.execute(
                    delete(file_pieces).where(file_pieces.c.file_id == file_id, file_pieces.c.place.in_(some))
                )
                more = done.rowcount == REMOVED_AT_ONCE
                if not more:
                    await connection.execute(delete(files).where(files.c.id == file_id))


async def is_kept(connection: AsyncConnection, tenant: str, file_id: str, purpose: str) -> bool:
    """Whether a tenant keeps a file of this id and purpose."""
    found = (await connection.execute(_one(tenant, file_id))).first()
    return found is not None and found.purpose == purpose


def _one(tenant: str, file_id: str) -> Select[tuple[object, ...]]:
    return select(files).where(files.c.id == file_id, files.c.tenant == tenant, files.c.is_whole == true())


async def _kept(connection: AsyncConnection, tenant: str) -> Usage:
    query = select(func.count(), func.coalesce(func.sum(files.c.size), 0)).where(files.c.tenant == tenant)
    count, size = (await connection.execute(query)).one()
    return Usage(count, int(size))


def _file_of(row: Row[tuple[object, ...]]) -> StoredFile:
    return StoredFile(
        id=row.id,
        tenant=row.tenant,
        name=row.name,
        purpose=row.purpose,
        size=row.size,
        created_at=utc(row.created_at),
        expires_at=utc(row.expires_at),
    )


MAX_LISTED = 1_000
MAX_UPLOADS = 64
"""Files that come in at once; of each, two pieces are held at most."""
SWEPT_AT_ONCE = 100
_PURPOSES = (BATCH_INPUT, BATCH_OUTPUT)


class FileManager(FilePort):
    """See `weft.durable.files.FilePort`."""

    def __init__(self, table: FileTable, limits: BatchLimits, clock: Clock) -> None:
        self._table = table
        self._limits = limits
        self._clock = clock
        self._uploads = Uploads("files", MAX_UPLOADS)

    async def save(self, new: NewFile, content: AsyncIterator[bytes]) -> StoredFile:
        """See FilePort.save. Raises INVALID_ARGUMENT, too, and DEADLINE_EXCEEDED where it does not come to its end."""
        _check(new)
        file_id, now = new_id(FILE_PREFIX), self._now()
        async with self._uploads.one(lambda: self._table.remove(file_id)):
            kept = await self._table.begin(file_id, new, now, now + self._limits.keep_file_seconds)
            self._require_room(kept)
            return await self._take_in(new, file_id, content)

    @override
    async def get(self, tenant: str, file_id: str) -> StoredFile:
        found = await self._table.get(tenant, file_id) if is_token(file_id, MAX_REQUEST_ID_CHARS) else None
        if found is None:
            raise file_not_found(file_id)
        return found

    async def list_page(self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100) -> FilePage:
        """See FilePort.list_page. Raises INVALID_ARGUMENT, too."""
        if not 1 <= limit <= MAX_LISTED:
            raise invalid_field("limit", f"must be 1 to {MAX_LISTED}")
        if purpose and purpose not in _PURPOSES:
            raise invalid_field("purpose", f"must be one of {', '.join(_PURPOSES)}")
        if after and not is_token(after, MAX_REQUEST_ID_CHARS):
            raise file_not_found(after)
        found = await self._table.list_page(tenant, purpose, after, limit + 1)
        if found is None:
            raise file_not_found(after)
        return FilePage(files=found[:limit], has_more=len(found) > limit)

    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        """See FilePort.read. NOT_FOUND comes in the middle, too: where it is deleted meanwhile."""
        left, place = (await self.get(tenant, file_id)).size, 0
        while left > 0:
            data = await self._table.piece(file_id, place)
            if not data:
                raise file_not_found(file_id)
            yield data
            left, place = left - len(data), place + 1

    async def delete(self, tenant: str, file_id: str) -> None:
        """See FilePort.delete. It is over at once; its pieces go one after the other."""
        if not is_token(file_id, MAX_REQUEST_ID_CHARS) or not await self._table.hide(tenant, file_id):
            raise file_not_found(file_id)
        await self._table.remove(file_id)

    async def sweep(self, *, all_broken: bool = False) -> None:
        """Forget what is over, and what broke off. `all_broken`: nobody but this router uploads, and it just began."""
        now = self._now()
        while await self._table.bring_back(now, SWEPT_AT_ONCE):
            pass
        await self._table.hide_expired(now)
        before = now if all_broken else now - INTAKE_LIMIT_SECONDS
        more = True
        while more:
            found = await self._table.broken(before, now, SWEPT_AT_ONCE)
            for file_id in found:
                await self._table.remove(file_id)
            more = len(found) == SWEPT_AT_ONCE

    async def stop(self, grace_seconds: float) -> None:
        """Let go of what broke off."""
        await self._uploads.stop(grace_seconds)

    async def _take_in(self, new: NewFile, file_id: str, content: AsyncIterator[bytes]) -> StoredFile:
        file, size = None, 0
        async with aclosing(_pieces(content)) as pieces:
            async for piece, is_last in pieces:
                size += len(piece.data)
                if new.purpose == BATCH_INPUT:
                    # Answers may be longer than what was asked, and a batch whose answers fit nowhere would never end.
                    self._require_size(size)
                kept = await self._table.kept(new.tenant)
                self._require_room(Usage(kept.count, kept.size + len(piece.data)))
                file = await self._table.append(file_id, piece, is_last=is_last)
                if file is None:
                    raise upload_timed_out("file")
        assert file is not None, "there is always a last piece"
        return file

    def _require_size(self, size: int) -> None:
        if size > self._limits.max_file_bytes:
            raise FieldError("file", f"must have at most {self._limits.max_file_bytes} bytes", Reason.REQUEST_TOO_LARGE)

    def _require_room(self, kept: Usage) -> None:
        """Raises TOO_MANY_RESOURCES where a tenant that keeps so much keeps too much."""
        limits = self._limits
        if kept.count > limits.max_files_per_tenant:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the tenant keeps {limits.max_files_per_tenant} files, as many as it may; delete some",
            )
        if kept.size > limits.max_tenant_file_bytes:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"the tenant keeps {limits.max_tenant_file_bytes} bytes of files, as much as it may; delete some",
            )

    def _now(self) -> float:
        return self._clock.utc_now().timestamp()


def _check(new: NewFile) -> None:
    name = new.name
    if not 1 <= len(name) <= MAX_FILE_NAME_CHARS or not name.isprintable():
        raise invalid_field("file.name", f"must be 1 to {MAX_FILE_NAME_CHARS} printable characters")
    if "/" in name or "\\" in name or name in {".", ".."}:
        # Whoever downloads it may write it to a folder under its name.
        raise invalid_field("file.name", "must be a name, not a path")
    if new.purpose not in _PURPOSES:
        raise invalid_field("file.purpose", f"must be one of {', '.join(_PURPOSES)}")


async def _pieces(content: AsyncIterator[bytes]) -> AsyncGenerator[tuple[Piece, bool]]:
    """The content in pieces of MAX_PIECE_BYTES, each with whether it is the last one."""
    buffer, place = bytearray(), 0
    async for data in content:
        buffer += data
        while len(buffer) > MAX_PIECE_BYTES:
            yield Piece(place, bytes(buffer[:MAX_PIECE_BYTES])), False
            del buffer[:MAX_PIECE_BYTES]
            place += 1
    yield Piece(place, bytes(buffer)), True
