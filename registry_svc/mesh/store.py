"""The store port: what must outlive the registry process."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from registry_svc.mesh.domain import (
    AgentPublication,
    DeclaredAgent,
    DeclaredModel,
    DeclaredRoute,
    JoinToken,
    MeshSettings,
    Publication,
    RunnerProfile,
    Session,
    Standing,
)


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
    agents: tuple[AgentPublication, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMesh:
    """Everything on disk. Each sequence is ordered by name or, tokens, by id."""

    sessions: tuple[StoredSession, ...] = ()
    models: tuple[DeclaredModel, ...] = ()
    agents: tuple[DeclaredAgent, ...] = ()
    routes: tuple[DeclaredRoute, ...] = ()
    settings: MeshSettings | None = None
    """None: none were ever saved."""
    join_tokens: tuple[JoinToken, ...] = ()


class Store(Protocol):
    """Where sessions with their rows, declarations, settings and join tokens are kept. One owner at a time.

    Every write is one transaction that is on disk when the call returns. All methods raise SERVICE_UNAVAILABLE when
    the database fails; then nothing of the write has happened.
    """

    async def open(self) -> None:
        """Take ownership and bring the schema up to date; raises ALREADY_EXISTS when another registry owns it."""
        ...

    async def close(self) -> None:
        """Give it up. Safe to call twice, or when never opened."""
        ...

    async def load(self) -> StoredMesh:
        """Everything there is; sessions ordered by runner, their publications and agents by name."""
        ...

    async def save_session(self, stored: StoredSession, *, evicted: Sequence[str] = ()) -> None:
        """Make `stored` the whole truth about its session and about the published models and agents it names.

        Its earlier rows go, its models and agents leave whoever published them, and the sessions `evicted` (by id) end,
        as does any other that holds its runner's name.
        Declarations are untouched.
        """
        ...

    async def save_pulses(self, pulses: Sequence[StoredPulse]) -> None:
        """Update the liveness of these runners; one that is not there is passed over."""
        ...

    async def delete_sessions(self, session_ids: Sequence[str]) -> None:
        """Remove these sessions with their runners, agents and models; one that is not there is passed over."""
        ...

    async def save_declarations(
        self, models: Sequence[DeclaredModel], agents: Sequence[DeclaredAgent], routes: Sequence[DeclaredRoute] = ()
    ) -> None:
        """Put these declarations in place of earlier ones of their names; all of them, or none."""
        ...

    async def delete_names(self, models: Sequence[str], agents: Sequence[str], routes: Sequence[str] = ()) -> None:
        """Remove models and agents of these names, declared and published, and routes.

        One that is not there is passed over.
        """
        ...

    async def save_settings(self, settings: MeshSettings) -> None:
        """Keep the mesh's settings in place of earlier ones."""
        ...

    async def save_join_token(self, token: JoinToken) -> None:
        """Keep a token; one of the same id is replaced."""
        ...

    async def delete_join_token(self, token_id: str) -> None:
        """Forget a token; one that is not there is passed over."""
        ...
