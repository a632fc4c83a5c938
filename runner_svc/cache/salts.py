"""Salts that isolate the prefixes of tenants in a server that shares its cache among all its callers.

A salt is HMAC-SHA256 over tenant and tag with a random key of this runner: no caller can choose or guess one.
Forgetting changes the salt; prefixes under the old salt are never used again.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

import msgspec
import structlog

from runner_svc.policy.cache_directory import Partition

KEY_BYTES = 32
MAX_FORGOTTEN = 4_096
"""Tenants and tags whose salts were changed individually; beyond that all salts are changed."""
MAX_FILE_BYTES = 4 * 1024 * 1024
_PRIVATE = 0o600

log = structlog.get_logger("weft.runner")


class _Forgotten(msgspec.Struct):
    tenant: str | None
    tag: str | None
    times: int


class _Stored(msgspec.Struct):
    key: bytes
    forgotten: list[_Forgotten]


class SaltStore:
    """The salts of one model's server."""

    def __init__(self, file: Path | None) -> None:
        """`file` keeps the key, and with it the use of cached prefixes, across restarts; None: not kept."""
        self._file = file
        self._key = secrets.token_bytes(KEY_BYTES)
        self._times: dict[tuple[str | None, str | None], int] = {}
        self._read()

    def salt_of(self, partition: Partition | None) -> str:
        """Returns the salt of a partition; None: a random salt that is used once."""
        if partition is None:
            return secrets.token_hex(KEY_BYTES)
        tenant, tag = partition.tenant, partition.tag
        times = [self._times.get(scope, 0) for scope in ((None, None), (tenant, None), (None, tag), (tenant, tag))]
        words = [tenant, tag, *map(str, times)]
        return hmac.new(self._key, "\0".join(words).encode(), hashlib.sha256).hexdigest()

    def forget(self, tenant: str | None = None, tag: str | None = None) -> None:
        """Change the salts of a tenant and a tag, None: of any. Raises OSError if the change cannot be written."""
        scope = (tenant, tag)
        if scope == (None, None) or (scope not in self._times and len(self._times) >= MAX_FORGOTTEN):
            self._key = secrets.token_bytes(KEY_BYTES)
            self._times.clear()
        else:
            self._times[scope] = self._times.get(scope, 0) + 1
        self._write()

    def _read(self) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("rb") as opened:
                stored = msgspec.json.decode(opened.read(MAX_FILE_BYTES), type=_Stored)
        except FileNotFoundError:
            self._write()
            return
        except (OSError, msgspec.DecodeError) as error:
            # A new key makes every prefix cold once, and exposes none.
            log.warning("the salts of the prefix cache begin anew", error=type(error).__name__)
            self._write()
            return
        if len(stored.key) == KEY_BYTES:
            self._key = stored.key
            self._times = {(entry.tenant, entry.tag): entry.times for entry in stored.forgotten[:MAX_FORGOTTEN]}

    def _write(self) -> None:
        if self._file is None:
            return
        forgotten = [_Forgotten(tenant, tag, times) for (tenant, tag), times in self._times.items()]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_name(f"{self._file.name}.{os.getpid()}.new")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE)
        with open(descriptor, "wb") as opened:  # noqa: PTH123 - the descriptor carries the mode
            opened.write(msgspec.json.encode(_Stored(self._key, forgotten)))
            opened.flush()
            os.fsync(opened.fileno())
        draft.replace(self._file)
