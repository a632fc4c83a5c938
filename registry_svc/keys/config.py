"""Everything about API keys that an operator can set."""

import math
from dataclasses import dataclass
from pathlib import Path

from weft.kernel.errors import invalid_field

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysConfig:
    """Settings with their defaults. A value that makes no sense raises INVALID_ARGUMENT naming the field."""

    pepper_file: Path | None = None
    """What every digest is made with; see `registry_svc.keys.pepper`. None: this registry has no keys."""
    max_keys: int = 10_000
    """How many keys may exist at once. Revoked and expired ones make room for new ones."""
    default_grace_seconds: float = 3_600.0
    """How long the old secret of a rotated key stays good where the caller does not say."""
    max_grace_seconds: float = 30 * DAY_SECONDS
    """Longest that it may."""
    keep_seconds: float = 30 * DAY_SECONDS
    """How long a key stays listed once it was revoked or has expired."""
    revoke_all_if_pepper_lost: bool = False
    """Whether a start with another pepper revokes all keys, which are useless then. Else it is refused."""

    def __post_init__(self) -> None:
        for name in ("max_keys", "default_grace_seconds", "max_grace_seconds", "keep_seconds"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise invalid_field(name, "must be a number greater than zero")
        if self.default_grace_seconds > self.max_grace_seconds:
            raise invalid_field("default_grace_seconds", "must not be longer than max_grace_seconds")
