"""The loader of an instance: acquires a memory lease, starts the backend, and measures the duration."""

import asyncio
from collections import deque
from dataclasses import replace
from operator import is_not
from statistics import median
from typing import TYPE_CHECKING

from runner_svc.backend.port import Backend, BackendFacts, LoadOrder
from runner_svc.instance.accepted_forms import AcceptedForms
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.memory.model_memory import ModelMemory
from runner_svc.memory.port import OnWaiting
from runner_svc.policy.load_options import AS_CONFIGURED
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities, known_capabilities
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.cancellation import Interruptible
from weft.kernel.time.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable


log = get_logger("weft.instance")

MAX_LOAD_TIMES = 5
"""Number of earlier loads from which the remaining time is estimated."""
MAX_CRASH_LINES = 2000
MAX_CRASH_BYTES = 64 * 1024
"""Maximum output that is kept of the last crash."""

PULLING = "pulling"
FETCH_STEPS = 10
"""How often the progress of a pull is pushed; regular reports have it too."""
WAITING_FOR_MEMORY = "waiting for memory"
STARTING = "starting"
LOADING = "loading"


class Loader:
    """Starts a backend by the current load plan, once per call."""

    def __init__(self, config: ServedModel, backend: Backend, memory: ModelMemory, clock: Clock) -> None:
        self.config = config
        """The model; another description of it after its files are pulled."""
        self.backend = backend
        """Its engine; another one after its files are pulled."""
        self._memory = memory
        self._clock = clock
        self._log_mark = 0
        self._times: deque[float] = deque(maxlen=MAX_LOAD_TIMES)
        self._start: Interruptible | None = None
        self._engine_began: float | None = None
        self._began: float | None = None
        self.on_slots: Callable[[int], None] = lambda _: None
        """Called with the engine's number of slots; 0: as configured."""
        self.plan = AS_CONFIGURED
        """Plan of the current or next load."""
        self.was_started = False
        """Whether the current attempt has begun to start the backend."""
        self.waits = False
        """Whether it waits for memory."""
        self.on_fetched: Callable[[ServedModel], None] = lambda _: None
        """Called with the model and its pulled files before its engine is started."""
        self.on_fetch_progress: Callable[[], None] = lambda: None
        """Called a few times during a pull to report its progress to routers."""
        self.fetches = False
        """Whether the model's files are being pulled, or the last pull failed."""
        self.fetch_stage = ""
        """Stage of the pull, for people; empty: no pull."""
        self.fetch_share: float | None = None
        """Completed share of the pull; None: unknown, or no pull."""
        self.context_tokens = 0
        self._engine_capabilities = UNKNOWN
        self._engine_quantization = ""
        self._sources = (UNKNOWN, UNKNOWN, UNKNOWN)
        """Those that `_capabilities` were merged from."""
        self._capabilities = UNKNOWN
        self.starts = 0
        """Number of times that the backend became ready; identifies the current start."""
        self.forms = AcceptedForms()
        """The forms of requests that the started engine was found to accept."""
        self.last_seconds = 0.0
        """Duration of the last successful load, including the wait for memory."""

    @property
    def is_otherwise(self) -> bool:
        """Whether the current or next load differs from the configuration."""
        return self.plan != AS_CONFIGURED

    @property
    def capabilities(self) -> Capabilities:
        """The model's capabilities according to its settings, files and engine.

        The engine of another quantization says nothing about the current one.
        """
        engine = self._engine_capabilities if self._engine_quantization == self.plan.quantization else UNKNOWN
        declared, files = self.config.declared_capabilities, self.config.capabilities
        sources = (declared, engine, files)
        # Every request asks twice.
        if any(map(is_not, sources, self._sources)):
            self._sources = sources
            self._capabilities = known_capabilities(declared=declared, engine=engine, files=files)
        return self._capabilities

    @property
    def stage(self) -> str:
        """The current stage of a load, for people; empty: none."""
        if self._began is None:
            return ""
        if self.fetch_stage:
            return self.fetch_stage
        if self.waits:
            return WAITING_FOR_MEMORY
        return STARTING if self.backend.load_progress() is None else LOADING

    @property
    def eta_seconds(self) -> float | None:
        """Estimated remaining time of the engine's start; None: unknown, or it has not begun."""
        if self._engine_began is None or not self._times:
            return None
        return max(0.0, median(self._times) - (self._clock.monotonic() - self._engine_began))

    @property
    def usual_seconds(self) -> float | None:
        """Median duration of the engine's start without the wait for memory; None: never loaded."""
        return median(self._times) if self._times else None

    async def start(self, on_waiting: OnWaiting) -> None:
        """Waits until the backend is ready.

        Raises as Backend.start, MemoryLedger.acquire and FetchModel, and LEASE_LOST.
        """
        self._began = self._clock.monotonic()
        try:
            await self._fetch()
            self.waits = True
            plan = self.plan
            order = await self._memory.take(plan, on_waiting)
            order = replace(order, model_path=self.config.quantizations.get(plan.quantization))
            on_waiting("")
            self.waits = False
            self._memory.require_good()
            self._engine_began = self._clock.monotonic()
            facts = await self._start_engine(order)
            self._note_started(facts)
        finally:
            self._began = self._engine_began = None
            self.waits = False

    def adopt(self, config: ServedModel, backend: Backend) -> None:
        """Uses the pulled files and another backend; the current one was never started."""
        self.config, self.backend = config, backend
        self._log_mark = 0

    async def _fetch(self) -> None:
        """Pulls the model's files if they are missing."""
        self.fetches = False
        fetch, is_here = self.config.fetch, self.config.is_here
        if fetch is None or (is_here is not None and await asyncio.to_thread(is_here)):
            return
        # If this machine lacks something, the load is retried like that of an engine that exits.
        self.fetches = self.config.lack is None
        self.fetch_stage = PULLING if self.fetches else ""
        try:
            fetched = await fetch(self._note_fetch)
        finally:
            self.fetch_stage, self.fetch_share = "", None
        self.on_fetched(fetched)
        self.fetches = False

    def _note_fetch(self, stage: str, share: float | None) -> None:
        before, self.fetch_stage, self.fetch_share = self.fetch_share, stage or PULLING, share
        if _step_of(before) != _step_of(share):
            self.on_fetch_progress()

    def note_lease_lost(self) -> None:
        """Interrupts a start in progress."""
        if self._start is not None:
            self._start.interrupt(self._memory.lost_error())

    def last_lines(self) -> tuple[str, ...]:
        """Returns the output of the current or last process only, as far as the log still has it."""
        kept: list[str] = []
        room = min(MAX_CRASH_BYTES, self.backend.log.total_bytes - self._log_mark)
        for line in reversed(self.backend.log_lines(MAX_CRASH_LINES)):
            room -= len(line.encode()) + 1
            if room < 0:
                break
            kept.append(line)
        return tuple(reversed(kept))

    async def _start_engine(self, order: LoadOrder) -> BackendFacts:
        """Starts the engine; losing the lease interrupts the start."""
        self._log_mark, self.was_started = self.backend.log.total_bytes, True
        self._start = Interruptible()
        try:
            with self._start:
                return await self.backend.start(order)
        finally:
            self._start = None
        raise AssertionError("abandoned engine start failed")

    def _note_started(self, facts: BackendFacts) -> None:
        assert self._began is not None
        assert self._engine_began is not None
        now = self._clock.monotonic()
        self._times.append(now - self._engine_began)
        self.last_seconds = now - self._began
        self.context_tokens = facts.context_tokens
        self._engine_capabilities, self._engine_quantization = facts.capabilities, self.plan.quantization
        self.on_slots(facts.slots)
        self.starts += 1
        self.forms = AcceptedForms()
        self._memory.note_filled()
        seconds = round(now - self._engine_began, 2)
        log.info("engine ready", model=self.config.name, pid=self.backend.process_id, load_seconds=seconds)


def _step_of(share: float | None) -> int:
    return -1 if share is None else int(share * FETCH_STEPS)
