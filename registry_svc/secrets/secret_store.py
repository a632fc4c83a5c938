"""Secrets as records, and their store, on SQL."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from registry_svc.secrets.cipher import Sealed
from weft.sql.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSecret:
    """A secret, encrypted."""

    name: str
    version: int
    """Counts its values, from 1."""
    sealed: Sealed
    created_at: datetime
    updated_at: datetime
    """When it got its present value."""


class SqlSecretStore:
    """Store of encrypted secrets.

    Every write is one transaction that is on disk when the call returns. All methods raise SERVICE_UNAVAILABLE when the
    database fails; then nothing was written, unless the acknowledgement of the commit was lost.
    """

    def __init__(self, database: Store) -> None:
        self._database = database

    async def load(self) -> tuple[StoredSecret, ...]:
        """Returns all secrets by name."""
        rows = await self._database.read(lambda tx: tx.rows("SELECT * FROM secrets"))
        found = (
            StoredSecret(
                name=row.name,
                version=row.version,
                sealed=Sealed(row.key_id, row.sealed),
                created_at=row.created_at,
                updated_at=row.updated_at,
            )
            for row in rows
        )
        # Not ORDER BY: PostgreSQL sorts by the language of the database.
        return tuple(sorted(found, key=lambda secret: secret.name))

    async def save(self, changed: Sequence[StoredSecret]) -> None:
        """Stores these; one of the same name is replaced. All of them, or none."""
        if not changed:
            return
        rows = [
            {
                "name": secret.name,
                "version": secret.version,
                "key_id": secret.sealed.key_id,
                "sealed": secret.sealed.data,
                "created_at": secret.created_at,
                "updated_at": secret.updated_at,
            }
            for secret in changed
        ]
        await self._database.run(lambda tx: tx.replace("secrets", "name", *rows))

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these; unknown names are ignored."""
        await self._database.run(lambda tx: tx.delete("secrets", "name", names))
