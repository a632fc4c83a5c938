"""The nouns of API keys."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from weft.kernel.clock import seconds_ahead
from weft.kernel.principal import KeyVerifier, kept_access


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRequest:
    """A validated request for a new key."""

    description: str = ""
    tenant: str
    scopes: tuple[str, ...]
    lifetime: timedelta | None = None
    """None: it never expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key. The secret itself is never kept."""

    id: str
    description: str
    tenant: str
    scopes: tuple[str, ...]
    digest: bytes = field(repr=False)
    """Of the secret; see `weft.kernel.principal.key_digest`."""
    created_at: datetime
    expires_at: datetime | None = None
    """None: never."""
    revoked_at: datetime | None = None
    """None: it was not."""
    rotated_at: datetime | None = None
    """When it last got a new secret. None: never."""
    previous_digest: bytes = field(default=b"", repr=False)
    """Digest of the secret before the last rotation. Empty: none is valid."""
    previous_expires_at: datetime | None = None

    def is_good(self, now: datetime) -> bool:
        """Whether the key is valid at `now`."""
        # A revocation holds whatever the clock shows: the clock may have been set back since.
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def ended_at_or_will(self) -> datetime | None:
        """When it ended, or will; None: it will not by itself."""
        return min((at for at in (self.revoked_at, self.expires_at) if at is not None), default=None)

    def clamped_to_now(self, now: datetime) -> "ApiKey":
        """The same as if made or rotated now, where that lies in the future: a clock was set back."""
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
        """Return the key revoked at `now`."""
        return replace(self, revoked_at=now, previous_digest=b"", previous_expires_at=None)

    def rotated(self, digest: bytes, now: datetime, grace: timedelta) -> "ApiKey":
        """Return the key with a new secret; the current secret stays valid for `grace`, older ones do not."""
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
    """Return what is needed to check a key."""
    return KeyVerifier(
        key_id=key.id,
        tenant=key.tenant,
        access=kept_access(key.scopes),
        digest=key.digest,
        expires_at=key.expires_at,
        previous_digest=key.previous_digest,
        previous_expires_at=key.previous_expires_at,
    )


@dataclass(frozen=True, slots=True)
class KeyChanged:
    """A key is new, or different now."""

    key: ApiKey


@dataclass(frozen=True, slots=True)
class KeyRemoved:
    """The key of this id is no longer valid."""

    id: str


KeyChange = KeyChanged | KeyRemoved
