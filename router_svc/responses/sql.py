"""Answers on SQL. Nothing here decides anything: see `keeper`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Row, delete, func, insert, select, true, update

from router_svc.store.database import RouterDatabase
from router_svc.store.tables import responses
from weft.durable.responses import MAX_CHAIN, StoredResponse
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.sql.moments import BoundedMoment, bring_back


@dataclass(frozen=True, slots=True)
class Kept:
    """How much a tenant keeps."""

    count: int = 0
    size: int = 0
    """Bytes."""


class ResponseTable:
    """See `weft.durable.responses.ResponseStore`; every method raises SERVICE_UNAVAILABLE."""

    def __init__(self, database: RouterDatabase) -> None:
        self._database = database

    async def save(self, response: StoredResponse) -> Kept:
        """Keep it, instead of one of the same id; returns by how much the tenant keeps more.

        Raises ALREADY_EXISTS where the id is another tenant's.
        """
        values, size = _values(response), _size_of(response)
        async with self._database.writing() as connection:
            query = select(responses.c.tenant, responses.c.size).where(responses.c.id == response.id)
            found = (await connection.execute(query)).first()
            if found is None:
                await connection.execute(insert(responses), values)
                return Kept(1, size)
            if found.tenant != response.tenant:
                raise WeftError(Reason.ALREADY_EXISTS, "a response of this id exists")
            await connection.execute(update(responses).where(responses.c.id == response.id), values)
            return Kept(0, size - found.size)

    async def size_of(self, tenant: str, response_id: str) -> int | None:
        """Bytes of one answer; None: the tenant has none of this id."""
        query = select(responses.c.size).where(responses.c.id == response_id, responses.c.tenant == tenant)
        async with self._database.reading() as connection:
            size: int | None = (await connection.execute(query)).scalar_one_or_none()
            return size

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """One answer."""
        query = select(responses).where(responses.c.id == response_id, responses.c.tenant == tenant)
        async with self._database.reading() as connection:
            found = (await connection.execute(query)).first()
        return None if found is None else _response_of(found)

    async def chain(self, tenant: str, response_id: str) -> Sequence[tuple[str, int]] | None:
        """Ids and bytes of it and of what it continues, the newest first, one more than MAX_CHAIN at most.

        None where one of them is gone.
        """
        found: list[tuple[str, int]] = []
        wanted = response_id
        async with self._database.reading() as connection:
            while wanted and len(found) <= MAX_CHAIN:
                query = select(responses.c.previous_id, responses.c.size).where(
                    responses.c.id == wanted, responses.c.tenant == tenant
                )
                row = (await connection.execute(query)).first()
                if row is None:
                    return None
                found.append((wanted, row.size))
                wanted = row.previous_id
        return found

    async def delete(self, tenant: str, response_id: str) -> int | None:
        """Forget it; returns its bytes, None where there was none."""
        query = select(responses.c.size).where(responses.c.id == response_id, responses.c.tenant == tenant)
        async with self._database.writing() as connection:
            size: int | None = (await connection.execute(query)).scalar_one_or_none()
            if size is not None:
                await connection.execute(delete(responses).where(responses.c.id == response_id))
            return size

    async def bring_back(self, now: datetime, limit: int) -> int:
        """Answers made later than now, before a clock was set back, were made now; how many, at most `limit`."""
        made = BoundedMoment(key=responses.c.id, column=responses.c.created_at, latest=now, where=true())
        async with self._database.writing() as connection:
            return await bring_back(connection, [made], limit)

    async def forget_before(self, moment: datetime) -> int:
        """Forget the answers made before it; returns how many they were."""
        async with self._database.writing() as connection:
            done = await connection.execute(delete(responses).where(responses.c.created_at < moment))
            return done.rowcount

    async def kept(self) -> Mapping[str, Kept]:
        """How much each tenant keeps."""
        query = select(responses.c.tenant, func.count(), func.sum(responses.c.size)).group_by(responses.c.tenant)
        async with self._database.reading() as connection:
            return {tenant: Kept(count, int(size)) for tenant, count, size in await connection.execute(query)}


def _values(response: StoredResponse) -> dict[str, object]:
    return {
        "id": response.id,
        "tenant": response.tenant,
        "previous_id": response.previous_id,
        "created_at": response.created_at,
        "size": _size_of(response),
        "body": response.body,
        "items": response.items,
    }


def _size_of(response: StoredResponse) -> int:
    return len(response.body) + len(response.items)


def _response_of(row: Row[tuple[object, ...]]) -> StoredResponse:
    created = row.created_at
    return StoredResponse(
        id=row.id,
        tenant=row.tenant,
        previous_id=row.previous_id,
        # SQLite keeps no zone; what was written is UTC.
        created_at=created if created.tzinfo else created.replace(tzinfo=UTC),
        body=row.body,
        items=row.items,
    )
