"""The store port: what must outlive the registry process."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from registry_svc.domain import Publication, RunnerProfile, Session, Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPulse:
    """A runner's liveness on disk; may be older than what memory knows."""

    runner: str
    standing: Standing
    last_heartbeat_at: datetime
    inactive_since: datetime | None
    """None while it is active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session with all its rows."""

    session: Session
    profile: RunnerProfile
    pulse: StoredPulse
    publications: tuple[Publication, ...]


class Store(Protocol):
    """Where sessions, runners and models are kept. One owner at a time.

    Every write is one transaction that is on disk when the call returns. All methods raise SERVICE_UNAVAILABLE when
    the database fails; then nothing of the write has happened.
    """

    async def open(self) -> None:
        """Take ownership and bring the schema up to date; raises ALREADY_EXISTS when another registry owns it."""
        ...

    async def close(self) -> None:
        """Give it up. Safe to call twice, or when never opened."""
        ...

    async def load(self) -> Sequence[StoredSession]:
        """Everything there is, ordered by runner; publications by model name."""
        ...

    async def save_session(self, stored: StoredSession, *, evicted: Sequence[str] = ()) -> None:
        """Make `stored` the whole truth about its session and about the models it names.

        Its earlier rows go, its models leave whoever held them, and the sessions `evicted` (by id) end.
        """
        ...

    async def save_pulses(self, pulses: Sequence[StoredPulse]) -> None:
        """Update the liveness of these runners; one that is not there is passed over."""
        ...

    async def delete_sessions(self, session_ids: Sequence[str]) -> None:
        """Remove these sessions with their runners and models; one that is not there is passed over."""
        ...
