"""How the tests of the backend suite get engines and end them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import SkipTest

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_testing.conformance.backend_port import Backend, Engine, Facts, Order


class BackendRuns:
    """What an implementation gives the suite, and its time limits."""

    start_seconds = 30.0
    """Time for an engine to become ready, or for the backend to give up on it."""
    stop_seconds = 15.0
    """Time for `stop`, grace periods included."""
    notice_seconds = 5.0
    """Time for a death, a cancellation or a first token to be noticed."""

    def make_backend(self, engine: Engine) -> Backend:
        """A new backend, not started. Raise unittest.SkipTest where there is no such engine."""
        raise NotImplementedError

    def make_variant(self) -> Path:
        """Another file that the NORMAL engine can load. Raise unittest.SkipTest where there is none."""
        raise SkipTest("no other file to load")

    @asynccontextmanager
    async def _running(self, engine: Engine) -> AsyncGenerator[tuple[Backend, Facts]]:
        backend = self.make_backend(engine)
        facts = await self._start(backend)
        try:
            yield backend, facts
        finally:
            await self._stop(backend)

    async def _start(self, backend: Backend, order: Order | None = None) -> Facts:
        async with asyncio.timeout(self.start_seconds):
            return await backend.start(order)

    async def _stop(self, backend: Backend) -> None:
        async with asyncio.timeout(self.stop_seconds):
            await backend.stop()

    async def _start_failure(self, backend: Backend) -> tuple[Reason, str]:
        try:
            await self._start(backend)
        except WeftError as error:
            return error.reason, error.message
        await self._stop(backend)
        raise AssertionError("start was expected to fail")
