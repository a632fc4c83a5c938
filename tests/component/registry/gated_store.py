"""The real store behind a gate: writes can be made to wait or to fail, and closing keeps what was written."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from registry_svc.mesh.domain import JoinToken
from registry_svc.mesh.rows import NO_NAMES, DeclaredNames, DeclaredRecords, StoredMesh, StoredPulse, StoredSession
from registry_svc.mesh.store import SqlStore
from weft.api.registry.v1.event_pb2 import Event
from weft.api.registry.v1.settings_pb2 import MeshSettings
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


@dataclass
class GatedStore:
    """See Store. An SQLite database in memory that outlives the rosters on it; `really_close` ends it."""

    failing: bool = False
    """Whether every write fails."""
    gate: asyncio.Event | None = None
    """Writes wait for it before they happen."""
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a write waits at the gate."""
    writes: int = 0
    inner: SqlStore = field(default_factory=lambda: SqlStore("sqlite://"))
    _is_open: bool = False

    async def open(self) -> None:
        if not self._is_open:
            self._is_open = True
            await self.inner.open()

    async def close(self) -> None:
        """Nothing: a process that ended leaves its rows behind."""

    async def really_close(self) -> None:
        await self.inner.close()

    async def load(self) -> StoredMesh:
        return await self.inner.load()

    async def save_session(self, stored: StoredSession, *, evicted: Sequence[str] = ()) -> None:
        await self._pass()
        await self.inner.save_session(stored, evicted=evicted)

    async def save_pulses(self, pulses: Sequence[StoredPulse]) -> None:
        await self._pass()
        await self.inner.save_pulses(pulses)

    async def delete_sessions(self, session_ids: Sequence[str]) -> None:
        await self._pass()
        await self.inner.delete_sessions(session_ids)

    async def save_declarations(self, declared: DeclaredRecords, gone: DeclaredNames = NO_NAMES) -> None:
        await self._pass()
        await self.inner.save_declarations(declared, gone)

    async def delete_names(
        self,
        models: Sequence[str],
        agents: Sequence[str],
        routes: Sequence[str] = (),
        aliases: Sequence[str] = (),
        profiles: Sequence[str] = (),
        workflows: Sequence[str] = (),
        tenants: Sequence[str] = (),
    ) -> None:
        await self._pass()
        await self.inner.delete_names(models, agents, routes, aliases, profiles, workflows, tenants)

    async def save_settings(self, settings: MeshSettings) -> None:
        await self._pass()
        await self.inner.save_settings(settings)

    async def save_join_token(self, token: JoinToken) -> None:
        await self._pass()
        await self.inner.save_join_token(token)

    async def delete_join_token(self, token_id: str) -> None:
        await self._pass()
        await self.inner.delete_join_token(token_id)

    async def save_events(self, new: Sequence[Event], oldest: int) -> None:
        """Neither gated nor counted: sweeps write events beside what a test waits for."""
        await self.inner.save_events(new, oldest)

    async def _pass(self) -> None:
        if self.gate is not None:
            self.waiting.set()
            await self.gate.wait()
        if self.failing:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database failed")
        self.writes += 1
