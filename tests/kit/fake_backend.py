"""The fake backend for direct tests, forked from the warm server."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from kit.warm_python import warm
from weft_testing.fake_backend.process import FakeBackendProcess, fake_backend_command, run_fake_backend_command

_PROGRAM = warm("weft_testing.fake_backend")


@asynccontextmanager
async def run_fake_backend(*flags: str, **switches: Any) -> AsyncGenerator[FakeBackendProcess]:
    """Like `weft_testing.fake_backend.process.run_fake_backend`, but without the time for imports."""
    command = fake_backend_command("--die-with-parent", *flags, **switches)
    async with run_fake_backend_command(*_PROGRAM, *command[len(_PROGRAM) :]) as backend:
        yield backend
