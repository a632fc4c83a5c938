"""Roles that one process of a database has alone: a registry that serves, a router that leads."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


@dataclass(frozen=True)
class OwnerRole:
    """What one process of a database does alone."""

    service: str
    """The word for such a process, such as `registry`."""
    table: str
    """One row about the owner: `id`, `owner`, `address`, `backend_pid`, `beat`, `beat_at`."""
    standby_reason: Reason
    """The reason with which a standby refuses calls."""
    advice: str
    """What callers of a standby can do."""
    replaced_reason: Reason = Reason.SERVICE_UNAVAILABLE
    """The reason with which a former owner refuses to write."""
    locks_file: bool = False
    """Whether one process alone opens an SQLite file."""

    @cached_property
    def lock_key(self) -> int:
        """The number of its advisory lock: derived from a unique name, since other programs use such locks, too."""
        digest = hashlib.sha256(f"weft.{self.service}.store.owner".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)

    @property
    def owner_application(self) -> str:
        """The name by which PostgreSQL lists the connection of an owner."""
        return f"weft-{self.service}-owner"

    @property
    def standby_application(self) -> str:
        """The name by which PostgreSQL lists the connections of those that wait for its end."""
        return f"weft-{self.service}-standby"

    def taken_over(self) -> "TakenOverError":
        """Returns the error of a former owner."""
        return TakenOverError(
            self.replaced_reason,
            f"another {self.service} has taken over this database; stop or restart this one",
        )

    def owned_elsewhere(self) -> WeftError:
        """Returns the error of an attempt to own a database that another process owns."""
        return WeftError(
            Reason.ALREADY_EXISTS,
            f"another {self.service} runs on this database; stop it, or give this one its own database; "
            f"on PostgreSQL, `weft serve {self.service}` waits as its standby",
        )


class TakenOverError(WeftError):
    """Another process owns the database by now, so that this one's memory no longer matches it."""
