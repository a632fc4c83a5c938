"""The watchdog on a fake clock, with a scripted engine."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from kit.running_record import running_record

from runner_svc.backend.port import (
    Backend,
    BackendFacts,
    CallInfo,
    EmbeddingResult,
    ExitReport,
    LoadOrder,
)
from runner_svc.instance.watchdog import Watchdog
from runner_svc.policy.progress import EngineUsage
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.request_records import RequestRecord, RequestRecords, RequestState
from runner_svc.supervise.logs import LogRing
from weft.api.common.v1 import embedding_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

PROFILE = TimeoutProfile(prefill_liveness_seconds=10.0, idle_stream_seconds=6.0, probe_interval_seconds=1.0)


class SilentBackend(Backend):
    process_id: int | None = 7

    def __init__(self) -> None:
        self.log = LogRing()
        self.cpu_seconds: float | None = 0.0
        self.answers: bool | None = True
        """None: a probe never ends."""
        self.looks = 0
        self.probes = 0

    def signs(self) -> EngineUsage | None:
        self.looks += 1
        return None if self.cpu_seconds is None else EngineUsage(cpu_seconds=self.cpu_seconds)

    async def responds(self, timeout_seconds: float) -> bool:
        self.probes += 1
        if self.answers is None:
            await asyncio.Event().wait()
        return bool(self.answers)

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        raise AssertionError("not the watchdog's business")

    async def wait_exit(self) -> ExitReport:
        raise AssertionError("not the watchdog's business")

    async def stop(self) -> None:
        raise AssertionError("not the watchdog's business")

    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        raise AssertionError("not the watchdog's business")

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        raise AssertionError("not the watchdog's business")


class WatchdogStage:
    """A running watchdog, its records, and requests in the engine."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.backend = SilentBackend()
        self.records = RequestRecords("m", self.clock)
        self.watching = asyncio.create_task(Watchdog(self.records, self.backend, PROFILE, self.clock).run())
        self._requests: list[asyncio.Task[None]] = []

    async def request(self, request_id: str = "r1") -> tuple[RequestRecord, "asyncio.Task[None]"]:
        async def wait() -> None:
            with running_record(self.records, request_id) as record:
                record.begin_turn()
                await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        self._requests.append(task)
        await asyncio.sleep(0)
        return self.records.running[-1], task

    async def seconds(self, count: int) -> None:
        for _ in range(count):
            if not self.watching.done():
                await self.clock.wait_for_sleepers(1)
            await self.clock.advance(1.0)

    async def end(self) -> None:
        for task in (self.watching, *self._requests):
            task.cancel()
        await asyncio.gather(self.watching, *self._requests, return_exceptions=True)


@asynccontextmanager
async def watchdog_stage() -> AsyncGenerator[WatchdogStage]:
    """Yields a stage, ended with the block."""
    made = WatchdogStage()
    try:
        yield made
    finally:
        await made.end()


def _failure(task: "asyncio.Task[None]") -> WeftError:
    error = task.exception()
    assert isinstance(error, WeftError)
    return error


async def test_idle_prefill_fails_and_requests_a_restart() -> None:
    async with watchdog_stage() as k:
        record, task = await k.request()
        await k.seconds(9)
        assert not task.done()
        await k.seconds(2)
        assert _failure(task).reason is Reason.STALL_TIMEOUT
        assert record.state is RequestState.FAILED
        assert k.watching.result().reason is Reason.STALL_TIMEOUT


async def test_prefill_using_cpu_time_continues_and_the_record_shows_progress() -> None:
    async with watchdog_stage() as k:
        record, task = await k.request()
        for _ in range(600):
            k.backend.cpu_seconds = (k.backend.cpu_seconds or 0.0) + 0.9
            await k.seconds(1)
        assert not task.done()
        assert k.clock.monotonic() - record.last_progress <= 1.0


async def test_two_requests_with_one_id_are_distinguished() -> None:
    async with watchdog_stage() as k:
        stuck, stuck_task = await k.request("same")
        flowing, flowing_task = await k.request("same")
        stuck.note_token()
        for _ in range(10):
            flowing.note_token()
            await k.seconds(1)
        assert stuck_task.done()
        assert not flowing_task.done()


async def test_slow_reader_is_not_an_engine_failure() -> None:
    async with watchdog_stage() as k:
        record, task = await k.request()
        record.note_token()
        record.with_caller = True
        await k.seconds(100)
        assert not task.done()
        record.with_caller = False
        await k.seconds(5)
        assert not task.done()
        await k.seconds(2)
        assert task.done()


async def test_admitted_request_that_has_not_started_is_not_judged() -> None:
    async with watchdog_stage() as k:
        record, task = await k.request()
        record.turn_started = 0.0
        await k.seconds(100)
        assert not task.done()


async def test_responsive_idle_engine_is_not_restarted_and_its_processes_are_not_inspected() -> None:
    async with watchdog_stage() as k:
        await k.seconds(100)
        assert not k.watching.done()
        assert k.backend.looks == 0
        assert k.backend.probes == 20


async def test_hanging_probe_blocks_nothing() -> None:
    async with watchdog_stage() as k:
        k.backend.answers = None
        await k.seconds(10)
        _, task = await k.request()
        await k.seconds(11)
        assert task.done()
        assert k.watching.done()
        assert k.backend.probes == 1
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "probe-backend"]


@pytest.mark.parametrize("is_answered", [False, True])
async def test_endlessly_computing_engine_is_restarted_after_two_abandoned_requests(is_answered: bool) -> None:
    async with watchdog_stage() as k:
        for number in range(2):
            record, task = await k.request(f"r{number}")
            for _ in range(20):
                k.backend.cpu_seconds = (k.backend.cpu_seconds or 0.0) + 1.0
                await k.seconds(1)
            record.answered = is_answered
            task.cancel()
            await asyncio.sleep(0)
            await k.seconds(1)
        assert k.watching.done() is not is_answered
        if not is_answered:
            assert k.watching.result().reason is Reason.STALL_TIMEOUT
