"""One instance: one model on one backend, served, hibernated and restarted for as long as the runner runs."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner_svc.backend.port import Backend
from runner_svc.cache.model_cache import RequestCache
from runner_svc.instance.admission import AdmittedRequest, RequestLimit, SlotTable
from runner_svc.instance.lifecycle_loop import LifecycleLoop
from runner_svc.instance.settings import RunRecipe, ServedModel, no_recipes
from runner_svc.memory.device_meter import DeviceMeter, RequestMeter
from runner_svc.memory.model_memory import ModelMemory
from runner_svc.memory.port import MemoryLedger
from runner_svc.policy.lifecycle import Command, Phase
from runner_svc.policy.load_plan import AS_CONFIGURED, STAY_LOADED, LoadPlan, LoadSpec
from runner_svc.request_records import RequestRecords
from runner_svc.waiting import within
from weft.kernel.abilities import Abilities, complete_list, known_abilities
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.failures import FailureKind, classify
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft.kernel.service import start_critical, stop_tasks

if TYPE_CHECKING:
    from datetime import datetime

log = get_logger("weft.instance")

LOADING_RETRY_SECONDS = 1.0
YIELDING_MEMORY = "giving way to another model"
"""The state in the error of a request that comes while the instance yields its memory."""
MAX_ATTEMPT_LOG_LINES, MAX_ATTEMPT_LOG_BYTES = 10, 2_048
"""Last lines of the engine's log, and their UTF-8 bytes, that the error of a request has for its record."""


class Instance:
    """One model on one backend: admission, wake, load and unload. `LifecycleLoop` does the work, in one task.

    `on_change` is called with every change that routers should learn of at once.
    """

    def __init__(
        self,
        config: ServedModel,
        backend: Backend,
        clock: Clock,
        on_change: Callable[[], None],
        run_recipe: RunRecipe = no_recipes,
        *,
        limit: RequestLimit | None = None,
        ledger: MemoryLedger | None = None,
    ) -> None:
        self.meter: DeviceMeter | None = None
        """The meter of the devices; None: none is observed for it. Set by its runner."""
        self.config = config
        self.backend = backend
        self.slots = SlotTable(min(config.slots, config.target_inflight or config.slots), limit)
        self.records = RequestRecords(config.name, clock)
        self.memory = ModelMemory(config.name, backend, self.records, ledger or MemoryLedger(), config.forecast)
        self.memory.pinned = config.hibernation.pinned
        self.digest = ""
        """Digest of the model file, once it is known."""
        self.adapter_digests: dict[str, str] = {}
        """Digests of the files of adapters, by name, as far as they are known."""
        self._clock = clock
        self._on_change = on_change
        self._lifecycle = LifecycleLoop(config, backend, self.records, self.memory, clock, on_change, run_recipe)
        self.loader = self._lifecycle.loader
        self.loader.on_slots = self._resize_slots
        self.loader.on_fetched = self._adopt
        self.loader.on_fetch_progress = on_change
        self.on_adopted: Callable[[], None] = lambda: None
        """Called when the model has another backend, since its files were pulled."""
        self.idle_timer = self._lifecycle.idle_timer
        self.restart_log = self._lifecycle.restart_log
        self._waiters = _WakeWaiters(self._lifecycle, config, self.memory, clock)
        self._task: asyncio.Task[None] | None = None
        self._load_lock = asyncio.Lock()
        """Held while a caller of `load` changes the load plan."""
        self._yields_memory = False
        """Whether it has agreed to give its memory to another model."""

    @property
    def model(self) -> str:
        """The model's name in the mesh."""
        return self.config.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which it serves: the model's, and those of its adapters."""
        return self.config.names

    def abilities_of(self, name: str) -> Abilities:
        """Returns what the model takes, or the adapter of this name."""
        adapter = self.config.adapter(name)
        known = self.loader.abilities
        if adapter is None or not adapter.skills:
            return known
        return known_abilities(declared=complete_list(adapter.skills), engine=known)

    @property
    def phase(self) -> Phase:
        """The phase of its lifecycle."""
        return self._lifecycle.state.phase

    @property
    def detail(self) -> str:
        """Why it is in this phase, as text."""
        return self.loader.fetch_stage or self._lifecycle.state.detail

    @property
    def restart_count(self) -> int:
        """Number of restarts of the backend after a fault."""
        return self._lifecycle.state.history.total

    @property
    def load_progress(self) -> float | None:
        """Share of loading done, 0 to 1; None: unknown, or it is not loading."""
        if self.phase is not Phase.LOADING:
            return None
        return self.loader.fetch_share if self.loader.fetches else self.backend.load_progress()

    @property
    def load_stage(self) -> str:
        """The present stage of loading, for people; empty: none."""
        return self.loader.stage or (self.detail if self.phase is Phase.LOADING else "")

    @property
    def load_eta_seconds(self) -> float | None:
        """Remaining time of loading, estimated from earlier loads; None: unknown, or it is not loading."""
        return self.loader.eta_seconds if self.phase is Phase.LOADING else None

    @property
    def model_path(self) -> Path | None:
        """The model's file, as configured; None: there is none, or weft does not manage it."""
        return self.config.model_path

    @property
    def plan(self) -> LoadPlan:
        """The plan of the present or next load."""
        return self.loader.plan

    @property
    def unload_at(self) -> "datetime | None":
        """When the idle timer unloads it unless a request comes, UTC; None: never."""
        return self.idle_timer.ends_at if self.phase is Phase.READY else None

    @property
    def keep_alive_seconds(self) -> float | None:
        """How long it stays loaded after its last request; None: until something unloads it."""
        return self.idle_timer.shown_seconds if self.phase is Phase.READY else None

    async def start(self) -> None:
        """Start the lifecycle task. Returns immediately; the engine loads in the background."""
        self._task = start_critical(self._lifecycle.run(), name=f"instance-{self.model}")

    async def stop(self) -> None:
        """End the backend and everything it started. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await stop_tasks([task])

    def drain(self) -> None:
        """Admit no new requests; running ones go on. The runner is about to end."""
        self._lifecycle.request_drain()

    @contextmanager
    def admit(
        self,
        request_id: str,
        *,
        name: str = "",
        keep_alive_seconds: float | None = None,
        priority: Priority = Priority.NORMAL,
        takes_slot: bool = True,
        cache: RequestCache | None = None,
    ) -> Iterator[AdmittedRequest]:
        """Admit one request for the length of the block: it holds a slot and has a record. For use within one task.

        `name`: the adapter that is requested; empty: the model itself.
        `keep_alive_seconds` is how long the model stays loaded after it: negative is unlimited, None as configured.
        `takes_slot`: False for what the engine does beside its work. `cache`: None: the engine's own is not managed.

        Raises NO_SLOT_AVAILABLE, SHUTTING_DOWN while draining, BACKEND_NOT_READY in any other phase but ready. When the
        backend dies, stalls or is stopped the block is ended with the reason for that.
        """
        if self._lifecycle.stopping:
            raise _shutting_down(self.model)
        if self.phase is not Phase.READY or self._yields_memory:
            state = YIELDING_MEMORY if self.phase is Phase.READY else self.phase.name.lower()
            raise WeftError(
                Reason.BACKEND_NOT_READY,
                f"{self.model} is {state}{': ' + self.detail if self.detail else ''}",
                retry_after_seconds=LOADING_RETRY_SECONDS,
            )
        start = self.loader.starts
        self._lifecycle.idle_timer.note_request_begin(keep_alive_seconds)
        with self.slots.hold(request_id) if takes_slot else nullcontext():
            self.memory.priority = priority
            try:
                with self.records.keep(request_id, name) as record:
                    yield AdmittedRequest(
                        record,
                        self.backend,
                        lambda error: self._lifecycle.note_failure(error, start),
                        cache,
                        self.loader.abilities,
                        self._request_meter(),
                    )
            except WeftError as error:
                if classify(error.reason) is FailureKind.BROKE:
                    error.engine_log = _last_log_lines(self.loader.last_lines())
                raise
            finally:
                self.memory.note_used(self._clock.utc_now())
                self._lifecycle.note_request_end(keep_alive_seconds)

    def _request_meter(self) -> RequestMeter | None:
        if self.meter is None:
            return None
        return RequestMeter(self.meter, self.model, lambda: self.memory.grant)

    async def wake(self, priority: Priority = Priority.NORMAL) -> None:
        """Return once it admits requests. Callers share one wake; cancelling one caller leaves it to the others.

        After the last caller was cancelled the wake goes on, unless it still waits for memory.

        `priority` is that of the request that waits for it: models of a higher one are not evicted for it.

        Raises WAKE_FAILED with the cause: at once while it pauses after a crash, when it is unloaded meanwhile, and
        when it never fits; INSUFFICIENT_MEMORY when there was no memory for it in time; SHUTTING_DOWN when the runner
        is stopping.
        """
        self._require_running()
        if self.phase is Phase.READY:
            return
        awake = self._waiters.request(by_load=False, priority=priority)
        try:
            await self._waiters.wait(awake)
        except WeftError as error:
            if error.reason is Reason.INSUFFICIENT_MEMORY and not self.memory.may_come_later:
                raise WeftError(Reason.WAKE_FAILED, error.message, metadata=error.metadata) from None
            raise

    async def load(self, spec: LoadSpec = STAY_LOADED) -> bool:
        """Load it by `spec`, again if it runs by another plan; returns whether it already was. Callers share one load.

        When the last caller of a load that `load` began is cancelled, the model is unloaded. Raises as `wake`, and
        INSUFFICIENT_MEMORY when it would take more than its budget, or there was none.
        """
        self._require_running()
        if spec.memory_budget_bytes:
            await self.memory.require_budget(spec.plan, spec.memory_budget_bytes)
        async with self._load_lock:
            # In a loop: another caller may have woken it again, as configured, before the plan was set here.
            while self._must_rest_before(spec.plan):
                await self._put_to_sleep()
            self._require_running()
            was_loaded = self.phase is Phase.READY
            awake = None if was_loaded else self._waiters.request(by_load=True, priority=Priority.NORMAL)
            self.loader.plan = spec.plan
            self._pin(spec.pin or self.config.hibernation.pinned)
        if awake is not None:
            await self._waiters.wait(awake, ends_with_last=True)
        # Only now: several callers may load at once, and a cancelled one must not undo what another has set. An
        # unload that was requested meanwhile wins.
        if self.phase is Phase.READY:
            self._pin(spec.pin or self.config.hibernation.pinned)
            self._lifecycle.note_loaded_for(spec.keep_alive_seconds)
        return was_loaded

    def _pin(self, pinned: bool) -> None:
        """Set the pin. Routers learn of it immediately: they would choose the model for eviction otherwise."""
        if pinned != self.memory.pinned:
            self.memory.pin(pinned)
            self._on_change()

    def _must_rest_before(self, plan: LoadPlan) -> bool:
        doing = self._lifecycle.state.doing
        if doing in (Command.REST, Command.SEEK):
            return False
        # A model that is going to sleep resets its load options when it gets there, and would wake as configured.
        falls_asleep = doing is Command.SLEEP and plan != AS_CONFIGURED
        return falls_asleep or self.loader.plan != plan

    async def yield_memory(self, lease_id: str, priority: Priority, wanted_by: str) -> None:
        """Unload the model so that another one can have its memory. Nothing is admitted meanwhile.

        A lease that it does not hold is no error. Raises RESOURCE_IN_USE when it works on a request, is pinned, loads,
        or last worked for a higher priority than `priority`; as `unload`.
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
        log.info("model yields", model=self.model, wanted_by=wanted_by)
        self._yields_memory = True
        try:
            await self._unload(ends_process=False)
        finally:
            self._yields_memory = False

    async def unload(self) -> None:
        """Let running requests end, then put it to sleep and end its process; the next wake loads it.

        A process that sleeps already is ended too. `config.unload_keeps_process`: one that can sleep stays, as after an
        idle time. Raises UNSUPPORTED_OPERATION for a server that weft can neither end nor put to sleep, BACKEND_ERROR
        when its sleep action fails, SHUTTING_DOWN when the runner is stopping.
        """
        await self._unload(ends_process=not self.config.unload_keeps_process)

    async def _unload(self, *, ends_process: bool) -> None:
        if not self.config.hibernation.can_unload:
            raise WeftError(
                Reason.UNSUPPORTED_OPERATION,
                f"{self.model} is served by a server that weft did not start; declare a sleep action for it",
            )
        self._require_running()
        self.idle_timer.load_seconds = None
        if self.phase not in (Phase.HIBERNATING, Phase.FAILED):
            await self._put_to_sleep(ends_process=ends_process)
        elif ends_process and self._lifecycle.keeps_process:
            self._lifecycle.request_end_of_process()
            await self._waiters.bounded(self._lifecycle.asleep.wait(), Reason.BACKEND_NOT_READY)

    async def _put_to_sleep(self, *, ends_process: bool = False) -> None:
        self._require_running()
        self._lifecycle.request_sleep(ends_process=ends_process)
        await self._waiters.bounded(self._lifecycle.asleep.wait(), Reason.BACKEND_NOT_READY)

    def _adopt(self, fetched: ServedModel) -> None:
        """Serve the model with the files that were pulled, by a backend that knows them."""
        self.backend.log.end_followers()
        self.config = replace(fetched, hibernation=self.config.hibernation, added=self.config.added)
        self.backend = fetched.make_backend()
        self.memory.adopt(self.backend, fetched.forecast)
        self._lifecycle.adopt(self.config, self.backend)
        self._waiters.adopt(self.config)
        self.on_adopted()

    def _resize_slots(self, in_force: int) -> None:
        slots = in_force or self.config.slots
        self.slots.resize(min(slots, self.config.target_inflight or slots))

    def _require_running(self) -> None:
        if self._lifecycle.stopping or self._task is None:
            raise _shutting_down(self.model)


class _WakeWaiters:
    """Callers that wait until an instance is awake, and what happens to the wake when the last one is cancelled."""

    def __init__(self, lifecycle: LifecycleLoop, config: ServedModel, memory: ModelMemory, clock: Clock) -> None:
        self._lifecycle = lifecycle
        self._config = config
        self._memory = memory
        self._clock = clock
        self._count = 0
        self._begun_by_load = False
        """Whether the present wake was requested by `Instance.load` alone."""

    def adopt(self, config: ServedModel) -> None:
        """Use the model with its pulled files."""
        self._config = config

    def request(self, *, by_load: bool, priority: Priority) -> Coroutine[Any, Any, None]:
        """Request a wake and return its outcome, to be awaited by `wait`.

        A load ends the pause after a failure that was not for lack of memory; else this raises WAKE_FAILED then.
        """
        state = self._lifecycle.state
        if state.doing is Command.PAUSE and not (by_load and state.reason is not Reason.OUT_OF_MEMORY):
            raise WeftError(Reason.WAKE_FAILED, state.detail, metadata={"model": self._config.name})
        if self._memory.grant is None:
            self._memory.priority = min(priority, self._memory.priority) if self._count else priority
        if not self._lifecycle.wake_requested.is_set() and not self._count:
            self._begun_by_load = by_load and state.phase in (Phase.HIBERNATING, Phase.FAILED)
        self._lifecycle.wake_requested.set()
        return self._lifecycle.awake.wait()

    async def wait(self, awake: Coroutine[Any, Any, None], *, ends_with_last: bool = False) -> None:
        """Wait for the outcome of a wake. `ends_with_last`: the last caller to leave ends a wake that `load` began."""
        self._count += 1
        try:
            if ends_with_last and self._is_own_process():
                await awake  # bounded by the stall check and the wait for memory, not by a time limit here
            else:
                await self.bounded(awake, Reason.WAKE_FAILED)
        except asyncio.CancelledError:
            phase, wake_requested = self._lifecycle.state.phase, self._lifecycle.wake_requested.is_set()
            is_under_way = phase in (Phase.LOADING, Phase.READY) or wake_requested
            is_unwanted = ends_with_last and self._begun_by_load and is_under_way
            if self._count == 1 and (is_unwanted or self._waits_for_memory()):
                self._lifecycle.request_sleep()
            raise
        finally:
            self._count -= 1

    async def bounded(self, outcome: Coroutine[Any, Any, None], reason: Reason) -> None:
        """Await `outcome` for at most the longest wake time; raises `reason` when that has passed."""
        limit = self._config.hibernation.longest_wake_seconds
        try:
            await within(self._clock, limit, outcome)
        except TimeoutError:
            phase = self._lifecycle.state.phase.name.lower()
            raise WeftError(reason, f"{self._config.name} is still {phase} after {limit:g} s") from None

    def _waits_for_memory(self) -> bool:
        """Whether a wake on request has no memory yet: an unwanted wake must not keep its place in the wait queue."""
        lifecycle = self._lifecycle
        return self._is_own_process() and lifecycle.state.doing is Command.WAKE and lifecycle.loader.waits

    def _is_own_process(self) -> bool:
        return not self._config.hibernation.attached and self._config.hibernation.recipe is None


def _last_log_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the last lines with text within the bounds of an attempt; the oldest of them may be cut."""
    kept: list[str] = []
    room = MAX_ATTEMPT_LOG_BYTES
    for line in reversed([line for line in lines if line.strip()][-MAX_ATTEMPT_LOG_LINES:]):
        if room > 0:
            kept.append(line.encode()[:room].decode(errors="ignore"))
            room -= len(line.encode())
    return tuple(reversed(kept))


def _shutting_down(model: str) -> WeftError:
    return WeftError(Reason.SHUTTING_DOWN, f"{model} takes no new work here: the runner is stopping")
