"""Who keeps files: the limits around the table, uploads cut into pieces, and what broke off forgotten."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from router_svc.batches.config import BatchLimits
from router_svc.batches.file_sql import FileTable, Kept, Piece
from router_svc.batches.intake import INTAKE_LIMIT_SECONDS, Intakes, came_too_slowly
from weft.durable.files import (
    BATCH_INPUT,
    BATCH_OUTPUT,
    FILE_PREFIX,
    MAX_FILE_NAME_CHARS,
    MAX_PIECE_BYTES,
    FilePage,
    NewFile,
    StoredFile,
    file_not_found,
)
from weft.kernel.clock import Clock
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, is_token, new_id
from weft.kernel.reasons import Reason

MAX_LISTED = 1_000
MAX_UPLOADS = 64
"""Files that come in at once; of each, two pieces are held at most."""
SWEPT_AT_ONCE = 100
_PURPOSES = (BATCH_INPUT, BATCH_OUTPUT)


class FileKeeper:
    """See `weft.durable.files.FilePort`."""

    def __init__(self, table: FileTable, limits: BatchLimits, clock: Clock) -> None:
        self._table = table
        self._limits = limits
        self._clock = clock
        self._uploads = Intakes("files", MAX_UPLOADS)

    async def save(self, new: NewFile, content: AsyncIterator[bytes]) -> StoredFile:
        """See FilePort.save. Raises INVALID_ARGUMENT, too, and DEADLINE_EXCEEDED where it does not come to its end."""
        _check(new)
        file_id, now = new_id(FILE_PREFIX), self._now()
        async with self._uploads.one(lambda: self._table.remove(file_id)):
            kept = await self._table.begin(file_id, new, now, now + self._limits.keep_file_seconds)
            self._require_room(kept)
            return await self._take_in(new, file_id, content)

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        """See FilePort.get."""
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
                self._require_room(Kept(kept.count, kept.size + len(piece.data)))
                file = await self._table.append(file_id, piece, is_last=is_last)
                if file is None:
                    raise came_too_slowly("file")
        assert file is not None, "there is always a last piece"
        return file

    def _require_size(self, size: int) -> None:
        if size > self._limits.max_file_bytes:
            raise FieldError("file", f"must have at most {self._limits.max_file_bytes} bytes", Reason.REQUEST_TOO_LARGE)

    def _require_room(self, kept: Kept) -> None:
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
