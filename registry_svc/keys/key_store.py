"""The store of API keys: its port, and its implementation on SQL."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Row, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection
from typing_extensions import override

from registry_svc.keys.domain import ApiKey
from registry_svc.store.database import Transactions
from registry_svc.store.schema import api_keys, key_pepper


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKeys:
    """Everything on disk."""

    keys: tuple[ApiKey, ...] = ()
    """In order of their ids."""
    pepper_mark: bytes = b""
    """Mark of the pepper that the digests were made with, see `pepper_mark`; empty: none was used."""


class KeyStore(Protocol):
    """Store of API keys: digests, never secrets.

    Every write is one transaction that is on disk when the call returns. All methods raise SERVICE_UNAVAILABLE when the
    database fails; then nothing was written, unless the acknowledgement of the commit was lost.
    """

    async def load(self) -> StoredKeys:
        """Everything there is."""
        ...

    async def save(self, keys: Sequence[ApiKey]) -> None:
        """Keep these; one of the same id is replaced. All of them, or none."""
        ...

    async def delete(self, key_ids: Sequence[str]) -> None:
        """Delete these keys; unknown ids are ignored."""
        ...

    async def save_pepper_mark(self, mark: bytes, revoked: Sequence[ApiKey] = ()) -> None:
        """Store the mark of the pepper in use, together with the keys that it revokes."""
        ...


_MARK_ID = 1
# Databases limit the parameters of one statement, see sql.py.
MAX_IDS_PER_STATEMENT = 1_000


class SqlKeyStore(KeyStore):
    """See KeyStore."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    @override
    async def load(self) -> StoredKeys:
        async with self._transactions.transaction() as connection:
            rows = (await connection.execute(select(api_keys))).all()
            mark = (await connection.execute(select(key_pepper.c.mark))).scalar_one_or_none()
        # Not ORDER BY: PostgreSQL sorts by the language of the database.
        keys = sorted((_key_of(row) for row in rows), key=lambda key: key.id)
        return StoredKeys(keys=tuple(keys), pepper_mark=bytes(mark or b""))

    @override
    async def save(self, keys: Sequence[ApiKey]) -> None:
        async with self._transactions.transaction() as connection:
            await _save(connection, keys)

    @override
    async def delete(self, key_ids: Sequence[str]) -> None:
        async with self._transactions.transaction() as connection:
            await _delete(connection, key_ids)

    @override
    async def save_pepper_mark(self, mark: bytes, revoked: Sequence[ApiKey] = ()) -> None:
        async with self._transactions.transaction() as connection:
            await connection.execute(delete(key_pepper))
            await connection.execute(insert(key_pepper), [{"id": _MARK_ID, "mark": mark}])
            await _save(connection, revoked)


async def _save(connection: AsyncConnection, keys: Sequence[ApiKey]) -> None:
    await _delete(connection, [key.id for key in keys])
    if keys:
        await connection.execute(insert(api_keys), [_row_of(key) for key in keys])


async def _delete(connection: AsyncConnection, key_ids: Sequence[str]) -> None:
    for start in range(0, len(key_ids), MAX_IDS_PER_STATEMENT):
        some = key_ids[start : start + MAX_IDS_PER_STATEMENT]
        await connection.execute(delete(api_keys).where(api_keys.c.id.in_(some)))


def _row_of(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "description": key.description,
        "tenant": key.tenant,
        "scopes": json.dumps(list(key.scopes)),
        "digest": key.digest,
        "previous_digest": key.previous_digest,
        "previous_expires_at": key.previous_expires_at,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "rotated_at": key.rotated_at,
    }


def _key_of(row: Row[Any]) -> ApiKey:
    return ApiKey(
        id=row.id,
        description=row.description,
        tenant=row.tenant,
        scopes=tuple(json.loads(row.scopes)),
        digest=bytes(row.digest),
        previous_digest=bytes(row.previous_digest),
        previous_expires_at=row.previous_expires_at,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        rotated_at=row.rotated_at,
    )
