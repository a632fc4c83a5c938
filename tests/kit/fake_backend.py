"""The fake backend for tests that talk to it directly, started from the warm server."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from kit.warm_python import warm
from weft_testing.fake_backend.process import FakeBackendProcess, fake_backend_command, run_fake_backend_command

_PROGRAM = warm("weft_testing.fake_backend")


@asynccontextmanager
async def run_fake_backend(*flags: str, **switches: Any) -> AsyncGenerator[FakeBackendProcess]:
    """As `weft_testing.fake_backend.process.run_fake_backend`, without the time of its imports."""
    command = fake_backend_command("--die-with-parent", *flags, **switches)
    async with run_fake_backend_command(*_PROGRAM, *command[len(_PROGRAM) :]) as backend:
        yield backend
