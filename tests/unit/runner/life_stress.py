"""A model's lifecycle under random calls, faults and stops, and its invariants."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kit.recipes import command_recipe

from runner_svc.backend.port import (
    Backend,
    BackendFacts,
    CallInfo,
    ExitReport,
    LoadOrder,
)
from runner_svc.instance.instance import Instance
from runner_svc.instance.instance_settings import HibernationSettings, ServedModel, SleepSettings
from runner_svc.memory.port import (
    MemoryForecast,
    MemoryLedger,
    MemoryUser,
    OnWaiting,
)
from runner_svc.policy.lifecycle import Phase
from runner_svc.policy.load_options import LoadPlan, LoadSpec
from runner_svc.policy.memory_estimate import EstimateSource, MemoryEstimate
from runner_svc.policy.progress import EngineUsage
from runner_svc.supervise.logs import LogRing
from weft.api.common.v1 import chat_pb2
from weft.api.registry.v1.lease_pb2 import DeviceBytes, Lease
from weft.api.registry.v1.lease_service_pb2 import AcquireLeaseRequest
from weft.api.registry.v1.wake_pb2 import WakeRecipe
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation, Priority
from weft_testing.fake_clock import FakeClock

RECIPE = command_recipe(argv=("wake",))
ACTION = command_recipe(argv=("suspend",))
KINDS = (
    HibernationSettings(),
    HibernationSettings(start_asleep=True, sleep=SleepSettings(after_seconds=20.0)),
    HibernationSettings(recipe=RECIPE, sleep=SleepSettings(after_seconds=5.0, action=ACTION)),
    HibernationSettings(attached=True),
    HibernationSettings(attached=True, woken_by_mesh=True),
    HibernationSettings(attached=True, sleep=SleepSettings(after_seconds=9.0, action=ACTION)),
    HibernationSettings(attached=True, recipe=RECIPE, sleep=SleepSettings(after_seconds=9.0, action=ACTION)),
)
LOAD_FAILURES = (Reason.SERVER_DIED, Reason.OUT_OF_MEMORY, Reason.LOAD_STALLED, Reason.CONNECT_FAILED)
REQUEST_FAILURES = (Reason.CONNECT_FAILED, Reason.HEADERS_TIMEOUT, Reason.BACKEND_ERROR)
SAFETY_SECONDS = 1000.0
"""Longer than every pause and wait of a lifecycle."""
STEP_SECONDS = 5.0
TURNS = 60
"""Turns of the event loop in which everything that does not wait for time proceeds."""


class RandomBackend(Backend):
    """A backend with random delays and failures that counts its processes."""

    def __init__(self, random: Random, clock: FakeClock, *, attached: bool) -> None:
        self._random = random
        self._clock = clock
        self._attached = attached
        self.log = LogRing()
        self.process_count = 0
        self.most_processes = 0
        self.ready = False
        self.failing = 0.4
        """Share of starts, sleeps and wakes that go wrong."""
        self._death: asyncio.Future[ExitReport] | None = None

    @property
    def process_id(self) -> int | None:
        return 7 if self.process_count and not self._attached else None

    async def dawdle(self) -> None:
        """Wait for some turns of the event loop, or some seconds."""
        if self._random.random() < 0.5:
            await self._clock.sleep(self._random.choice((0.01, 1.0, 8.0)))
        for _ in range(self._random.randrange(6)):
            await asyncio.sleep(0)

    def fails(self) -> bool:
        return self._random.random() < self.failing

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        self.process_count += 1
        self.most_processes = max(self.process_count, self.most_processes)
        try:
            self._death = asyncio.get_running_loop().create_future()
            self.log.feed(b"loading\n")
            await self.dawdle()
            self._load()
            await self.dawdle()
        except BaseException:
            await self.stop()
            raise
        self.ready = True
        return BackendFacts(operations=frozenset({Operation.CHAT}), context_tokens=512)

    def _load(self) -> None:
        if self.fails():
            if self._random.random() < 0.1:
                raise RuntimeError("nobody foresaw this")
            raise WeftError(self._random.choice(LOAD_FAILURES), "it did not load")

    def die(self) -> None:
        if self._death is not None and not self._death.done():
            reason = self._random.choice((Reason.SERVER_DIED, Reason.OUT_OF_MEMORY))
            self._death.set_result(ExitReport(reason=reason, how="signal SIGKILL"))

    async def wait_exit(self) -> ExitReport:
        assert self._death is not None, "wait_exit before start"
        return await asyncio.shield(self._death)

    async def stop(self) -> None:
        self.ready = False
        try:
            await asyncio.sleep(0)
        finally:
            self.process_count = 0  # a stop that is cancelled kills at once

    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        while True:
            await self.dawdle()
            if self.fails():
                raise WeftError(self._random.choice(REQUEST_FAILURES), "it broke")
            call.on_token()
            yield []
            if self._random.random() < 0.3:
                return

    def signs(self) -> EngineUsage | None:
        return None if self._attached else EngineUsage(cpu_seconds=self._clock.monotonic())

    async def responds(self, timeout_seconds: float) -> bool:
        return self._random.random() < 0.7


class RandomLedger(MemoryLedger):
    """A ledger that grants, refuses and revokes leases at random, and counts them."""

    def __init__(self, random: Random, backend: RandomBackend) -> None:
        self._random = random
        self._backend = backend
        self.held: dict[str, MemoryUser] = {}
        self.most_held = 0
        self.granted = 0
        self.broken: list[str] = []

    async def acquire(self, wish: AcquireLeaseRequest, user: MemoryUser, on_waiting: OnWaiting) -> Lease | None:
        on_waiting("waiting for memory")
        await self._backend.dawdle()
        if self._backend.fails() and self._random.random() < 0.5:
            raise WeftError(self._random.choice((Reason.INSUFFICIENT_MEMORY, Reason.SERVICE_UNAVAILABLE)), "none left")
        self.granted += 1
        shares = [DeviceBytes(device_index=0, bytes=wish.bytes)]
        grant = Lease(lease_id=f"l{self.granted}", fencing_number=self.granted, shares=shares)
        self.held[grant.lease_id] = user
        self.most_held = max(self.most_held, len(self.held))
        return grant

    def is_good(self, grant: Lease) -> bool:
        return grant.lease_id in self.held and (self._backend.failing == 0.0 or self._random.random() < 0.9)

    def note_change(self) -> None:
        pass

    def release(self, grant: Lease) -> None:
        if self._backend.process_count:
            self.broken.append("a lease was given up under a process")
        self.held.pop(grant.lease_id, None)

    def lose(self) -> None:
        held, self.held = self.held, {}
        for user in held.values():
            user.note_lease_lost("somebody else's")


class SteadyForecast(MemoryForecast):
    async def expect(self, plan: LoadPlan) -> MemoryEstimate | None:
        del plan
        return MemoryEstimate(bytes=1, source=EstimateSource.NAME)

    async def context_within(self, plan: LoadPlan, budget_bytes: int) -> int | None:
        raise AssertionError("not in these tests")

    def note_taken(self, plan: LoadPlan, taken_bytes: int) -> None:
        raise AssertionError("not in these tests")


@dataclass
class Stress:
    """One lifecycle under stress: its callers and the violations found."""

    seed: int
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.clock = FakeClock()
        settings = KINDS[self.seed % len(KINDS)]
        self.backend = RandomBackend(self.random, self.clock, attached=settings.attached)
        forecast = MemoryForecast() if settings.attached else SteadyForecast()
        config = ServedModel(
            name="m", make_backend=lambda: self.backend, slots=2, hibernation=settings, forecast=forecast
        )
        self.book = RandomLedger(self.random, self.backend)
        ledger = MemoryLedger() if settings.attached else self.book
        self.instance = Instance(config, self.backend, self.clock, self.check, self._run_recipe, ledger=ledger)
        self.asked: list[asyncio.Task[None]] = []
        self.moves: list[Callable[[], object]] = [
            lambda: self._ask("wake", self.instance.wake()),
            lambda: self._ask("load", self._load()),
            lambda: self._ask("yield", self._yield()),
            self.book.lose,
            lambda: self._ask("unload", self.instance.unload()),
            lambda: self._ask("request", self._request()),
            lambda: self._ask("request", self._request()),
            self.backend.die,
            lambda: self.random.choice(self.asked).cancel() if self.asked else None,
        ]

    async def run(self, moves: int = 40) -> None:
        """Run a number of random events; afterwards no caller waits and no process is left."""
        await self.instance.start()
        for _ in range(moves):
            self.random.choice(self.moves)()
            if self.random.random() < 0.3:
                await self._pass(self.random.choice((0.01, 1.0, 3.0, 30.0)))
            for _ in range(self.random.randrange(8)):
                self.check()
                await asyncio.sleep(0)
        if self.random.random() < 0.5:
            await self._calm_down()
        if self.random.random() < 0.5:
            self.instance.drain()
            await self.clock.advance(self.random.choice((0.0, 1.0, 30.0)))
        await self._end()
        for task in self.asked:
            task.cancel()
        await asyncio.gather(*self.asked, return_exceptions=True)

    async def _pass(self, seconds: float) -> None:
        """Advance the clock in steps, so that an action of one step can end in the next."""
        while seconds > 0.0:
            step = min(seconds, STEP_SECONDS)
            await self.clock.advance(step)
            seconds -= step
            for _ in range(TURNS if seconds > 0.0 else 0):
                await asyncio.sleep(0)

    def check(self) -> None:
        if self.instance.phase in (Phase.READY, Phase.DRAINING) and not self.backend.ready:
            self._note(f"{self.instance.phase.name} without a backend")
        if self.backend.most_processes > 1:
            self._note("two processes at once")
        if self.book.most_held > 1:
            self._note("two leases at once")
        for words in self.book.broken:
            self._note(words)
        if self.instance.phase is Phase.HIBERNATING and (self.book.held or self.instance.memory.grant is not None):
            self._note("it sleeps with a lease")

    async def _calm_down(self) -> None:
        """Stop all failures: every caller must get an answer, and the model must serve."""
        self.backend.failing = 0.0
        await self._pass(SAFETY_SECONDS)
        self._note_unanswered("in calm weather")
        waking = asyncio.create_task(self.instance.wake())
        self.asked.append(waking)
        await self._pass(SAFETY_SECONDS)
        if not waking.done() or waking.exception() is not None:
            self._note(f"it cannot be woken any more: {self.instance.phase.name} {waking}")

    async def _end(self) -> None:
        stopping = asyncio.create_task(self.instance.stop())
        await self._pass(60.0)
        if not stopping.done():
            self._note(f"it does not stop: {self.instance.phase.name}")
            return
        self._note_unanswered("after the end")
        if self.backend.process_count or self.instance.phase is not Phase.IDLE:
            self._note(f"left: {self.backend.process_count} processes, {self.instance.phase.name}")
        if self.book.held or self.instance.memory.grant is not None:
            self._note("left: a lease")
        if self.instance.slots.holders or self.instance.records.running:
            self._note("left: requests")

    def _note_unanswered(self, when: str) -> None:
        for task in self.asked:
            if not task.done():
                self._note(f"{when} nobody answered {task.get_name()}")
            elif not task.cancelled() and (error := task.exception()) is not None:
                if not isinstance(error, WeftError):
                    self._note(f"{task.get_name()} ended with {error!r}")
                elif "is still" in error.message and "loading" not in error.message:
                    # A model that fails to load again and again may take longer than anybody waits.
                    self._note(f"{task.get_name()} gave up: {error.message}")

    def _note(self, what: str) -> None:
        if what not in self.broken:
            self.broken.append(what)

    def _ask(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        self.asked.append(asyncio.create_task(work, name=f"{what} {len(self.asked)}"))

    async def _load(self) -> None:
        context = self.random.choice((512, 512, 1024))
        wish = LoadSpec(
            plan=LoadPlan(parameters={"context_tokens": context}),
            keep_alive_seconds=self.random.choice((-1.0, 0.0, 5.0)),
            pin=self.random.random() < 0.1,
        )
        await self.instance.load(wish)

    async def _yield(self) -> None:
        await self.instance.yield_memory(f"l{self.book.granted}", Priority.NORMAL, "somebody else")

    async def _request(self) -> None:
        keep_alive_seconds = self.random.choice((None, None, -1.0, 0.0, 3.0))
        priority = self.random.choice(tuple(Priority))
        held = self.instance.admit(f"r{len(self.asked)}", keep_alive_seconds=keep_alive_seconds, priority=priority)
        with held as work:
            async for _ in work.generate(chat_pb2.ChatPayload(), CallInfo(request_id="r", traceparent="")):
                await self.backend.dawdle()

    async def _run_recipe(self, recipe: WakeRecipe, timeout_seconds: float) -> None:
        del recipe, timeout_seconds
        await self.backend.dawdle()
        if self.backend.fails():
            raise WeftError(Reason.WAKE_FAILED, "exit code 1")


async def broken_seeds(seeds: range) -> dict[int, list[str]]:
    found = {}
    for seed in seeds:
        stress = Stress(seed)
        await stress.run()
        if stress.broken:
            found[seed] = stress.broken
    return found
