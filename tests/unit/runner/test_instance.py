"""An instance keeps its backend running, stepped on a fake clock."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from runner_svc.backends.port import BackendFacts, CallInfo, EmbeddingResult
from runner_svc.instance import MAX_DETAIL_CHARS, Instance, InstanceConfig
from runner_svc.policy.phase import Phase
from runner_svc.policy.restart import RestartLimits
from weft.api.common.v1 import embedding_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.testing.fake_clock import FakeClock


class StepBackend:
    """A backend that loads and dies when the test says so."""

    process_id = 7

    def __init__(self) -> None:
        self.loaded = asyncio.Event()
        self.deaths: asyncio.Queue[str] = asyncio.Queue()
        self.load_error: WeftError | None = None
        self.starts = 0
        self.stops = 0

    async def start(self) -> BackendFacts:
        self.starts += 1
        await self.loaded.wait()
        if self.load_error is not None:
            raise self.load_error
        return BackendFacts(operations=frozenset({Operation.CHAT}), context_tokens=512)

    async def wait_exit(self) -> str:
        return await self.deaths.get()

    async def stop(self) -> None:
        self.stops += 1

    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        raise AssertionError("not in these tests")

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        raise AssertionError("not in these tests")

    def log_lines(self, count: int) -> list[str]:
        return ["last words"][:count]


class Stage:
    """An instance, its backend, its clock, and the phases that were told."""

    def __init__(self, **limits: Any) -> None:
        self.clock = FakeClock()
        self.backend = StepBackend()
        self.told: list[Phase] = []
        config = InstanceConfig(model="m", slots=1, restart=RestartLimits(**limits))
        self.instance = Instance(config, self.backend, self.clock, lambda: self.told.append(self.instance.phase))

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


async def test_every_phase_of_a_life_is_told_at_once() -> None:
    stage = Stage()
    await stage.instance.start()
    await stage.settle()
    stage.backend.loaded.set()
    await stage.settle()
    assert stage.instance.context_tokens == 512
    stage.backend.deaths.put_nowait("signal SIGKILL")
    await stage.settle()
    await stage.instance.stop()
    told = [Phase.LOADING, Phase.READY, Phase.STOPPING, Phase.LOADING, Phase.READY, Phase.STOPPING, Phase.IDLE]
    assert stage.told == told
    assert stage.instance.last_restart_reason == "signal SIGKILL"
    assert stage.instance.restart_count == 1


async def test_a_crash_loop_waits_and_says_so_and_then_tries_again() -> None:
    stage = Stage(max_deaths=3, first_pause_seconds=10.0)
    stage.backend.load_error = WeftError(Reason.SERVER_DIED, "x" * 10_000)
    stage.backend.loaded.set()
    await stage.instance.start()
    await stage.clock.wait_for_sleepers(1)
    assert stage.instance.phase is Phase.CRASH_LOOP
    assert stage.backend.starts == 3
    assert len(stage.instance.detail) <= MAX_DETAIL_CHARS
    stage.backend.load_error = None
    await stage.clock.advance(9.9)
    assert stage.backend.starts == 3
    await stage.clock.advance(0.1)
    await stage.settle()
    assert (stage.backend.starts, stage.instance.phase) == (4, Phase.READY)
    await stage.instance.stop()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        ("loading", Reason.BACKEND_NOT_READY),
        ("draining", Reason.SHUTTING_DOWN),
        ("full", Reason.NO_SLOT_AVAILABLE),
    ],
)
async def test_work_is_refused_with_the_reason_for_it(prepare: str, reason: Reason) -> None:
    stage = Stage()
    await stage.instance.start()
    if prepare != "loading":
        stage.backend.loaded.set()
    await stage.settle()
    if prepare == "draining":
        stage.instance.drain()
    held = stage.instance.admit("r0") if prepare == "full" else None
    if held is not None:
        held.__enter__()
    with pytest.raises(WeftError) as refused, stage.instance.admit("r1"):
        pass
    assert refused.value.reason is reason
    if held is not None:
        held.__exit__(None, None, None)
    await stage.instance.stop()


async def test_stop_ends_the_backend_whatever_it_is_doing_and_may_be_repeated() -> None:
    stage = Stage()
    await stage.instance.start()
    await stage.settle()
    await stage.instance.stop()
    await stage.instance.stop()
    assert stage.backend.stops == 1
    assert stage.instance.phase is Phase.IDLE
