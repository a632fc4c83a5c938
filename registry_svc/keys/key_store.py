"""The store port of API keys: what must outlive the registry process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from registry_svc.keys.domain import ApiKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKeys:
    """Everything on disk."""

    keys: tuple[ApiKey, ...] = ()
    """In order of their ids."""
    pepper_mark: bytes = b""
    """Which pepper their digests were made with, see `pepper_mark`; empty: none was ever used."""


class KeyStore(Protocol):
    """Where API keys are kept: digests, never secrets.

    Every write is one transaction that is on disk when the call returns. All methods raise SERVICE_UNAVAILABLE when
    the database fails; then nothing of the write has happened, unless the acknowledgement of its commit was lost.
    """

    async def load(self) -> StoredKeys:
        """Everything there is."""
        ...

    async def save(self, keys: Sequence[ApiKey]) -> None:
        """Keep these; one of the same id is replaced. All of them, or none."""
        ...

    async def delete(self, key_ids: Sequence[str]) -> None:
        """Forget these; one that is not there is passed over."""
        ...

    async def save_pepper_mark(self, mark: bytes, revoked: Sequence[ApiKey] = ()) -> None:
        """Keep which pepper is used from now on, and with it what becomes of keys that were made with another."""
        ...
