"""An instance with a stepped backend and a fake clock."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from stepped_ledger import StepForecast, SteppedLedger

from runner_svc.backend.port import (
    Backend,
    BackendFacts,
    CallInfo,
    ExitReport,
    LoadOrder,
)
from runner_svc.instance.instance import Instance
from runner_svc.instance.instance_settings import HibernationSettings, ServedModel
from runner_svc.memory.port import MemoryForecast, MemoryLedger
from runner_svc.policy.backoff import RestartLimits
from runner_svc.policy.lifecycle import Phase
from runner_svc.policy.progress import EngineUsage
from runner_svc.supervise.logs import LogRing
from weft.api.common.v1 import chat_pb2
from weft.api.registry.v1.wake_pb2 import WakeRecipe
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft_testing.fake_clock import FakeClock, let_all_run

T = TypeVar("T")
CALL = CallInfo(request_id="r", traceparent="")


class StepBackend(Backend):
    """A backend whose loads and deaths the test controls."""

    process_id = 7

    def __init__(self) -> None:
        self.log = LogRing()
        self.loaded = asyncio.Event()
        self.deaths: asyncio.Queue[str] = asyncio.Queue()
        self.death_reason = Reason.SERVER_DIED
        self.failures: asyncio.Queue[WeftError] = asyncio.Queue()
        """Outcome of a request after one frame."""
        self.error_when_cancelled: WeftError | None = None
        """Error that it raises in place of a quiet end: a broken connection may be noticed first."""
        self.load_error: Exception | None = None
        self.sleeps_in_place = False
        self.resident: int | None = None
        self.starts = 0
        self.orders: list[LoadOrder | None] = []
        self.stops = 0

    def resident_bytes(self) -> int | None:
        return self.resident

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        self.starts += 1
        self.orders.append(order)
        self.log.feed(f"start {self.starts}\nlast words\n".encode())
        await self.loaded.wait()
        if self.load_error is not None:
            raise self.load_error
        return BackendFacts(operations=frozenset({Operation.CHAT}), context_tokens=512)

    def signs(self) -> EngineUsage | None:
        return EngineUsage(cpu_seconds=0.0)

    async def responds(self, timeout_seconds: float) -> bool:
        return True

    async def wait_exit(self) -> ExitReport:
        how = await self.deaths.get()
        return ExitReport(how=how, reason=self.death_reason, exit=how)

    async def sleep(self) -> bool:
        return self.sleeps_in_place

    async def stop(self) -> None:
        self.stops += 1

    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        call.on_token()
        yield []
        try:
            error = await self.failures.get()
        except asyncio.CancelledError:
            if self.error_when_cancelled is None:
                raise
            error = self.error_when_cancelled
        raise error


class RecipeBook:
    """Runs recipes with the outcome that the test sets, and records them."""

    def __init__(self) -> None:
        self.done: list[WakeRecipe] = []
        self.error: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def run(self, recipe: WakeRecipe, timeout_seconds: float) -> None:
        self.done.append(recipe)
        await self.go.wait()
        if self.error is not None:
            raise self.error


class Stage:
    """An instance, its backend, its clock, and the reported phases."""

    def __init__(
        self,
        hibernation: HibernationSettings | None = None,
        book: SteppedLedger | None = None,
        *,
        unload_keeps_process: bool = False,
        engine: StepBackend | None = None,
        **limits: Any,
    ) -> None:
        self.clock = FakeClock()
        self.backend = engine or StepBackend()
        self.recipes = RecipeBook()
        self.told: list[Phase] = []
        self.forecast: MemoryForecast = MemoryForecast() if book is None else StepForecast()
        config = ServedModel(
            name="m",
            make_backend=lambda: self.backend,
            slots=2,
            forecast=self.forecast,
            restart=RestartLimits(**limits),
            hibernation=hibernation or HibernationSettings(),
            unload_keeps_process=unload_keeps_process,
        )
        self.instance = Instance(
            config,
            self.backend,
            self.clock,
            lambda: self.told.append(self.instance.phase),
            self.recipes.run,
            ledger=book or MemoryLedger(),
        )

    @property
    def state(self) -> tuple[Phase, str]:
        return self.instance.phase, self.instance.detail

    async def request(self, request_id: str = "r", **options: Any) -> "asyncio.Task[WeftError | None]":
        """Starts a request; returns its task. `options` as of Instance.admit."""

        async def hold() -> WeftError | None:
            try:
                with self.instance.admit(request_id, **options) as work:
                    async for _ in work.generate(chat_pb2.ChatPayload(), CALL):
                        pass
            except WeftError as error:
                return error
            return None

        task = asyncio.create_task(hold())
        for _ in range(3):
            await asyncio.sleep(0)
        return task

    async def settle(self) -> None:
        await let_all_run()

    async def advance(self, seconds: float) -> None:
        await self.clock.advance(seconds)
        await self.settle()

    async def begin(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Starts a call, and returns its task when it waits or has ended."""
        task = asyncio.create_task(work)
        await self.settle()
        return task

    async def die(self, how: str = "signal SIGKILL") -> None:
        self.backend.deaths.put_nowait(how)
        await self.settle()

    async def leave(self, task: "asyncio.Task[Any]") -> None:
        """Cancels a call, as when its caller leaves."""
        task.cancel()
        await self.settle()


@asynccontextmanager
async def living(
    book: SteppedLedger | None = None,
    *,
    loads: bool = True,
    load_error: Exception | None = None,
    limits: Mapping[str, Any] | None = None,
    unload_keeps_process: bool = False,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """Yields a started instance. Its loads end immediately if `loads`, with `load_error` if there is one.

    `limits`: of RestartLimits; `settings`: of HibernationSettings.
    """
    stage = Stage(HibernationSettings(**settings), book, unload_keeps_process=unload_keeps_process, **(limits or {}))
    stage.backend.load_error = load_error
    if loads:
        stage.backend.loaded.set()
    await stage.instance.start()
    await stage.settle()
    try:
        yield stage
    finally:
        await stage.instance.stop()


async def outcome(work: "asyncio.Task[Any]") -> WeftError | None:
    try:
        await work
    except WeftError as error:
        return error
    return None


async def failure(work: Awaitable[Any]) -> WeftError:
    with pytest.raises(WeftError) as failed:
        await work
    return failed.value
