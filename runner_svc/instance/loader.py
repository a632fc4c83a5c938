"""How the backend of a life is started: memory first, then the engine; and what is known of earlier starts."""

from collections import deque
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import structlog

from runner_svc.backend.port import Backend, BackendFacts, LoadOrder
from runner_svc.instance.settings import InstanceConfig
from runner_svc.memory.model_memory import ModelMemory
from runner_svc.memory.port import OnWaiting
from runner_svc.policy.load_plan import AS_CONFIGURED
from weft.kernel.clock import Clock
from weft.kernel.interrupt import Interruptible

if TYPE_CHECKING:
    from collections.abc import Callable


log = structlog.get_logger("weft.instance")

MAX_LOAD_TIMES = 5
"""Earlier loads from which the time that is left is told."""
MAX_CRASH_LINES = 2000
MAX_CRASH_BYTES = 64 * 1024
"""How much of a backend's output is kept from its last crash."""

WAITING_FOR_MEMORY = "waiting for memory"
STARTING = "starting"
LOADING = "loading"


class Loader:
    """Starts one backend, again and again, by the plan of the moment."""

    def __init__(self, config: InstanceConfig, backend: Backend, memory: ModelMemory, clock: Clock) -> None:
        self._config = config
        self._backend = backend
        self._memory = memory
        self._clock = clock
        self._log_mark = 0
        self._times: deque[float] = deque(maxlen=MAX_LOAD_TIMES)
        self._start: Interruptible | None = None
        self._engine_began: float | None = None
        self._began: float | None = None
        self.on_slots: Callable[[int], None] = lambda _: None
        """Told how many requests the engine works on at once; 0: as many as are configured."""
        self.plan = AS_CONFIGURED
        """Of the present or next load."""
        self.was_started = False
        """Whether the present attempt has come as far as the backend."""
        self.waits = False
        """Whether it waits for memory."""
        self.context_tokens = 0
        self.starts = 0
        """How often the backend became ready: the number of the present one."""
        self.last_seconds = 0.0
        """From the beginning of the last load that succeeded until it took requests."""

    @property
    def is_otherwise(self) -> bool:
        """Whether the present or next load is otherwise than it is configured."""
        return self.plan != AS_CONFIGURED

    @property
    def stage(self) -> str:
        """What is being done, for people; empty: nothing."""
        if self._began is None:
            return ""
        if self.waits:
            return WAITING_FOR_MEMORY
        return STARTING if self._backend.load_progress() is None else LOADING

    @property
    def eta_seconds(self) -> float | None:
        """How long the engine will still take, from earlier loads; None: unknown, or it does not load yet."""
        if self._engine_began is None or not self._times:
            return None
        return max(0.0, median(self._times) - (self._clock.monotonic() - self._engine_began))

    @property
    def usual_seconds(self) -> float | None:
        """How long the engine usually takes, the wait for memory not included; None: it was not loaded yet."""
        return median(self._times) if self._times else None

    async def start(self, on_waiting: OnWaiting) -> None:
        """Return once the backend takes requests. Raises as Backend.start and MemoryLedger.acquire, and LEASE_LOST."""
        self._began, self.waits = self._clock.monotonic(), True
        try:
            plan = self.plan
            order = await self._memory.take(plan, on_waiting)
            order = replace(order, model_path=self._config.quantizations.get(plan.quantization))
            on_waiting("")
            self.waits = False
            self._memory.require_good()
            self._engine_began = self._clock.monotonic()
            facts = await self._start_engine(order)
            self._note_started(facts)
        finally:
            self._began = self._engine_began = None
            self.waits = False

    def note_lease_lost(self) -> None:
        """Give up a start that is under way."""
        if self._start is not None:
            self._start.interrupt(self._memory.lost_error())

    def last_lines(self) -> tuple[str, ...]:
        """What the present or last process said, as far as it is still there; not what those before it said."""
        kept: list[str] = []
        room = min(MAX_CRASH_BYTES, self._backend.log.total_bytes - self._log_mark)
        for line in reversed(self._backend.log_lines(MAX_CRASH_LINES)):
            room -= len(line.encode()) + 1
            if room < 0:
                break
            kept.append(line)
        return tuple(reversed(kept))

    async def _start_engine(self, order: LoadOrder) -> BackendFacts:
        """The facts; without a lease that goes on to be good the start is given up."""
        self._log_mark, self.was_started = self._backend.log.total_bytes, True
        self._start = Interruptible()
        try:
            with self._start:
                return await self._backend.start(order)
        finally:
            self._start = None
        raise AssertionError("a start that was given up has raised")

    def _note_started(self, facts: BackendFacts) -> None:
        assert self._began is not None
        assert self._engine_began is not None
        now = self._clock.monotonic()
        self._times.append(now - self._engine_began)
        self.last_seconds = now - self._began
        self.context_tokens = facts.context_tokens
        self.on_slots(facts.slots)
        self.starts += 1
        self._memory.note_filled()
        seconds = round(now - self._engine_began, 2)
        log.info("backend ready", model=self._config.model, pid=self._backend.process_id, load_seconds=seconds)
