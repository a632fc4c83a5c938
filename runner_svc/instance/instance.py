"""One instance: one model on one backend, kept running or asleep for as long as the runner runs."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from runner_svc.backend.port import Backend
from runner_svc.instance.admission import AdmittedRequest, RequestLimit, SlotTable
from runner_svc.instance.lifecycle_loop import LifecycleLoop
from runner_svc.instance.restart_log import Restart
from runner_svc.instance.settings import InstanceConfig, RunRecipe, no_recipes
from runner_svc.memory.model_memory import ModelMemory
from runner_svc.memory.port import MemoryAccount
from runner_svc.policy.life_events import Command, Phase
from runner_svc.policy.load_plan import AS_CONFIGURED, STAY_LOADED, LoadPlan, LoadSpec
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.request_records import RequestRecords
from runner_svc.waiting import within
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft.kernel.service import start_critical, stop_tasks

if TYPE_CHECKING:
    from datetime import datetime


log = structlog.get_logger("weft.instance")

LOADING_RETRY_SECONDS = 1.0
GIVING_WAY = "giving way to another model"


class Instance:
    """What others see of a backend's life and may ask of it. `LifecycleLoop` does the work, in one task.

    `on_change` is called with every change that routers should hear of at once.
    """

    def __init__(
        self,
        config: InstanceConfig,
        backend: Backend,
        clock: Clock,
        on_change: Callable[[], None],
        run_recipe: RunRecipe = no_recipes,
        limit: RequestLimit | None = None,
        account: MemoryAccount | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self.backend = backend
        self.slots = SlotTable(min(config.slots, config.target_inflight or config.slots), limit)
        self.records = RequestRecords(config.model, clock)
        self.memory = ModelMemory(config.model, backend, self.records, account or MemoryAccount())
        self.memory.pinned = config.hibernation.pinned
        self._on_change = on_change
        self._life = LifecycleLoop(config, backend, self.records, self.memory, clock, on_change, run_recipe)
        self._life.loader.on_slots = self._note_slots
        self._turn = asyncio.Lock()
        """Held while somebody decides how it is loaded."""
        self._waiting = 0
        """Callers that wait for it to be awake."""
        self._begun_by_load = False
        """Whether it wakes because somebody called `load`, and for nobody else."""
        self._gives_way = False
        """Whether it has promised its memory to somebody else."""
        self.digest = ""
        """Digest of the model file, once it is known."""

    @property
    def model(self) -> str:
        """The model's name in the mesh."""
        return self._config.model

    @property
    def phase(self) -> Phase:
        """Where it is in its life."""
        return self._life.state.phase

    @property
    def detail(self) -> str:
        """Why it is in this phase, in words."""
        return self._life.state.detail

    @property
    def context_tokens(self) -> int:
        """Context of one slot; 0 until it was loaded."""
        return self._life.loader.context_tokens

    @property
    def last_restart_reason(self) -> str:
        """How the backend last ended by itself."""
        return self._life.restarts.last_detail

    @property
    def restart_count(self) -> int:
        """How often the backend was restarted after a fault."""
        return self._life.state.history.total

    @property
    def fault_count(self) -> int:
        """How often the backend ended because of a fault, counted when that was noticed."""
        return self._life.restarts.total

    @property
    def restarts(self) -> tuple[Restart, ...]:
        """The last restarts after a fault, oldest first."""
        return self._life.restarts.all

    @property
    def crash_lines(self) -> tuple[str, ...]:
        """The backend's output up to its last crash, oldest first."""
        return self._life.crash_lines

    @property
    def last_ready_at(self) -> "datetime | None":
        """UTC; None: it never was ready."""
        return self._life.last_ready_at

    @property
    def load_progress(self) -> float | None:
        """Share of loading done, 0 to 1; None: unknown, or it does not load."""
        return self.backend.load_progress() if self.phase is Phase.LOADING else None

    @property
    def load_stage(self) -> str:
        """What is being done to load it, for people; empty: nothing."""
        return self._life.loader.stage or (self.detail if self.phase is Phase.LOADING else "")

    @property
    def load_eta_seconds(self) -> float | None:
        """How long loading will still take, from earlier loads; None: unknown, or it does not load."""
        return self._life.loader.eta_seconds if self.phase is Phase.LOADING else None

    @property
    def usual_load_seconds(self) -> float | None:
        """How long a load takes as earlier ones did, the wait for memory not included; None: there was none."""
        return self._life.loader.usual_seconds

    @property
    def load_seconds(self) -> float:
        """How long the last load that succeeded took, waiting for memory included."""
        return self._life.loader.last_seconds

    @property
    def vision_input(self) -> bool:
        """Whether it takes images."""
        return self._config.vision_input

    @property
    def quantizations(self) -> Mapping[str, Path]:
        """Further files of the model by quantization."""
        return self._config.quantizations

    @property
    def model_path(self) -> Path | None:
        """The model's file, as configured; None: there is none, or it is not ours."""
        return self._config.model_path

    @property
    def plan(self) -> LoadPlan:
        """How it is loaded, or will be next."""
        return self._life.loader.plan

    @property
    def load_keep_alive_seconds(self) -> float | None:
        """What whoever loaded it said."""
        return self._life.idle.load_seconds

    @property
    def unload_at(self) -> "datetime | None":
        """When it goes to sleep unless a request comes, UTC; None: not by itself."""
        return self._life.idle.ends_at if self.phase is Phase.READY else None

    @property
    def timeouts(self) -> TimeoutProfile:
        """The limits of time it works under."""
        return self._config.timeouts

    async def start(self) -> None:
        """Begin its life. Returns at once; the backend loads in the background."""
        self._task = start_critical(self._life.run(), name=f"instance-{self.model}")

    async def stop(self) -> None:
        """End the backend and everything it started. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await stop_tasks([task])

    def drain(self) -> None:
        """Take nothing new; what runs goes on. The runner is about to end."""
        self._life.ask_drain()

    @contextmanager
    def admit(
        self,
        request_id: str,
        *,
        keep_alive_seconds: float | None = None,
        priority: Priority = Priority.NORMAL,
        takes_slot: bool = True,
    ) -> Iterator[AdmittedRequest]:
        """What one request works with, with a slot held and a record kept meanwhile; to be used within one task.

        `keep_alive_seconds` is how long the model stays loaded after it: negative is for ever, None as it is set up.
        `takes_slot`: False for what the engine does beside its work.

        Raises NO_SLOT_AVAILABLE, SHUTTING_DOWN while draining, BACKEND_NOT_READY in any other phase but ready. When the
        backend dies, stalls or is stopped the block is ended with the reason for that.
        """
        if self._life.stopping:
            raise self._shutting_down()
        if self.phase is not Phase.READY or self._gives_way:
            state = GIVING_WAY if self.phase is Phase.READY else self.phase.name.lower()
            raise WeftError(
                Reason.BACKEND_NOT_READY,
                f"{self.model} is {state}{': ' + self.detail if self.detail else ''}",
                retry_after_seconds=LOADING_RETRY_SECONDS,
            )
        start = self._life.loader.starts
        counted = self._counted(keep_alive_seconds, priority)
        slot = self.slots.hold(request_id) if takes_slot else nullcontext()
        with slot, counted, self.records.keep(request_id) as record:
            yield AdmittedRequest(record, self.backend, lambda error: self._life.note_failure(error, start))

    @contextmanager
    def _counted(self, keep_alive_seconds: float | None, priority: Priority) -> Iterator[None]:
        """The time that a request is worked on, as far as the model's memory and its unload timer go."""
        self.memory.priority = priority
        try:
            yield
        finally:
            self.memory.note_used(self._clock.utc_now())
            self._life.note_request_end(keep_alive_seconds)

    async def wake(self, priority: Priority = Priority.NORMAL) -> None:
        """Return once it takes requests. Callers share one wake; cancelling one leaves it to the others.

        When the last one leaves it goes on, unless it still waits for memory.

        `priority` is that of the request that waits for it: models of a higher one do not give way.

        Raises WAKE_FAILED with what went wrong, at once while it pauses after a crash, when it is unloaded before, and
        when it never fits; INSUFFICIENT_MEMORY when there was no memory for it in time; SHUTTING_DOWN when the runner
        is stopping.
        """
        self._require_running()
        if self.phase is Phase.READY:
            return
        awake = self._ask_awake(by_load=False, priority=priority)
        try:
            await self._awaited(awake)
        except WeftError as error:
            if error.reason is Reason.INSUFFICIENT_MEMORY and not self.memory.may_come_later:
                raise WeftError(Reason.WAKE_FAILED, error.message, metadata=error.metadata) from None
            raise

    async def load(self, wish: LoadSpec = STAY_LOADED) -> bool:
        """Load it so, again if it runs otherwise; returns whether it was loaded so already. Callers share one load.

        When the last one who waits for a load that a call began is cancelled, it is unloaded. Raises as `wake`, and
        INSUFFICIENT_MEMORY when it would take more than it may, or there was none.
        """
        self._require_running()
        if wish.memory_budget_bytes:
            await self.memory.require_budget(wish.plan, wish.memory_budget_bytes)
        async with self._turn:
            # Until it rests: somebody else may have woken it again, as configured, before we get to say how.
            while self._must_rest_before(wish.plan):
                await self._put_to_sleep()
            self._require_running()
            was_loaded = self.phase is Phase.READY
            awake = None if was_loaded else self._ask_awake(by_load=True, priority=Priority.NORMAL)
            self._life.loader.plan = wish.plan
            self._pin(wish.pin or self._config.hibernation.pinned)
        if awake is not None:
            await self._awaited(awake, ends_with_last=True)
        # Not before: several may load at once, and one that gives up must not undo what another has done. An unload
        # that was asked for meanwhile has the last word.
        if self.phase is Phase.READY:
            self._pin(wish.pin or self._config.hibernation.pinned)
            self._life.note_loaded_for(wish.keep_alive_seconds)
        return was_loaded

    def _pin(self, pinned: bool) -> None:
        """Routers hear of it at once: they would have it give way otherwise."""
        if pinned != self.memory.pinned:
            self.memory.pin(pinned)
            self._on_change()

    def _must_rest_before(self, plan: LoadPlan) -> bool:
        doing = self._life.state.doing
        if doing in (Command.REST, Command.SEEK):
            return False
        # One that falls asleep forgets its options when it gets there, and would wake as configured.
        falls_asleep = doing is Command.SLEEP and plan != AS_CONFIGURED
        return falls_asleep or self._life.loader.plan != plan

    def _ask_awake(self, *, by_load: bool, priority: Priority) -> Coroutine[Any, Any, None]:
        if self._life.state.doing is Command.PAUSE:
            raise WeftError(Reason.WAKE_FAILED, self.detail, metadata={"model": self.model})
        if self.memory.grant is None:
            self.memory.priority = min(priority, self.memory.priority) if self._waiting else priority
        if not self._life.wake_asked.is_set() and not self._waiting:
            self._begun_by_load = by_load and self.phase in (Phase.HIBERNATING, Phase.FAILED)
        self._life.wake_asked.set()
        return self._life.awake.wait()

    async def _awaited(self, awake: Coroutine[Any, Any, None], *, ends_with_last: bool = False) -> None:
        hibernation, self._waiting = self._config.hibernation, self._waiting + 1
        try:
            if ends_with_last and not hibernation.attached and hibernation.recipe is None:
                await awake  # given up when it stalls, or memory does not come, and not by a clock of ours
            else:
                await self._bounded(awake, Reason.WAKE_FAILED)
        except asyncio.CancelledError:
            is_under_way = self.phase in (Phase.LOADING, Phase.READY) or self._life.wake_asked.is_set()
            is_unwanted = ends_with_last and self._begun_by_load and is_under_way
            if self._waiting == 1 and (is_unwanted or self._waits_for_memory()):
                self._life.ask_sleep()
            raise
        finally:
            self._waiting -= 1

    def _waits_for_memory(self) -> bool:
        """Whether a wake that calls began has no memory yet. Nobody is to wait behind it when nobody wants it."""
        hibernation, life = self._config.hibernation, self._life
        is_own = not hibernation.attached and hibernation.recipe is None
        return is_own and life.state.doing is Command.WAKE and life.loader.waits

    async def yield_memory(self, lease_id: str, priority: Priority, wanted_by: str) -> None:
        """Go to sleep so that somebody else can have the memory; nothing begins meanwhile. None to give is no error.

        Raises RESOURCE_IN_USE when it works on a request, is pinned, loads, or last worked for a higher priority than
        `priority`; as `unload`.
        """
        grant = self.memory.grant
        if grant is None or grant.lease_id != lease_id:
            return
        why = ""
        if self.slots.holders or self.records.running:
            why = "works on a request"
        elif self.memory.pinned:
            why = "is pinned"
        elif self.memory.priority < priority:
            why = "last worked for a request of a higher priority"
        elif self.phase not in (Phase.READY, Phase.STOPPING):
            why = f"is {self.phase.name.lower()}"
        if why:
            raise WeftError(Reason.RESOURCE_IN_USE, f"{self.model} keeps its memory: it {why}")
        log.info("model gives way", model=self.model, wanted_by=wanted_by)
        self._gives_way = True
        try:
            await self.unload()
        finally:
            self._gives_way = False

    async def unload(self) -> None:
        """Let running requests end, then put it to sleep; the next wake loads it.

        Raises UNSUPPORTED_OPERATION for a server that weft can neither end nor put to sleep, BACKEND_ERROR when its
        sleep action fails, SHUTTING_DOWN when the runner is stopping.
        """
        if not self._config.hibernation.can_unload:
            raise WeftError(
                Reason.UNSUPPORTED_OPERATION,
                f"{self.model} is served by a server that weft did not start; declare a sleep action for it",
            )
        self._require_running()
        self._life.idle.load_seconds = None
        if self.phase not in (Phase.HIBERNATING, Phase.FAILED):
            await self._put_to_sleep()

    async def _put_to_sleep(self) -> None:
        self._require_running()
        self._life.ask_sleep()
        await self._bounded(self._life.asleep.wait(), Reason.BACKEND_NOT_READY)

    def _note_slots(self, in_force: int) -> None:
        slots = in_force or self._config.slots
        self.slots.resize(min(slots, self._config.target_inflight or slots))

    def _require_running(self) -> None:
        if self._life.stopping or self._task is None:
            raise self._shutting_down()

    def _shutting_down(self) -> WeftError:
        return WeftError(Reason.SHUTTING_DOWN, f"{self.model} takes no new work here: the runner is stopping")

    async def _bounded(self, outcome: Coroutine[Any, Any, None], reason: Reason) -> None:
        limit = self._config.hibernation.longest_wake_seconds
        try:
            await within(self._clock, limit, outcome)
        except TimeoutError:
            message = f"{self.model} is still {self.phase.name.lower()} after {limit:g} s"
            raise WeftError(reason, message) from None
