"""Encrypted secrets and their SQL store."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime

from weft.sql.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSecret:
    """An encrypted secret, with the columns of `secrets`."""

    name: str
    version: int
    """Number of its value, from 1."""
    key_id: str
    """The key that it is encrypted with."""
    sealed: bytes = field(repr=False)
    created_at: datetime
    updated_at: datetime
    """When it got its current value."""


class SqlSecretStore:
    """Stores encrypted secrets. Writes are durable when the call returns.

    All methods raise SERVICE_UNAVAILABLE if the database fails; then nothing was written, unless the acknowledgement of
    the commit was lost.
    """

    def __init__(self, database: Store) -> None:
        self._database = database

    async def load(self) -> tuple[StoredSecret, ...]:
        """Returns all secrets, sorted by name."""
        rows = await self._database.read(lambda tx: tx.rows("SELECT * FROM secrets"))
        # Not with ORDER BY: PostgreSQL sorts by the locale of the database.
        return tuple(sorted((StoredSecret(**row._asdict()) for row in rows), key=lambda secret: secret.name))

    async def save(self, changed: Sequence[StoredSecret]) -> None:
        """Stores or replaces secrets, all or none."""
        if not changed:
            return
        rows = [asdict(secret) for secret in changed]
        await self._database.run(lambda tx: tx.replace("secrets", "name", *rows))

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes secrets. Ignores unknown names."""
        await self._database.run(lambda tx: tx.delete("secrets", "name", names))
