"""llama.cpp's server as a program of the runtime `server`: faults of a real process, and what an unload frees."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from kit.engine_settings import engine_settings

from runner_svc.runtimes.llama_server.runtime import LAUNCHER
from runner_svc.runtimes.server.backend import ServerBackend
from runner_svc.runtimes.server.runtime import ServerModel
from weft_app.compose.demo import demo_model_path
from weft_testing.conformance.backend_steps import until

pytestmark = [pytest.mark.slow("a real engine"), pytest.mark.real]
LIMIT_SECONDS = 60.0


def _backend() -> ServerBackend:
    flags = ("--port", "{port}", "--model", "{model}", "--alias", "{name}", "--parallel", "{slots}", "--jinja")
    return ServerBackend(
        *engine_settings(
            ServerModel,
            command=(sys.executable, "-m", LAUNCHER, *flags, "--ctx-size", "{context}", "--threads", "1"),
            model=str(demo_model_path()),
            name="smollm2",
            key_variable="LLAMA_API_KEY",
            slots=1,
            context_tokens=2048,
        )
    )


@asynccontextmanager
async def _running() -> AsyncGenerator[ServerBackend]:
    backend = _backend()
    async with asyncio.timeout(LIMIT_SECONDS):
        await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


def _is_stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped: each stops when it is next scheduled."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)


async def test_frozen_program_does_not_respond_and_shows_no_work_until_resumed() -> None:
    async with _running() as backend:
        process = psutil.Process(backend.process_id)
        os.kill(process.pid, signal.SIGSTOP)
        await until(lambda: _is_stopped(process.pid), LIMIT_SECONDS, "a thread of it still runs")
        before = backend.signs()
        assert not await backend.responds(1.0)
        after = backend.signs()
        assert before is not None
        assert after is not None
        assert after.cpu_seconds == before.cpu_seconds
        os.kill(process.pid, signal.SIGCONT)
        assert await backend.responds(LIMIT_SECONDS)
