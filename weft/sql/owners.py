"""Roles that only one process per database has: the serving registry, the leading router."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


@dataclass(frozen=True)
class OwnerRole:
    """A role that only one process per database has."""

    service: str
    """Kind of process, such as `registry`."""
    table: str
    """Table with one row for the owner: `id`, `owner`, `address`, `backend_pid`, `beat`, `beat_at`."""
    standby_reason: Reason
    """Reason with which a standby rejects calls."""
    advice: str
    """Advice to callers of a standby."""
    replaced_reason: Reason = Reason.SERVICE_UNAVAILABLE
    """Reason with which a former owner rejects writes."""
    locks_file: bool = False
    """Whether a process locks an SQLite file that it opens."""
    shares_file: bool = False
    """Whether others of the same role may open a locked SQLite file, too: their writes are fenced row by row."""

    @cached_property
    def lock_key(self) -> int:
        """Key of its advisory lock, derived from a unique name since other programs also use such locks."""
        digest = hashlib.sha256(f"weft.{self.service}.store.owner".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)

    @property
    def owner_application(self) -> str:
        """PostgreSQL application name of an owner's connection."""
        return f"weft-{self.service}-owner"

    @property
    def standby_application(self) -> str:
        """PostgreSQL application name of standby connections."""
        return f"weft-{self.service}-standby"

    def taken_over(self) -> "TakenOverError":
        """Returns the error for a former owner."""
        return TakenOverError(
            self.replaced_reason,
            f"another {self.service} has taken over this database; stop or restart this one",
        )

    def owned_elsewhere(self) -> WeftError:
        """Returns the error if another process owns the database."""
        return WeftError(
            Reason.ALREADY_EXISTS,
            f"another {self.service} runs on this database; stop it, or give this one its own database; "
            f"on PostgreSQL, `weft serve {self.service}` waits as its standby",
        )


class TakenOverError(WeftError):
    """Another process now owns the database, so this process's memory no longer matches it."""
