"""Files on SQL. Nothing here decides anything: see `file_keeper`.

Every method raises SERVICE_UNAVAILABLE. A file that is not whole is seen by nobody: it is being uploaded, its upload
broke off, or it is being deleted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Row, Select, delete, false, func, insert, or_, select, true, update
from sqlalchemy.ext.asyncio import AsyncConnection

from router_svc.store.database import RouterDatabase
from router_svc.store.tables import file_pieces, files
from router_svc.tasks.rows import utc
from weft.durable.files import NewFile, StoredFile
from weft.sql.moments import BoundedMoment, bring_back

REMOVED_AT_ONCE = 16
"""Pieces that one transaction deletes: others have their turn in between."""


@dataclass(frozen=True, slots=True)
class Kept:
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

    async def kept(self, tenant: str) -> Kept:
        """How much a tenant keeps."""
        async with self._database.reading() as connection:
            return await _kept(connection, tenant)

    async def begin(self, file_id: str, new: NewFile, now: float, expires_at: float) -> Kept:
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


async def _kept(connection: AsyncConnection, tenant: str) -> Kept:
    query = select(func.count(), func.coalesce(func.sum(files.c.size), 0)).where(files.c.tenant == tenant)
    count, size = (await connection.execute(query)).one()
    return Kept(count, int(size))


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
