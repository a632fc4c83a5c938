"""The lifecycle loop of a backend, the only code that starts, stops, wakes and hibernates it, and its idle timer."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import datetime, timedelta

from runner_svc.backend.port import Backend
from runner_svc.chat.chat_request import ChatRequest
from runner_svc.instance.instance_settings import HibernationSettings, RunRecipe, ServedModel
from runner_svc.instance.loader import Loader
from runner_svc.instance.restart_log import RestartLog
from runner_svc.instance.watchdog import Watchdog
from runner_svc.memory.model_memory import ModelMemory
from runner_svc.policy.keep_alive import keep_alive, seconds_to_sleep
from runner_svc.policy.kept_prompts import KeptPrompt
from runner_svc.policy.lifecycle import (
    MAX_DETAIL_CHARS,
    Command,
    Event,
    EventKind,
    LifeRules,
    LifeState,
    is_unmet,
    needs_restart,
    step,
    verdict_on,
    with_log_command,
)
from runner_svc.policy.load_options import AS_CONFIGURED, LoadPlan
from runner_svc.request_records import RequestRecords
from runner_svc.waiting import SharedOutcome, end_tasks, event_within, first_of, first_within, within
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Handling
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

log = get_logger("weft.instance")

ATTACH_POLL_SECONDS = 0.5
"""Polling interval for a server that is being woken."""
REQUESTS_END_SECONDS = 1.0
"""How long failed requests may take to release their backend before it is ended."""
BEFORE_END_SECONDS = 5.0
"""How long the prompts of an engine may take to be saved before it is ended."""
INTERNAL_ERROR = "an internal error; the runner's log has the details"
UNLOADED = "it was unloaded meanwhile"

_FAILURES = frozenset({EventKind.LOAD_FAILED, EventKind.WAKE_FAILED})
_FAULTS = frozenset({EventKind.DIED, EventKind.FAULTED, EventKind.LOAD_FAILED, EventKind.BROKE})
_NOT_UP_YET = frozenset({Reason.CONNECT_FAILED, Reason.LOAD_STALLED})
FIRST_REQUEST_SECONDS = 10.0
"""How long a model with a keep-alive of 0 waits for its first request."""


class LifecycleLoop:
    """Runs the lifecycle of a backend in one task, `run`. Other tasks set its events and await its shared outcomes.

    `policy.lifecycle` decides which events are possible and what follows; this class executes the commands.
    """

    def __init__(
        self,
        config: ServedModel,
        backend: Backend,
        records: RequestRecords,
        memory: ModelMemory,
        clock: Clock,
        on_change: Callable[[], None],
        run_recipe: RunRecipe,
    ) -> None:
        self._hibernation = config.hibernation
        self._records = records
        self._clock = clock
        self._on_change = on_change
        self._run_recipe = run_recipe
        self._rules = LifeRules(
            attached=config.hibernation.attached,
            can_wake=config.hibernation.can_wake,
            woken_by_mesh=config.hibernation.woken_by_mesh,
            start_asleep=config.hibernation.start_asleep,
            limits=config.restart,
        )
        self._nudged = asyncio.Event()
        self._sleep_asked = asyncio.Event()
        self._end_of_process_asked = asyncio.Event()
        self._next_plan: LoadPlan | None = None
        """How a model that was asked to sleep is loaded next, for callers that wait; None: it stays unloaded."""
        self._fault: WeftError | None = None
        self._verdict = WeftError(Reason.WORKER_RESTARTED, "the engine was stopped while it processed the request")
        self._obstacle = ""
        self._memory = memory
        memory.on_lost, memory.on_measured = self._note_lease_lost, on_change
        self.loader = Loader(config, backend, memory, clock)
        self.state = LifeState()
        self.restart_log = RestartLog(clock)
        self.idle_timer = IdleTimer(config.hibernation, memory, records, clock)
        self.while_serving: Callable[[], Coroutine[None, None, None]] = IdleWork().run
        self.after_start: Callable[[], Coroutine[None, None, None]] = _nothing
        """What is done with a started engine before its first request."""
        self.before_end: Callable[[], Coroutine[None, None, None]] = _nothing
        """What is done with an idle engine before it is ended, for at most BEFORE_END_SECONDS."""
        self.stopping = False
        self.keeps_process = False
        """Whether the model sleeps in a process that still runs."""
        self.wake_requested = asyncio.Event()
        self.awake = SharedOutcome()
        """Outcome of the next attempt to become ready."""
        self.asleep = SharedOutcome()
        """Outcome of the next attempt to go to sleep."""

    def request_sleep(self, *, ends_process: bool = False, next_plan: LoadPlan | None = None) -> None:
        """Requests sleep as soon as possible. `ends_process`: end the process instead of sleeping in it.

        With `next_plan`, callers that wait for the model go on waiting: it is loaded again by this plan.
        """
        self._next_plan = next_plan
        if ends_process:
            self._end_of_process_asked.set()
        self._sleep_asked.set()
        self._nudged.set()

    def cancel_reload(self) -> None:
        """Records that the load with this `next_plan` was cancelled: callers that wait get the model as configured."""
        if self._next_plan is not None:
            self._next_plan = AS_CONFIGURED
        elif self.state.doing in (Command.REST, Command.SEEK):
            self.loader.plan = AS_CONFIGURED

    def request_end_of_process(self) -> None:
        """Requests the end of the process in which the model sleeps (`keeps_process`); the outcome is `asleep`."""
        self._end_of_process_asked.set()

    def request_drain(self) -> None:
        """Requests the drain: no new requests are admitted, running ones continue."""
        self.stopping = True
        self._nudged.set()

    def note_failure(self, error: WeftError, start: int) -> None:
        """Records that a request failed during start number `start` of the backend. Some failures cause a restart."""
        counts = self._fault is None and not self.loader.config.requests_fail_alone
        if counts and start == self.loader.starts and needs_restart(error.reason, attached=self._rules.attached):
            self._fault = error
            self._nudged.set()

    def note_request_end(self, keep_alive_seconds: float | None) -> None:
        """Records that a request with this keep-alive has ended."""
        if self.idle_timer.note_request_end(keep_alive_seconds):
            self._nudged.set()
            # With a short keep-alive it goes to sleep before the next report.
            self._on_change()

    def note_loaded_for(self, keep_alive_seconds: float) -> None:
        """Records the keep-alive of an explicit load."""
        self.idle_timer.load_seconds = keep_alive_seconds
        self._nudged.set()

    def _note_lease_lost(self) -> None:
        self.loader.note_lease_lost()
        self._nudged.set()

    async def run(self) -> None:
        """Executes commands until cancelled; then the backend has ended and every waiter has an outcome."""
        stages: Mapping[Command, Callable[[], Awaitable[Event]]] = {
            Command.LOAD: self._load,
            Command.WAKE: self._wake,
            Command.SERVE: self._serve,
            Command.CLEAR: self._clear,
            Command.SLEEP: self._fall_asleep,
            Command.REST: self._rest,
            Command.SEEK: self._seek,
            Command.PAUSE: self._pause,
        }
        try:
            command = self._note(Event(EventKind.BEGUN))
            while True:
                try:
                    command = self._note(await stages[command]())
                except Exception:
                    # Without this, the model would stay in LOADING until the runner restarts.
                    log.exception("unexpected error in a model's life cycle", model=self.loader.config.name)
                    await self._end_backend()
                    command = self._note(Event(EventKind.BROKE, Reason.INTERNAL, INTERNAL_ERROR))
        finally:
            serves = self.state.doing is Command.SERVE
            self._note(Event(EventKind.END_ASKED))
            gone = WeftError(Reason.SHUTTING_DOWN, f"{self.loader.config.name} is being stopped here")
            self.awake.settle(gone)
            self.asleep.settle(gone)
            try:
                if serves:
                    await self._prepare_end()
            finally:
                # Also if this task is cancelled again meanwhile: nothing else ends the backend.
                try:
                    await self._end_backend()
                finally:
                    self._memory.give_up()
            self._note(Event(EventKind.ENDED))

    def _note(self, event: Event) -> Command:
        """Applies an event: enters the next state, settles the outcomes, and returns the next command."""
        now = self._clock.monotonic()
        before = self.state
        if self.stopping and not before.draining and event.kind is not EventKind.DRAIN_ASKED:
            before = step(before, Event(EventKind.DRAIN_ASKED), now, self._rules).state
        transition = step(before, event, now, self._rules)
        if transition.command in (Command.PAUSE, Command.REST, Command.SEEK):
            self._memory.give_up()  # no process of the backend is left
        self._remember(event, transition.state)
        after = transition.state
        if transition.command is Command.PAUSE:
            if self.loader.was_started:
                after = with_log_command(after, self.loader.config.name)
            log.error("engine start is delayed", model=self.loader.config.name, detail=after.detail)
        changed = (after.phase, after.detail) != (self.state.phase, self.state.detail)
        self.state = after
        self._settle(event, transition.command)
        if changed:
            self._on_change()
        return transition.command

    def _remember(self, event: Event, after: LifeState) -> None:
        """Records the traces of a fault or restart for people."""
        if event.kind is EventKind.LOADED:
            self.restart_log.note_ready()
        elif event.kind in _FAULTS and not (self._rules.attached or is_unmet(event) or event.unstarted):
            self._note_restart(event.reason, event.how)
        elif event.kind is EventKind.WAKE_FAILED and after.doing is Command.PAUSE:
            self._note_restart(event.reason, event.how)  # any other failed wake does not count as a restart
        if event.kind in (EventKind.DIED, EventKind.FAULTED):
            self._verdict = verdict_on(event, attached=self._rules.attached)
        elif event.kind is EventKind.CLEARED or (event.kind in _FAILURES and self.loader.was_started):
            self.restart_log.crash_lines = self.loader.last_lines()
        if after.doing is Command.REST:
            self.restart_log.note_asleep()

    def _note_restart(self, reason: Reason, how: str) -> None:
        log.warning("engine ended", model=self.loader.config.name, how=how, restarts=self.state.history.total + 1)
        self.restart_log.note(reason, how)

    def _settle(self, event: Event, command: Command) -> None:
        """Settles the outcomes that callers await: awake, asleep."""
        if command is Command.SERVE:
            self.wake_requested.clear()
            self.idle_timer.begin()
            self.awake.settle()
        elif command is Command.PAUSE or event.kind in (EventKind.WAKE_FAILED, EventKind.BROKE) or is_unmet(event):
            unmet = event.kind in _FAILURES and event.reason is Reason.INSUFFICIENT_MEMORY
            reason = Reason.INSUFFICIENT_MEMORY if unmet else Reason.WAKE_FAILED
            self._settle_not_awake(self.state.detail or INTERNAL_ERROR, reason)
        elif event.kind is EventKind.SLEEP_ASKED and command is not Command.SLEEP and self._next_plan is None:
            self._settle_not_awake(UNLOADED)
        if event.kind is EventKind.BROKE:
            self._next_plan = None
            self._end_of_process_asked.clear()
            self.asleep.settle(WeftError(Reason.INTERNAL, INTERNAL_ERROR))
        elif command in (Command.REST, Command.SEEK):
            if self._sleep_asked.is_set() or not self._rules.attached:
                self._forget_load()
            self._sleep_asked.clear()
            if not self.keeps_process:
                self._end_of_process_asked.clear()
                self.asleep.settle()
            elif not self._end_of_process_asked.is_set():
                self.asleep.settle()  # otherwise `_rest` ends the process first

    def _forget_load(self) -> None:
        """Drops the options of loads and requests, also of a load that ended after the unload was requested."""
        self.idle_timer.forget()
        self.loader.plan, self._next_plan = self._next_plan or AS_CONFIGURED, None
        self._memory.pinned = self._hibernation.pinned

    def _settle_not_awake(self, why: str, reason: Reason = Reason.WAKE_FAILED) -> None:
        self.wake_requested.clear()
        self.awake.settle(WeftError(reason, why, metadata={"model": self.loader.config.name}))

    async def _load(self) -> Event:
        self.loader.was_started = False
        loading = asyncio.create_task(self._start_backend())
        unloaded = asyncio.create_task(self._sleep_asked.wait())
        try:
            await asyncio.wait({loading, unloaded}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return Event(EventKind.SLEEP_ASKED)
            loading.result()
        except WeftError as error:
            return Event(
                EventKind.LOAD_FAILED,
                error.reason,
                error.log_message,
                otherwise=self.loader.is_otherwise,
                unfetched=self.loader.fetches,
                unstarted=not self.loader.was_started,
            )
        finally:
            await end_tasks(loading, unloaded)
        return Event(EventKind.LOADED)

    async def _start_backend(self) -> None:
        await self.loader.start(self._note_waiting)
        await self.after_start()
        self._fault = None
        self.idle_timer.begin_life()

    def _note_waiting(self, detail: str) -> None:
        if self.state.doing in (Command.LOAD, Command.WAKE):
            self._note(Event(EventKind.WAITS, how=detail))

    async def _serve(self) -> Event:
        """Watches the backend until it exits, is faulted, or must sleep."""
        exited = asyncio.create_task(self.loader.backend.wait_exit())
        watchdog = Watchdog(self._records, self.loader.backend, self.loader.config.timeouts, self._clock)
        watching = asyncio.create_task(watchdog.run())
        beside = asyncio.create_task(self.while_serving())
        for task in (exited, watching):
            task.add_done_callback(lambda _: self._nudged.set())
        try:
            while not exited.done():
                self._nudged.clear()
                if self.stopping and not self.state.draining:
                    self._note(Event(EventKind.DRAIN_ASKED))
                fault = watching.result() if watching.done() else self._fault
                if self._memory.lost.is_set():
                    fault = self._memory.lost_error()
                if fault is not None:
                    return Event(EventKind.FAULTED, fault.reason, fault.log_message)
                left = self.idle_timer.seconds_to_sleep(stays_awake=self.stopping)
                if left == 0 or self._sleep_asked.is_set():
                    return Event(EventKind.SLEEP_ASKED)
                await event_within(self._clock, left, self._nudged)
            report = exited.result()
            return Event(EventKind.DIED, report.reason, report.how, report.exit)
        finally:
            await end_tasks(exited, watching, beside)

    async def _clear(self) -> Event:
        """Cleans up after a dead or faulted backend: its requests, and processes that it started."""
        await self._end_backend()
        return Event(EventKind.CLEARED)

    async def _prepare_end(self) -> None:
        if not self._records.idle.is_set() or self._memory.lost.is_set():
            return
        try:
            await within(self._clock, BEFORE_END_SECONDS, self.before_end())
        except TimeoutError:
            log.warning("the engine's prompts were not all stored", model=self.loader.config.name)
        except Exception:
            log.exception("the engine's prompts were not stored", model=self.loader.config.name)

    async def _end_backend(self) -> None:
        """Ends the requests without retrying them, then the backend: without requests it obeys its first SIGTERM."""
        self._records.fail_all(self._verdict)
        self._verdict = WeftError(Reason.WORKER_RESTARTED, "the engine was stopped while it processed the request")
        try:
            if not await event_within(self._clock, REQUESTS_END_SECONDS, self._records.idle):
                log.warning("requests still use an engine that ends", model=self.loader.config.name)
        finally:
            await self.loader.backend.stop()  # also if this task is cancelled meanwhile

    async def _fall_asleep(self) -> Event:
        """Runs the sleep action. New requests are already rejected; the router waits and wakes the model."""
        sleep = self._hibernation.sleep
        await first_within(self._clock, self._hibernation.drain_seconds, self._records.idle, self._memory.lost)
        try:
            if sleep is not None and sleep.action is not None and not self._memory.lost.is_set():
                await self._run_recipe(sleep.action, sleep.max_wait_seconds)
        except WeftError as error:
            log.warning("model did not go to sleep", model=self.loader.config.name, message=error.log_message)
            self._sleep_asked.clear()
            self._next_plan = None
            self._end_of_process_asked.clear()
            self.asleep.settle(WeftError(Reason.BACKEND_ERROR, f"the model did not go to sleep: {error.log_message}"))
            return Event(EventKind.SLEEP_FAILED)
        self.keeps_process = await self._sleeps_in_place()
        if not self.keeps_process:
            await self._prepare_end()
            await self._end_backend()
        log.info("model went to sleep", model=self.loader.config.name)
        return Event(EventKind.SLEPT)

    async def _sleeps_in_place(self) -> bool:
        """Puts the backend to sleep in its process. False: it cannot, or a request or a fault prevents it."""
        if self._end_of_process_asked.is_set():
            return False
        return self._records.idle.is_set() and not self._memory.lost.is_set() and await self.loader.backend.sleep()

    async def _rest(self) -> Event:
        while True:
            await first_of(self.wake_requested, self._end_of_process_asked)
            if self._sleep_asked.is_set():
                # Unloaded between the request of a wake and its begin.
                self._sleep_asked.clear()
                self._forget_load()
                self._settle_not_awake(UNLOADED)
                if not self._end_of_process_asked.is_set():
                    self.asleep.settle()
            if self._end_of_process_asked.is_set():
                self.keeps_process = False
                await self.loader.backend.stop()
                self._end_of_process_asked.clear()
                self.asleep.settle()
            if self.wake_requested.is_set():
                self.keeps_process = False
                return Event(EventKind.WAKE_ASKED)

    async def _wake(self) -> Event:
        if not self._rules.attached and self._hibernation.recipe is None:
            # Like any load of weft's own process: limited by the stall check instead of a timeout, and ended by an
            # unload.
            loaded = await self._load()
            if loaded.kind is not EventKind.LOAD_FAILED:
                return loaded
            reason, why = loaded.reason, loaded.how
        else:
            limit = self._hibernation.max_wait_seconds
            reason, self.loader.was_started = Reason.WAKE_FAILED, False
            try:
                await within(self._clock, limit, self._bring_up())
            except WeftError as error:
                reason, why = error.reason, error.log_message
            except TimeoutError:
                why = f"it was not ready within {limit:g} s" + (f": {self._obstacle}" if self._obstacle else "")
            else:
                return Event(EventKind.LOADED)
            await self.loader.backend.stop()
        log.warning("model could not be woken", model=self.loader.config.name, message=why)
        return Event(EventKind.WAKE_FAILED, reason, why[:MAX_DETAIL_CHARS], otherwise=self.loader.is_otherwise)

    async def _bring_up(self) -> None:
        recipe = self._hibernation.recipe
        if recipe is not None:
            self._obstacle = "its recipe had not ended"
            await self._run_recipe(recipe, self._hibernation.max_wait_seconds)
        self._obstacle = ""
        while True:
            try:
                return await self._start_backend()
            except WeftError as error:
                if not self._hibernation.attached or error.reason not in _NOT_UP_YET:
                    raise
                self._obstacle = error.log_message
            await self._clock.sleep(ATTACH_POLL_SECONDS)

    async def _seek(self) -> Event:
        while not await event_within(self._clock, self._hibernation.attach_retry_seconds, self.wake_requested):
            try:
                await self._start_backend()
            except WeftError as error:
                self._note(Event(EventKind.MISSING, how=error.log_message))
            else:
                return Event(EventKind.LOADED)
        return Event(EventKind.WAKE_ASKED)

    async def _pause(self) -> Event:
        while (left := (self.state.resume_at or 0.0) - self._clock.monotonic()) > 0:
            await first_within(self._clock, left, self._sleep_asked, self.wake_requested)
            if self._sleep_asked.is_set():
                return Event(EventKind.SLEEP_ASKED)
            if self.wake_requested.is_set():
                return Event(EventKind.WAKE_ASKED)
        return Event(EventKind.PAUSE_OVER)


async def _nothing() -> None:
    """Before the end of an engine whose prompts are not stored."""


class IdleWork:
    """Work that an engine does only while it has no requests; by default none."""

    async def run(self) -> None:
        """Works from each start or wake of the engine until it is done, or cancelled because the engine stops."""

    async def make_way(self) -> None:
        """Interrupts the work for a request; returns once the engine no longer processes it."""

    async def note(self, chat: ChatRequest, model: str, tenant: str, handling: Handling) -> Frame:
        """Records a chat on a model or an adapter whose beginning is expected again. Returns warnings."""
        del chat, model, tenant, handling
        return []

    def expects(self, prompt: KeptPrompt) -> bool:
        """Whether a request announced that a saved prompt is needed again."""
        del prompt
        return False

    def forget(self, tenant: str | None, tag: str | None) -> None:
        """Forgets the prompts of a tenant and a tag; None: any."""


class IdleTimer:
    """The idle timer of an instance. Keep-alives of loads and requests apply until the backend sleeps."""

    def __init__(
        self, settings: HibernationSettings, memory: ModelMemory, records: RequestRecords, clock: Clock
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._records = records
        self._clock = clock
        self._request_seconds: float | None = None
        self._asked_seconds: float | None = None
        """Keep-alive of the last request that started."""
        self._has_served = False
        self._since, self._since_at = clock.monotonic(), clock.utc_now()
        self.load_seconds: float | None = None
        """Keep-alive of the explicit load; see policy.keep_alive."""

    @property
    def limit_seconds(self) -> float | None:
        """Idle time after which it goes to sleep; None: never."""
        limit = self._limit(self._request_seconds)
        return FIRST_REQUEST_SECONDS if limit == 0 and not self._has_served else limit

    @property
    def shown_seconds(self) -> float | None:
        """The limit to display: during requests, that of the last one that started."""
        return self._limit(self._asked_seconds if self._records.running else self._request_seconds)

    def _limit(self, request_seconds: float | None) -> float | None:
        if not self._settings.sleeps_by_itself:
            return None
        return keep_alive(
            (request_seconds, self.load_seconds, self._settings.idle_seconds),
            self._settings.category,
            holds_devices=self._memory.holds_devices,
            pinned=self._memory.pinned,
        )

    @property
    def ends_at(self) -> datetime | None:
        """When it goes to sleep unless a request arrives, UTC; None: never, or it is working."""
        limit = self.limit_seconds
        if limit is None or self._records.running:
            return None
        return self._since_at + timedelta(seconds=limit)

    def begin(self) -> None:
        """Starts the idle time: requests are now admitted, or a request has ended."""
        self._since, self._since_at = self._clock.monotonic(), self._clock.utc_now()

    def begin_life(self) -> None:
        """Resets the timer after a new start of the backend."""
        self._has_served = False

    def note_request_begin(self, keep_alive_seconds: float | None) -> None:
        """Records the keep-alive of a request that starts."""
        self._asked_seconds = keep_alive_seconds

    def note_request_end(self, keep_alive_seconds: float | None) -> bool:
        """Records the end of a request and its keep-alive. Returns whether to decide about its sleep now."""
        before = self.limit_seconds
        self.begin()
        if self._has_served and keep_alive_seconds == self._request_seconds:
            return before == 0
        self._has_served, self._request_seconds = True, keep_alive_seconds
        after = self.limit_seconds
        return after != before or after == 0

    def forget(self) -> None:
        """Resets the keep-alives of loads and requests, because the model sleeps."""
        self.load_seconds = self._request_seconds = None

    def seconds_to_sleep(self, *, stays_awake: bool) -> float | None:
        """See policy.keep_alive."""
        idle_seconds, busy = self._clock.monotonic() - self._since, bool(self._records.running)
        return seconds_to_sleep(self.limit_seconds, idle_seconds, busy=busy, stays_awake=stays_awake)
