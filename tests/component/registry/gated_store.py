"""The real store behind a gate: writes can be made to wait or to fail, and closing keeps what was written."""

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar

from typing_extensions import override

from registry_svc.mesh.store import SqlStore
from weft.api.registry.v1.event_pb2 import Event
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.sql.store import T, Work

_is_ungated = ContextVar("_is_ungated", default=False)


class GatedStore(SqlStore):
    """An SQLite database in memory that outlives the rosters on it; `really_close` ends it."""

    def __init__(self) -> None:
        super().__init__("sqlite://")
        self.failing = False
        """Whether every write fails."""
        self.gate: asyncio.Event | None = None
        """Writes wait for it before they happen."""
        self.waiting = asyncio.Event()
        """Set once a write waits at the gate."""
        self.writes = 0
        self._was_opened = False

    @override
    async def open(self, first: Work[None] | None = None) -> None:
        if not self._was_opened:
            self._was_opened = True
            await super().open(first)

    @override
    async def close(self) -> None:
        """Nothing: a process that ended leaves its rows behind."""

    async def really_close(self) -> None:
        await super().close()

    @override
    async def run(self, work: Work[T], *, vital: bool = False) -> T:
        if not _is_ungated.get():
            await self._pass()
        return await super().run(work, vital=vital)

    @override
    async def save_events(self, new: Sequence[Event], oldest: int) -> None:
        """Neither gated nor counted: sweeps write events beside what a test waits for."""
        token = _is_ungated.set(True)
        try:
            await super().save_events(new, oldest)
        finally:
            _is_ungated.reset(token)

    async def _pass(self) -> None:
        if self.gate is not None:
            self.waiting.set()
            await self.gate.wait()
        if self.failing:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry's database failed")
        self.writes += 1
