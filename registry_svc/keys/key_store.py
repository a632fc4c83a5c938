"""API keys: record, messages, and SQL store. The columns of `api_keys` are named like the fields."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from weft.api.registry.v1 import key_service_pb2 as pb
from weft.kernel.clock import seconds_ahead
from weft.kernel.principal import KeyVerifier, kept_access
from weft.kernel.timestamps import optional_stamp, stamp_of
from weft.sql.connections import Row, Tx
from weft.sql.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key, without its secret."""

    id: str
    description: str
    tenant: str
    scopes: tuple[str, ...]
    digest: bytes = field(repr=False)
    """Digest of the secret; see `weft.kernel.principal.key_digest`."""
    created_at: datetime
    expires_at: datetime | None = None
    """None: never."""
    revoked_at: datetime | None = None
    rotated_at: datetime | None = None
    """When it last got a new secret; None: never."""
    previous_digest: bytes = field(default=b"", repr=False)
    """Digest of the secret before the last rotation; empty: none is valid."""
    previous_expires_at: datetime | None = None

    def is_good(self, now: datetime) -> bool:
        """Whether the key is valid at `now`."""
        # A revocation is valid regardless of the clock, which may have been set back since.
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def ended_at_or_will(self) -> datetime | None:
        """Returns when it ended or will end; None if it has no expiry."""
        return min((at for at in (self.revoked_at, self.expires_at) if at is not None), default=None)

    def clamped_to_now(self, now: datetime) -> "ApiKey":
        """Returns the key with times in the future corrected, as if it were created or rotated now."""
        made = seconds_ahead(self.created_at, now)
        rotated = timedelta() if self.rotated_at is None else seconds_ahead(self.rotated_at, now)
        if not made and not rotated:
            return self
        return replace(
            self,
            created_at=self.created_at - made,
            expires_at=None if self.expires_at is None else self.expires_at - made,
            rotated_at=None if self.rotated_at is None else self.rotated_at - rotated,
            previous_expires_at=None if self.previous_expires_at is None else self.previous_expires_at - rotated,
        )

    def revoked(self, now: datetime) -> "ApiKey":
        """Returns the key, revoked at `now`."""
        return replace(self, revoked_at=now, previous_digest=b"", previous_expires_at=None)

    def rotated(self, digest: bytes, now: datetime, grace: timedelta) -> "ApiKey":
        """Returns the key with a new secret. The current secret stays valid for `grace`, an older one does not."""
        is_graced = grace > timedelta()
        until = now + grace if self.expires_at is None else min(now + grace, self.expires_at)
        return replace(
            self,
            digest=digest,
            rotated_at=now,
            previous_digest=self.digest if is_graced else b"",
            previous_expires_at=until if is_graced else None,
        )


def verifier_of(key: ApiKey) -> KeyVerifier:
    """Returns what is needed to check a key."""
    return KeyVerifier(
        key_id=key.id,
        tenant=key.tenant,
        access=kept_access(key.scopes),
        digest=key.digest,
        expires_at=key.expires_at,
        previous_digest=key.previous_digest,
        previous_expires_at=key.previous_expires_at,
    )


def key_message(key: ApiKey) -> pb.Key:
    """Returns a key for display, without its digest."""
    return pb.Key(
        id=key.id,
        description=key.description,
        tenant=key.tenant,
        scopes=key.scopes,
        create_time=stamp_of(key.created_at),
        expire_time=optional_stamp(key.expires_at),
        revoke_time=optional_stamp(key.revoked_at),
        rotate_time=optional_stamp(key.rotated_at),
    )


def verifier_message(key: ApiKey) -> pb.KeyVerifier:
    """Returns what services of the mesh need to check a key."""
    return pb.KeyVerifier(
        key=pb.Key(id=key.id, tenant=key.tenant, scopes=key.scopes, expire_time=optional_stamp(key.expires_at)),
        digest=key.digest,
        previous_digest=key.previous_digest,
        previous_expire_time=optional_stamp(key.previous_expires_at),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKeys:
    """The stored keys and pepper mark."""

    keys: tuple[ApiKey, ...] = ()
    """Sorted by id."""
    pepper_mark: bytes = b""
    """Mark of the pepper of all digests; empty: none was used."""


_MARK_ID = 1


class SqlKeyStore:
    """Stores API keys in SQL. Writes are durable when the call returns.

    All methods raise SERVICE_UNAVAILABLE if the database fails; then nothing was written, unless the acknowledgement of
    the commit was lost.
    """

    def __init__(self, database: Store) -> None:
        self._database = database

    async def load(self) -> StoredKeys:
        """Returns everything that is stored."""
        rows, mark = await self._database.read(
            lambda tx: (tx.rows("SELECT * FROM api_keys"), tx.value("SELECT mark FROM key_pepper"))
        )
        # Not with ORDER BY: PostgreSQL sorts by the locale of the database.
        keys = sorted((_key_of(row) for row in rows), key=lambda key: key.id)
        return StoredKeys(keys=tuple(keys), pepper_mark=mark or b"")

    async def save(self, keys: Sequence[ApiKey]) -> None:
        """Stores or replaces keys, all or none."""
        rows = [_row_of(key) for key in keys]
        await self._database.run(lambda tx: tx.replace("api_keys", "id", *rows))

    async def delete(self, key_ids: Sequence[str]) -> None:
        """Deletes keys. Ignores unknown ids."""
        await self._database.run(lambda tx: tx.delete("api_keys", "id", key_ids))

    async def save_pepper_mark(self, mark: bytes, revoked: Sequence[ApiKey] = ()) -> None:
        """Stores the mark of the pepper, together with the keys that it revokes."""
        rows = [_row_of(key) for key in revoked]

        def work(tx: Tx) -> None:
            tx.replace("key_pepper", "id", {"id": _MARK_ID, "mark": mark})
            tx.replace("api_keys", "id", *rows)

        await self._database.run(work)


def _row_of(key: ApiKey) -> dict[str, Any]:
    return asdict(key) | {"scopes": json.dumps(list(key.scopes))}


def _key_of(row: Row) -> ApiKey:
    return ApiKey(**row._asdict() | {"scopes": tuple(json.loads(row.scopes))})
