"""An instance: one model on one backend, which is served, hibernated and restarted while the runner runs."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from runner_svc.backend.port import Backend
from runner_svc.cache.model_cache import RequestCache
from runner_svc.instance.admission import AdmittedRequest, RequestLimit, SlotTable
from runner_svc.instance.instance_settings import RunRecipe, ServedModel, no_recipes
from runner_svc.instance.lifecycle_loop import IdleWork, LifecycleLoop
from runner_svc.memory.device_meter import DeviceMeter, RequestMeter
from runner_svc.memory.model_memory import ModelMemory
from runner_svc.memory.port import MemoryLedger
from runner_svc.policy.kept_prompts import KeptPrompt
from runner_svc.policy.lifecycle import Command, Phase
from runner_svc.policy.load_options import AS_CONFIGURED, STAY_LOADED, LoadPlan, LoadSpec
from runner_svc.request_records import RequestRecord, RequestRecords
from runner_svc.waiting import within
from weft.dispatch.placement import MAX_ATTEMPT_LOG_BYTES, MAX_ATTEMPT_LOG_LINES
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.failover import FailureKind, classify
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import Capabilities, complete_list, known_capabilities
from weft.kernel.requests.request_values import Priority
from weft.kernel.services.service_lifecycle import start_critical, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

if TYPE_CHECKING:
    from datetime import datetime

    from weft.api.registry.v1 import model_pb2

log = get_logger("weft.instance")

LOADING_RETRY_SECONDS = 1.0
YIELDING_MEMORY = "yielding its memory to another model"
"""The state in errors of requests that arrive while the instance yields its memory."""
LOADED_OTHERWISE = "it was loaded with other options meanwhile"


class Instance:
    """One model on one backend: admission, wake, load and unload. `LifecycleLoop` does the work in one task.

    `on_change` is called with every change that routers should learn immediately.
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
        """The meter of the devices, set by the runner; None: they are not observed."""
        self.config = config
        self.backend = backend
        self.slots = SlotTable(min(config.slots, config.target_inflight or config.slots), limit)
        self.records = RequestRecords(config.name, clock)
        self.memory = ModelMemory(config.name, backend, self.records, ledger or MemoryLedger(), config.forecast)
        self.memory.pinned = config.hibernation.pinned
        self.digest = ""
        """Digest of the model file; empty until it is known."""
        self.price: model_pb2.ModelPrice | None = None
        """What its provider charges; None: unknown, or not read yet."""
        self.adapter_digests: dict[str, str] = {}
        """Known digests of adapter files, by name."""
        self._clock = clock
        self._on_change = on_change
        self._lifecycle = LifecycleLoop(config, backend, self.records, self.memory, clock, on_change, run_recipe)
        self.idle_work = IdleWork()
        self.loader = self._lifecycle.loader
        self.loader.on_slots = self._resize_slots
        self.loader.on_fetched = self._adopt
        self.loader.on_fetch_progress = on_change
        self.on_adopted: Callable[[], None] = lambda: None
        """Called when the model gets another backend after its files were pulled."""
        self.idle_timer = self._lifecycle.idle_timer
        self.restart_log = self._lifecycle.restart_log
        self._waiters = _WakeWaiters(self._lifecycle, config, self.memory, clock)
        self._task: asyncio.Task[None] | None = None
        self._load_lock = asyncio.Lock()
        """Held while a caller of `load` changes the load plan."""
        self._yields_memory = False
        """Whether it has agreed to yield its memory to another model."""

    @property
    def model(self) -> str:
        """The model's name in the mesh."""
        return self.config.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names it serves: the model's and those of its adapters."""
        return self.config.names

    def capabilities_of(self, name: str) -> Capabilities:
        """Returns the capabilities of the model, or of the adapter with this name."""
        adapter = self.config.adapter(name)
        known = self.loader.capabilities
        if adapter is None or not adapter.skills:
            return known
        return known_capabilities(declared=complete_list(adapter.skills), engine=known)

    def set_idle_work(self, work: IdleWork) -> None:
        """Sets the work of the engine while it has no requests."""
        self.idle_work, self._lifecycle.while_serving = work, work.run

    def set_after_start(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Sets what is done with the started engine before its first request."""
        self._lifecycle.after_start = work

    def set_before_end(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Sets what is done with the idle engine before it is ended."""
        self._lifecycle.before_end = work

    def expects(self, prompt: KeptPrompt) -> bool:
        """Whether a request announced that a saved prompt is needed again."""
        return self.idle_work.expects(prompt)

    def forget(self, tenant: str | None, tag: str | None) -> None:
        """Forgets the prompts that a tenant with a tag announced; None: any."""
        self.idle_work.forget(tenant, tag)

    @property
    def phase(self) -> Phase:
        """The phase of its lifecycle."""
        return self._lifecycle.state.phase

    @property
    def detail(self) -> str:
        """Explanation of the phase."""
        return self.loader.fetch_stage or self._lifecycle.state.detail

    @property
    def restart_count(self) -> int:
        """Number of restarts of the backend after a fault."""
        return self._lifecycle.state.history.total

    @property
    def load_progress(self) -> float | None:
        """Completed share of loading, 0 to 1; None: unknown, or not loading."""
        if self.phase is not Phase.LOADING:
            return None
        return self.loader.fetch_share if self.loader.fetches else self.backend.load_progress()

    @property
    def load_stage(self) -> str:
        """The current stage of loading, for people; empty: none."""
        return self.loader.stage or (self.detail if self.phase is Phase.LOADING else "")

    @property
    def load_eta_seconds(self) -> float | None:
        """Remaining time of loading, estimated from earlier loads; None: unknown, or not loading."""
        return self.loader.eta_seconds if self.phase is Phase.LOADING else None

    @property
    def model_path(self) -> Path | None:
        """The model's configured file; None: there is none, or weft does not manage it."""
        return self.config.model_path

    @property
    def plan(self) -> LoadPlan:
        """The plan of the current or next load."""
        return self.loader.plan

    @property
    def unload_at(self) -> "datetime | None":
        """When the idle timer unloads it unless a request arrives, UTC; None: never."""
        return self.idle_timer.ends_at if self.phase is Phase.READY else None

    @property
    def keep_alive_seconds(self) -> float | None:
        """How long it stays loaded after its last request; None: until it is unloaded explicitly."""
        return self.idle_timer.shown_seconds if self.phase is Phase.READY else None

    async def start(self) -> None:
        """Starts the lifecycle task. Returns immediately; the engine loads in the background."""
        self._task = start_critical(self._lifecycle.run(), name=f"instance-{self.model}")

    async def stop(self) -> None:
        """Ends the backend and everything it started. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await stop_tasks([task])

    def drain(self) -> None:
        """Stops admitting requests before the runner stops; running ones continue."""
        self._lifecycle.request_drain()

    def admit(
        self,
        request_id: str,
        *,
        name: str = "",
        keep_alive_seconds: float | None = None,
        priority: Priority = Priority.NORMAL,
        takes_slot: bool = True,
        cache: RequestCache | None = None,
    ) -> AbstractContextManager[AdmittedRequest]:
        """Admits a request until the end of a block, to enter now: it holds a slot and has a record.

        For use within one task.

        `name`: the requested adapter; empty: the model itself.
        `keep_alive_seconds`: how long the model stays loaded afterwards; negative: unlimited; None: as configured.
        `takes_slot`: False for work that needs no engine slot. `cache` None: the engine's cache is not managed.

        Raises NO_SLOT_AVAILABLE, SHUTTING_DOWN while draining, BACKEND_NOT_READY in any phase but ready. If the backend
        dies, stalls or is stopped, the block is ended with the reason.
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
        if takes_slot:
            self.slots.take(request_id)
        record = self.records.begin(request_id, name)
        self.idle_timer.note_request_begin(keep_alive_seconds)
        self.memory.priority = priority
        start = self.loader.starts
        admitted = AdmittedRequest(
            record,
            self.backend,
            lambda error: self._lifecycle.note_failure(error, start),
            cache,
            self.loader.capabilities,
            self._request_meter(),
            self.idle_work,
        )
        admitted.forms = self.loader.forms
        return _Admission(admitted, partial(self._end_request, record, keep_alive_seconds, takes_slot))

    def _end_request(
        self,
        record: RequestRecord,
        keep_alive_seconds: float | None,
        takes_slot: bool,
        error: BaseException | None,
    ) -> BaseException | None:
        try:
            error = self.records.end(record, error)
            if isinstance(error, WeftError) and classify(error.reason) is FailureKind.BROKE:
                error.engine_log = _last_log_lines(self.loader.last_lines())
            self.memory.note_used(self._clock.utc_now())
            self._lifecycle.note_request_end(keep_alive_seconds)
        finally:
            if takes_slot:
                self.slots.give_back(record.request_id)
        return error

    def _request_meter(self) -> RequestMeter | None:
        if self.meter is None:
            return None
        return RequestMeter(self.meter, self.model, lambda: self.memory.grant)

    async def wake(self, priority: Priority = Priority.NORMAL) -> None:
        """Waits until it admits requests. Callers share one wake; cancelling one caller does not affect the others.

        If the last caller is cancelled, the wake continues unless it is still waiting for memory.

        `priority`: that of the waiting request; models of a higher priority are not evicted for it.

        Raises WAKE_FAILED with the cause: immediately during a pause after a crash, when it is unloaded meanwhile, or
        if it never fits; INSUFFICIENT_MEMORY if no memory became available in time; SHUTTING_DOWN if it is
        being stopped; BACKEND_NOT_READY before its start.
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
        """Loads it by `spec`, or again if its plan differs; returns whether it was loaded before. Callers share a load.

        If the last caller of a load that `load` started is cancelled, the model is unloaded. Raises as `wake`,
        WAKE_FAILED if another caller has loaded it by another plan meanwhile, and INSUFFICIENT_MEMORY if it would
        exceed its budget or no memory was available.
        """
        self._require_running()
        if spec.memory_budget_bytes:
            await self.memory.require_budget(spec.plan, spec.memory_budget_bytes)
        async with self._load_lock:
            # A loop, because another caller may have woken it as configured before the plan was set here.
            while self._must_rest_before(spec.plan):
                try:
                    await self._put_to_sleep(next_plan=spec.plan)
                except asyncio.CancelledError:
                    self._lifecycle.cancel_reload()
                    raise
            self._require_running()
            was_loaded = self.phase is Phase.READY
            awake = None if was_loaded else self._waiters.request(by_load=True, priority=Priority.NORMAL)
            self.loader.plan = spec.plan
            self._pin(spec.pin or self.config.hibernation.pinned)
        if awake is not None:
            await self._waiters.wait(awake, ends_with_last=True)
            if self.phase is Phase.READY and self.loader.plan != spec.plan:
                raise WeftError(Reason.WAKE_FAILED, LOADED_OTHERWISE, metadata={"model": self.config.name})
        # Only now, because callers may load concurrently and a cancelled one must not undo another's settings. An
        # unload requested meanwhile takes precedence.
        if self.phase is Phase.READY:
            self._pin(spec.pin or self.config.hibernation.pinned)
            self._lifecycle.note_loaded_for(spec.keep_alive_seconds)
        return was_loaded

    def _pin(self, pinned: bool) -> None:
        """Sets the pin. Routers are informed immediately, because they might choose the model for eviction."""
        if pinned != self.memory.pinned:
            self.memory.pin(pinned)
            self._on_change()

    def _must_rest_before(self, plan: LoadPlan) -> bool:
        doing = self._lifecycle.state.doing
        if doing in (Command.REST, Command.SEEK):
            return False
        # A model that is going to sleep resets its load options at the end, and would wake as configured.
        falls_asleep = doing is Command.SLEEP and plan != AS_CONFIGURED
        return falls_asleep or self.loader.plan != plan

    async def yield_memory(self, lease_id: str, priority: Priority, wanted_by: str) -> None:
        """Unloads the model to make its memory available to another one. Nothing is admitted meanwhile.

        Does nothing for a lease that it does not hold. Raises RESOURCE_IN_USE if it is processing a request, pinned or
        loading, or last processed a request with a priority above `priority`; otherwise as `unload`.
        """
        grant = self.memory.grant
        if grant is None or grant.lease_id != lease_id:
            return
        why = ""
        if self.slots.holders or self.records.running:
            why = "is processing a request"
        elif self.memory.pinned:
            why = "is pinned"
        elif self.memory.priority < priority:
            why = "last processed a request of a higher priority"
        elif self.phase not in (Phase.READY, Phase.STOPPING):
            why = f"is {self.phase.name.lower()}"
        if why:
            raise WeftError(Reason.RESOURCE_IN_USE, f"{self.model} does not release its memory: it {why}")
        log.info("model yields", model=self.model, wanted_by=wanted_by)
        self._yields_memory = True
        try:
            await self._unload(ends_process=False)
        finally:
            self._yields_memory = False

    async def unload(self) -> None:
        """Waits for running requests, then puts the model to sleep and ends its process; the next wake loads it.

        Also ends a process that already sleeps. With `config.unload_keeps_process`, a process that can sleep is kept,
        as by the idle timer. Raises UNSUPPORTED_OPERATION for a server that weft can neither end nor put to sleep,
        BACKEND_ERROR if its sleep action fails, SHUTTING_DOWN if it is being stopped.
        """
        # After the unload with which a load with other options begins, or that load would undo this unload.
        async with self._load_lock:
            await self._unload(ends_process=not self.config.unload_keeps_process)

    async def _unload(self, *, ends_process: bool) -> None:
        if not self.config.hibernation.can_unload:
            raise WeftError(
                Reason.UNSUPPORTED_OPERATION,
                f"{self.model} is served by a server that weft did not start; declare a sleep action for it",
            )
        self._require_running()
        self.idle_timer.load_seconds = None
        is_asleep = self._lifecycle.state.doing in (Command.REST, Command.SEEK)
        if not is_asleep or self._lifecycle.wake_requested.is_set():
            await self._put_to_sleep(ends_process=ends_process)
        elif ends_process and self._lifecycle.keeps_process:
            self._lifecycle.request_end_of_process()
            await self._waiters.bounded(self._lifecycle.asleep.wait(), Reason.BACKEND_NOT_READY)

    async def _put_to_sleep(self, *, ends_process: bool = False, next_plan: LoadPlan | None = None) -> None:
        self._require_running()
        self._lifecycle.request_sleep(ends_process=ends_process, next_plan=next_plan)
        await self._waiters.bounded(self._lifecycle.asleep.wait(), Reason.BACKEND_NOT_READY)

    def _adopt(self, fetched: ServedModel) -> None:
        """Uses the pulled files, with a new backend for them."""
        self.backend.log.end_followers()
        self.config = replace(fetched, hibernation=self.config.hibernation, added=self.config.added)
        self.backend = fetched.make_backend()
        self.memory.adopt(self.backend, fetched.forecast)
        self.loader.adopt(self.config, self.backend)
        self.on_adopted()

    def _resize_slots(self, in_force: int) -> None:
        slots = in_force or self.config.slots
        self.slots.resize(min(slots, self.config.target_inflight or slots))

    def _require_running(self) -> None:
        if self._lifecycle.stopping:
            raise _shutting_down(self.model)
        if self._task is None:
            raise WeftError(
                Reason.BACKEND_NOT_READY,
                f"{self.model} starts here once its earlier version has ended",
                retry_after_seconds=LOADING_RETRY_SECONDS,
            )


class _Admission:
    """An admitted request, for the duration of a block."""

    __slots__ = ("_admitted", "_end")

    def __init__(self, admitted: AdmittedRequest, end: Callable[[BaseException | None], BaseException | None]) -> None:
        """`end` takes the error that ends the block, and returns the one to raise."""
        self._admitted, self._end = admitted, end

    def __enter__(self) -> AdmittedRequest:
        return self._admitted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_by = self._end(error)
        if ended_by is not None and ended_by is not error:
            raise ended_by from (error if isinstance(error, Exception) else None)


class _WakeWaiters:
    """Callers that wait for an instance to wake, and what happens to the wake when the last one is cancelled."""

    def __init__(self, lifecycle: LifecycleLoop, config: ServedModel, memory: ModelMemory, clock: Clock) -> None:
        self._lifecycle = lifecycle
        self._config = config
        self._memory = memory
        self._clock = clock
        self._count = 0
        self._begun_by_load = False
        """Whether the current wake was requested only by `Instance.load`."""

    def request(self, *, by_load: bool, priority: Priority) -> Coroutine[Any, Any, None]:
        """Requests a wake and returns its outcome, to pass to `wait`.

        A load ends the pause after a failure unless it was for lack of memory; otherwise this raises WAKE_FAILED.
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
        """Waits for a wake. `ends_with_last`: when the last caller leaves, a wake that `load` started ends."""
        self._count += 1
        try:
            if ends_with_last and self._is_own_process():
                await awake  # limited by the stall check and the wait for memory, not by a timeout here
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
        """Awaits `outcome` for at most the longest wake time, then raises `reason`."""
        limit = self._config.hibernation.longest_wake_seconds
        try:
            await within(self._clock, limit, outcome)
        except TimeoutError:
            phase = self._lifecycle.state.phase.name.lower()
            raise WeftError(reason, f"{self._config.name} is still {phase} after {limit:g} s") from None

    def _waits_for_memory(self) -> bool:
        """Whether a wake still waits for memory: an unwanted one must not keep its place in that queue."""
        lifecycle = self._lifecycle
        return self._is_own_process() and lifecycle.state.doing is Command.WAKE and lifecycle.loader.waits

    def _is_own_process(self) -> bool:
        return not self._config.hibernation.attached and self._config.hibernation.recipe is None


def _last_log_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the last non-empty lines within the limits for an attempt; the oldest one may be cut."""
    kept: list[str] = []
    room = MAX_ATTEMPT_LOG_BYTES
    for line in reversed([line for line in lines if line.strip()][-MAX_ATTEMPT_LOG_LINES:]):
        if room > 0:
            kept.append(line.encode()[:room].decode(errors="ignore"))
            room -= len(line.encode())
    return tuple(reversed(kept))


def _shutting_down(model: str) -> WeftError:
    return WeftError(Reason.SHUTTING_DOWN, f"{model} accepts no requests here: it is being stopped")
