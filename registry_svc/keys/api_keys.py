"""API keys: create, list, rotate and revoke. Watchers receive every change; only digests of secrets are stored.

Digests are made with the pepper, secret bytes in a separate file, so that a stolen database alone cannot be used to
check guessed secrets. Back the file up: without it no key is valid.
"""

import hmac
import json
import secrets
import string
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
from typing_extensions import override

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.policy.limits import require_room
from registry_svc.mesh.records import extended
from registry_svc.store.owner_file import create_owner_file, read_owner_file
from registry_svc.watchers import Watcher, Watchers
from weft.api.registry.v1 import key_service_pb2 as pb
from weft.api.registry.v1 import key_service_pb2_grpc
from weft.kernel.access.principal import (
    DEFAULT_SCOPES,
    KEY_ID_CHARS,
    SECRET_BYTES,
    Access,
    KeyRing,
    KeyVerifier,
    Principal,
    Resource,
    Role,
    kept_access,
    key_digest,
    key_text,
    parse_scopes,
)
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import seconds_ahead
from weft.kernel.time.timestamps import optional_stamp, seconds_of, stamp_of
from weft.kernel.values.names import DEFAULT_TENANT
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
    """Digest of the secret; see `weft.kernel.access.principal.key_digest`."""
    created_at: datetime
    expires_at: datetime | None = None
    """None: never."""
    revoked_at: datetime | None = None
    rotated_at: datetime | None = None
    """When it last got a new secret; None: never."""
    previous_digest: bytes = field(default=b"", repr=False)
    """Digest of the secret before the last rotation; empty: none is valid."""
    previous_expires_at: datetime | None = None
    max_priority: int = 0
    """As in `common.v1.PriorityCeiling`."""

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
        max_priority=Priority.ceiling(key.max_priority),
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
        max_priority=key.max_priority,  # type: ignore[arg-type]  # same numbers
    )


def verifier_message(key: ApiKey) -> pb.KeyVerifier:
    """Returns what services of the mesh need to check a key."""
    return pb.KeyVerifier(
        key=pb.Key(
            id=key.id,
            tenant=key.tenant,
            scopes=key.scopes,
            expire_time=optional_stamp(key.expires_at),
            max_priority=key.max_priority,  # type: ignore[arg-type]  # same numbers
        ),
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

    All methods raise SERVICE_UNAVAILABLE if the database fails; then nothing was written.
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


DEFAULT_GRACE_SECONDS = 3_600.0
"""How long the old secret of a rotated key stays valid by default."""
MAX_KEYS = 10_000
"""Maximum number of keys. Revoked and expired ones make room for new ones."""
KEPT_DAYS = 30
"""How long a revoked or expired key stays listed."""
log = get_logger("weft.registry.keys")

_MAKE = Access(Resource.KEYS, Role.CREATE)
_ID_ALPHABET = string.ascii_lowercase + string.digits


class ApiKeys:
    """The keys of one registry. The core serializes their writes with all others."""

    def __init__(self, core: RegistryCore, store: SqlKeyStore) -> None:
        self._core = core
        self._store = store
        self._config = core.config.keys
        self._keys: dict[str, ApiKey] = {}
        self._good: set[str] = set()
        """Ids of the valid keys, as known to watchers."""
        self._pepper = b""
        self._watchers = Watchers[pb.WatchKeysResponse](core.config.watch_buffer_responses)
        self._ring: KeyRing | None = None

    async def start(self) -> None:
        """Loads the keys and the pepper, once the core has started. Raises INVALID_ARGUMENT if they do not match."""
        stored = await self._store.load()
        now = self._core.clock.utc_now()
        keys, self._pepper = await self._with_pepper(stored, now)
        self._keys = {key.id: key for key in keys}
        self._good = {key.id for key in keys if key.is_good(now)}
        self._ring = None
        log.info("keys ready", keys=len(self._keys), good=len(self._good))

    async def require_pepper_of(self, store: SqlKeyStore) -> None:
        """Raises INVALID_ARGUMENT if the pepper does not match the valid keys of a store."""
        stored, path, now = await store.load(), self._config.pepper_file, self._core.clock.utc_now()
        pepper = None if path is None else read_pepper(path)
        good = sum(key.is_good(now) for key in stored.keys)
        if good and (pepper is None or pepper_mark(pepper) != stored.pepper_mark):
            raise lost_pepper(path, keys=good)

    @property
    def ring(self) -> KeyRing:
        """Verifiers of all valid keys, for authentication in this process."""
        if self._ring is None:
            keys = {key_id: verifier_of(self._keys[key_id]) for key_id in self._good}
            self._ring = KeyRing(pepper=self._pepper, keys=keys)
        return self._ring

    def close(self) -> None:
        """Ends the watchers. Safe to call twice, or when never started."""
        self._watchers.close()

    async def create(self, request: pb.CreateKeyRequest, by: Principal) -> tuple[ApiKey, str]:
        """Creates a key from a valid request. Returns it and its full text, which is shown only once.

        Raises TOO_MANY_RESOURCES, and PERMISSION_DENIED for scopes or a priority class that the caller lacks.
        """
        scopes = tuple(dict.fromkeys(request.scopes)) or DEFAULT_SCOPES
        _require_scopes(scopes, by)
        request.max_priority = request.max_priority or by.max_priority.as_ceiling  # type: ignore[assignment]  # same numbers
        by.require_priority(Priority.ceiling(request.max_priority))
        return await self._core.write(lambda: self._create(request, scopes, by.name))

    def newest_first(self) -> list[ApiKey]:
        """Returns all keys, including expired and revoked ones."""
        self._core.require_open()
        return sorted(self._keys.values(), key=lambda key: (key.created_at, key.id), reverse=True)

    async def revoke(self, key_id: str, by: Principal) -> None:
        """Revokes a key. Idempotent. Raises NOT_FOUND."""
        await self._core.write(lambda: self._revoke(key_id, by.name))

    async def rotate(self, key_id: str, grace: timedelta | None, by: Principal) -> tuple[ApiKey, str]:
        """Gives a key a new secret. Returns it and its full text, which is shown only once.

        `grace` is how long the old secret stays valid, by default DEFAULT_GRACE_SECONDS. Raises NOT_FOUND, also for an
        expired or revoked key, and PERMISSION_DENIED if the caller may not create keys or lacks a scope of the key:
        rotating a key grants its rights, for any tenant.
        """
        by.require(_MAKE)
        return await self._core.write(lambda: self._rotate(key_id, grace, by))

    def watch(self) -> tuple[bytes, tuple[ApiKey, ...], Watcher[pb.WatchKeysResponse]]:
        """Returns the pepper, all valid keys, and a watcher for every later change."""
        self._core.require_open()
        return self._pepper, tuple(self._keys[key_id] for key_id in self._good), self._watchers.subscribe()

    async def sweep(self) -> None:
        """Publishes expired keys, deletes keys that ended long ago, and corrects times that are in the future.

        A key that expired while the clock was ahead is valid again once the clock is set back.
        """
        self._core.require_open()
        now = self._core.clock.utc_now()
        if self._valid(now) != self._good or self._forgettable(now) or self._ahead(now):
            await self._core.writer.run(self._sweep)

    async def _with_pepper(self, stored: StoredKeys, now: datetime) -> tuple[tuple[ApiKey, ...], bytes]:
        path = self._config.pepper_file
        pepper = None if path is None else read_pepper(path)
        if pepper is not None and pepper_mark(pepper) == stored.pepper_mark:
            return stored.keys, pepper
        lost = [key for key in stored.keys if key.is_good(now)]
        if lost and not self._config.revoke_all_if_pepper_lost:
            raise lost_pepper(path, keys=len(lost))
        if path is None:
            return stored.keys, b""
        pepper = pepper or make_pepper(path)
        revoked = {key.id: key.revoked(now) for key in lost}
        await self._store.save_pepper_mark(pepper_mark(pepper), tuple(revoked.values()))
        if revoked:
            log.warning("all keys revoked: their pepper is lost", count=len(revoked))
        return tuple(revoked.get(key.id, key) for key in stored.keys), pepper

    async def _create(self, request: pb.CreateKeyRequest, scopes: tuple[str, ...], by: str) -> tuple[ApiKey, str]:
        pepper, now = self._require_pepper(), self._core.clock.utc_now()
        await self._make_room(now)
        secret = secrets.token_hex(SECRET_BYTES)
        key = ApiKey(
            id=self._new_id(),
            description=request.description,
            tenant=request.tenant or DEFAULT_TENANT,
            scopes=scopes,
            digest=key_digest(pepper, secret),
            created_at=now,
            expires_at=now + timedelta(seconds=seconds_of(request.lifetime)) if request.HasField("lifetime") else None,
            max_priority=request.max_priority,
        )
        await self._keep(key)
        log.info("key made", id=key.id, tenant=key.tenant, scopes=list(key.scopes), expires=_iso(key.expires_at), by=by)
        return key, key_text(key.id, secret)

    async def _revoke(self, key_id: str, by: str) -> None:
        key = self._keys.get(key_id)
        if key is None:
            raise WeftError(Reason.NOT_FOUND, "there is no key with this id")
        if key.revoked_at is not None:
            return
        revoked = key.revoked(self._core.clock.utc_now())
        await self._store.save([revoked])
        self._keys[key_id] = revoked
        self._tell_removed([key_id])
        log.info("key revoked", id=key_id, tenant=key.tenant, by=by)

    async def _rotate(self, key_id: str, grace: timedelta | None, by: Principal) -> tuple[ApiKey, str]:
        pepper, now = self._require_pepper(), self._core.clock.utc_now()
        key = self._keys.get(key_id)
        if key is None or not key.is_good(now):
            raise WeftError(Reason.NOT_FOUND, "there is no valid key with this id")
        _require_scopes(key.scopes, by)
        by.require_priority(Priority.ceiling(key.max_priority))
        secret = secrets.token_hex(SECRET_BYTES)
        span = timedelta(seconds=DEFAULT_GRACE_SECONDS) if grace is None else grace
        rotated = key.rotated(key_digest(pepper, secret), now, span)
        await self._keep(rotated)
        log.info(
            "key rotated", id=key_id, tenant=key.tenant, old_good_until=_iso(rotated.previous_expires_at), by=by.name
        )
        return rotated, key_text(key_id, secret)

    async def _keep(self, key: ApiKey) -> None:
        await self._store.save([key])
        self._keys[key.id] = key
        self._tell_valid([key.id])

    async def _make_room(self, now: datetime) -> None:
        limit = MAX_KEYS
        if len(self._keys) >= limit:
            over = [key for key in self._keys.values() if not key.is_good(now)]
            over.sort(key=lambda key: key.ended_at_or_will() or key.created_at)
            await self._forget([key.id for key in over[: len(self._keys) - limit + 1]])
        require_room("API keys", len(self._keys), 1, limit)

    async def _sweep(self) -> None:
        now = self._core.clock.utc_now()
        await self._bring_back(self._ahead(now))
        valid = self._valid(now)
        self._tell_removed(self._good - valid)
        self._tell_valid(valid - self._good)
        await self._forget([key.id for key in self._forgettable(now)])

    def _valid(self, now: datetime) -> set[str]:
        return {key.id for key in self._keys.values() if key.is_good(now)}

    def _ahead(self, now: datetime) -> list[ApiKey]:
        """Returns corrected copies of keys with times in the future."""
        return [back for key in self._keys.values() if (back := key.clamped_to_now(now)) is not key]

    async def _bring_back(self, keys: list[ApiKey]) -> None:
        if not keys:
            return
        await self._store.save(keys)
        log.warning("keys have a creation time in the future: the clock was set back", count=len(keys))
        self._keys |= {key.id: key for key in keys}
        self._tell_valid([key.id for key in keys if key.id in self._good])

    def _forgettable(self, now: datetime) -> list[ApiKey]:
        longest = timedelta(days=KEPT_DAYS)
        return [
            key for key in self._keys.values() if (over := key.ended_at_or_will()) is not None and over + longest <= now
        ]

    async def _forget(self, key_ids: list[str]) -> None:
        if not key_ids:
            return
        await self._store.delete(key_ids)
        self._tell_removed(key_ids)
        for key_id in key_ids:
            del self._keys[key_id]
        log.info("keys forgotten", count=len(key_ids))

    def _tell_valid(self, key_ids: Collection[str]) -> None:
        changed = [pb.WatchKeysResponse(changed=verifier_message(self._keys[key_id])) for key_id in key_ids]
        self._good.update(key_ids)
        self._ring = None
        self._watchers.publish(changed)

    def _tell_removed(self, key_ids: Iterable[str]) -> None:
        gone = [key_id for key_id in key_ids if key_id in self._good]
        self._good.difference_update(gone)
        self._ring = None
        if gone:
            self._watchers.publish([pb.WatchKeysResponse(removed=key_id) for key_id in gone])

    def _new_id(self) -> str:
        while True:
            key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(KEY_ID_CHARS))
            if key_id not in self._keys:
                return key_id

    def _require_pepper(self) -> bytes:
        if not self._pepper:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this registry has no pepper file, and so no API keys")
        return self._pepper


def _require_scopes(scopes: Iterable[str], by: Principal) -> None:
    """Raises PERMISSION_DENIED for scopes that the caller lacks."""
    for access in sorted(parse_scopes(scopes, "scopes") - by.access, key=str):
        by.require(access)


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


PEPPER_BYTES = 32
_PEPPER_FIELD = "registry.keys.pepper_file"
_MARK_TEXT = b"weft key pepper"


def read_pepper(path: Path) -> bytes | None:
    """Returns the pepper; None if there is no file.

    Raises INVALID_ARGUMENT if others may read the file, it cannot be read, or its length is wrong.
    """
    pepper = read_owner_file(path, _PEPPER_FIELD, max_bytes=PEPPER_BYTES)
    if pepper is not None and len(pepper) != PEPPER_BYTES:
        raise invalid_field(_PEPPER_FIELD, f"{path} must hold exactly {PEPPER_BYTES} bytes; restore it from a backup")
    return pepper


def make_pepper(path: Path) -> bytes:
    """Writes a new pepper to disk, unless there is one; returns it. Raises INVALID_ARGUMENT if it cannot be written."""
    return create_owner_file(path, secrets.token_bytes(PEPPER_BYTES), _PEPPER_FIELD)


def pepper_mark(pepper: bytes) -> bytes:
    """Returns the mark by which the database recognizes a pepper. It does not reveal the pepper."""
    return hmac.digest(pepper, _MARK_TEXT, sha256)


def lost_pepper(path: Path | None, *, keys: int) -> WeftError:
    """Returns the error for a missing or wrong pepper file."""
    return invalid_field(
        _PEPPER_FIELD,
        f"{path or 'it'} is not there, or is not what the {keys} API keys in the database were made with: none of them "
        "would work. Restore the file from a backup; if it is lost, set registry.keys.revoke_all_if_pepper_lost for "
        "one start, and make new keys",
    )


MAX_GRACE_SECONDS = 30 * 86_400.0
"""Maximum grace period of a rotation."""
Context = grpc.aio.ServicerContext[Any, Any]


async def snapshot_message(pepper: bytes, keys: Sequence[ApiKey]) -> pb.WatchKeysResponse:
    """Returns the first response of a watch. Lets other tasks run, since a large one takes long."""
    response = pb.WatchKeysResponse(snapshot=pb.KeySnapshot(pepper=pepper))
    await extended(response.snapshot.keys, [partial(verifier_message, key) for key in keys])
    return response


def to_grace(request: pb.RotateKeyRequest) -> timedelta | None:
    """Returns the grace period of the old secret; None if the request has none. Raises INVALID_ARGUMENT."""
    if not request.HasField("grace"):
        return None
    seconds = request.grace.seconds + request.grace.nanos / 1e9
    if not 0 <= seconds <= MAX_GRACE_SECONDS:
        raise invalid_field("grace", f"must be 0 to {MAX_GRACE_SECONDS:.0f} seconds, or not set")
    return timedelta(seconds=seconds)


class KeyServicer(AnsweringServicer, key_service_pb2_grpc.KeyServiceServicer):
    """See KeyService in the contract."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    @override
    async def CreateKey(self, request: pb.CreateKeyRequest, context: Context) -> pb.CreateKeyResponse:
        check_message(request)
        parse_scopes(request.scopes, "scopes")
        key, text = await self._keys.create(request, caller())
        return pb.CreateKeyResponse(key=key_message(key), text=text)

    @override
    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        del request
        return pb.ListKeysResponse(keys=[key_message(key) for key in self._keys.newest_first()])

    @override
    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Context) -> pb.RevokeKeyResponse:
        check_message(request)
        await self._keys.revoke(request.id, caller())
        return pb.RevokeKeyResponse()

    @override
    async def RotateKey(self, request: pb.RotateKeyRequest, context: Context) -> pb.RotateKeyResponse:
        check_message(request)
        key, text = await self._keys.rotate(request.id, to_grace(request), caller())
        until = optional_stamp(key.previous_expires_at or key.rotated_at)
        return pb.RotateKeyResponse(key=key_message(key), text=text, old_expire_time=until)

    # See RegistryServicer.Watch for why it is a coroutine.
    @override
    async def WatchKeys(  # type: ignore[override]
        self, request: pb.WatchKeysRequest, context: Context
    ) -> None:
        del request
        pepper, keys, watcher = self._keys.watch()
        with watcher:
            await context.write(await snapshot_message(pepper, keys))
            async for change in watcher:
                await context.write(change)
