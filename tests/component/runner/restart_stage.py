"""An instance on a real process, its requests, and a count of resources that a fault may leave behind."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kit.engines import CALL, chat, control_of, fake_engine
from kit.own_children import own_children

from runner_svc.backend.port import Backend
from runner_svc.instance.instance import Instance
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.backoff import RestartLimits
from runner_svc.policy.lifecycle import Phase
from runner_svc.policy.timeouts import TimeoutProfile
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.time.clock import SystemClock
from weft_testing.fake_backend.process import FakeControl

WAIT_SECONDS = 20.0
POLL_SECONDS = 0.002
LONG: dict[str, Any] = {"answer_tokens": 0, "tokens_per_second": 200}
"""Length of an answer that does not end by itself."""


@dataclass
class Repaving:
    """An instance and its backend."""

    instance: Instance
    backend: Backend
    phases: list[Phase] = field(default_factory=list)

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> float:
        """Wait for `condition`; returns the time."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, f"{what}: {self.instance.phase.name} {self.instance.detail}"
            await asyncio.sleep(POLL_SECONDS)
        return time.monotonic() - began

    async def until_phase(self, phase: Phase) -> None:
        await self.until(lambda: self.instance.phase is phase, f"not {phase.name}")

    async def until_restarted(self, count: int = 1) -> None:
        await self.until(
            lambda: self.instance.restart_count >= count and self.instance.phase is Phase.READY, "not ready again"
        )

    def kill(self) -> None:
        """Kill the engine, as the kernel's out-of-memory killer does."""
        assert self.backend.process_id is not None
        os.kill(self.backend.process_id, signal.SIGKILL)

    def control(self) -> FakeControl:
        return control_of(self.backend)

    async def ask(self, request_id: str = "r", text: list[str] | None = None, max_tokens: int = 5) -> WeftError | None:
        """Run one request; returns its error, and keeps its answer in `text`."""
        payload = chat()
        payload.sampling.max_tokens = max_tokens
        try:
            with self.instance.admit(request_id) as work:
                async for frame in work.generate(payload, replace(CALL, request_id=request_id)):
                    for event in frame:
                        work.record.note_output(event.delta.text)
                        if text is not None:
                            text.append(event.delta.text)
        except WeftError as error:
            return error
        return None

    async def stream(self, request_id: str = "r") -> "asyncio.Task[WeftError | None]":
        """Start a request that does not end by itself; returns after its first token."""
        text: list[str] = []
        task = asyncio.create_task(self.ask(request_id, text, max_tokens=100_000))
        await self.until(lambda: bool("".join(text)) or task.done(), "no token")
        return task


@asynccontextmanager
async def repaving(
    command: Sequence[str] | None = None,
    *,
    limits: RestartLimits | None = None,
    http: TimeoutProfile | None = None,
    **switches: Any,
) -> AsyncIterator[Repaving]:
    """Yields an instance that loads a fake backend with these switches, or `command`."""
    timeouts = http or TimeoutProfile()
    settings = {"slots": 2, "context_tokens": 100_000, "timeouts": timeouts}
    if command is not None:
        settings["command"] = tuple(command)
    backend = fake_engine(switches, **settings)
    async with living(backend, slots=2, restart=limits or RestartLimits(), timeouts=timeouts) as stage:
        yield stage


@asynccontextmanager
async def living(backend: Backend, *, slots: int, **settings: Any) -> AsyncIterator[Repaving]:
    """An instance that has begun its life. `settings` as of ServedModel."""
    config = ServedModel(name="m", make_backend=lambda: backend, slots=slots, **settings)
    phases: list[Phase] = []
    instance = Instance(config, backend, SystemClock(), lambda: phases.append(instance.phase))
    await instance.start()
    try:
        yield Repaving(instance=instance, backend=backend, phases=phases)
    finally:
        await instance.stop()


@dataclass(frozen=True)
class Leftovers:
    processes: int
    file_descriptors: int
    threads: int
    tasks: int


def count_leftovers() -> Leftovers:
    return Leftovers(
        processes=len(own_children(recursive=True)),
        file_descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=threading.active_count(),
        tasks=len(asyncio.all_tasks()),
    )
