"""API keys: create, list, rotate and revoke. Watchers receive every change; only digests of secrets are stored.

Digests are made with the pepper, secret bytes in a separate file, so that a stolen database alone cannot be used to
check guessed secrets. Back the file up: without it no key is valid.
"""

import hmac
import secrets
import string
from collections.abc import Iterable
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path

from registry_svc.keys.key_store import ApiKey, SqlKeyStore, StoredKeys, verifier_message, verifier_of
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.policy.limits import require_room
from registry_svc.store.owner_file import read_owner_file, write_owner_file
from registry_svc.watchers import Watcher, Watchers
from weft.api.registry.v1 import key_service_pb2 as pb
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log import get_logger
from weft.kernel.names import DEFAULT_TENANT
from weft.kernel.principal import (
    DEFAULT_SCOPES,
    KEY_ID_CHARS,
    SECRET_BYTES,
    Access,
    KeyRing,
    Principal,
    Resource,
    Role,
    key_digest,
    key_text,
    parse_scopes,
)
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import seconds_of

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

        Raises TOO_MANY_RESOURCES, and PERMISSION_DENIED for scopes that the caller lacks.
        """
        scopes = tuple(dict.fromkeys(request.scopes)) or DEFAULT_SCOPES
        _require_scopes(scopes, by)
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
        """Publishes expired keys, deletes keys that ended long ago, and corrects times that are in the future."""
        self._core.require_open()
        now = self._core.clock.utc_now()
        is_any_over = any(not self._keys[key_id].is_good(now) for key_id in self._good)
        if is_any_over or self._forgettable(now) or self._ahead(now):
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
        )
        await self._keep(key)
        log.info("key made", id=key.id, tenant=key.tenant, scopes=list(key.scopes), expires=_iso(key.expires_at), by=by)
        return key, key_text(key.id, secret)

    async def _revoke(self, key_id: str, by: str) -> None:
        key = self._keys.get(key_id)
        if key is None:
            raise _unknown("there is no key of this id")
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
            raise _unknown("there is no key of this id that is good")
        _require_scopes(key.scopes, by)
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
        self._good.add(key.id)
        self._ring = None
        self._watchers.publish([_changed(key)])

    async def _make_room(self, now: datetime) -> None:
        limit = MAX_KEYS
        if len(self._keys) >= limit:
            over = sorted((key for key in self._keys.values() if not key.is_good(now)), key=_ended)
            await self._forget([key.id for key in over[: len(self._keys) - limit + 1]])
        require_room("API keys", len(self._keys), 1, limit)

    async def _sweep(self) -> None:
        now = self._core.clock.utc_now()
        await self._bring_back(self._ahead(now))
        self._tell_removed([key_id for key_id in self._good if not self._keys[key_id].is_good(now)])
        await self._forget([key.id for key in self._forgettable(now)])

    def _ahead(self, now: datetime) -> list[ApiKey]:
        """Returns corrected copies of keys with times in the future."""
        return [back for key in self._keys.values() if (back := key.clamped_to_now(now)) is not key]

    async def _bring_back(self, keys: list[ApiKey]) -> None:
        if not keys:
            return
        await self._store.save(keys)
        log.warning("keys were made later than now: the clock was set back", count=len(keys))
        self._keys |= {key.id: key for key in keys}
        self._ring = None
        self._watchers.publish([_changed(key) for key in keys if key.id in self._good])

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


def _changed(key: ApiKey) -> pb.WatchKeysResponse:
    return pb.WatchKeysResponse(changed=verifier_message(key))


def _ended(key: ApiKey) -> datetime:
    return key.ended_at_or_will() or key.created_at


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _unknown(message: str) -> WeftError:
    return WeftError(Reason.NOT_FOUND, message)


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
    """Writes a new pepper to disk and returns it. Raises INVALID_ARGUMENT if it cannot be written."""
    pepper = secrets.token_bytes(PEPPER_BYTES)
    write_owner_file(path, pepper, _PEPPER_FIELD)
    return pepper


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
