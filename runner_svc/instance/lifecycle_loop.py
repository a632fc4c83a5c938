"""The life of one backend: the only place that starts it, stops it, wakes it and puts it to sleep."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from runner_svc.backend.port import Backend
from runner_svc.instance.idle_timer import IdleTimer
from runner_svc.instance.loader import Loader
from runner_svc.instance.restart_log import RestartLog
from runner_svc.instance.settings import InstanceConfig, RunRecipe
from runner_svc.instance.watchdog import Watchdog
from runner_svc.memory.model_memory import ModelMemory
from runner_svc.policy.life_events import (
    Begun,
    Broke,
    Cleared,
    Command,
    Died,
    DrainAsked,
    EndAsked,
    Ended,
    Event,
    Faulted,
    Loaded,
    LoadFailed,
    Missing,
    PauseOver,
    SleepAsked,
    SleepFailed,
    Slept,
    Waits,
    WakeAsked,
    WakeFailed,
)
from runner_svc.policy.lifecycle import (
    MAX_DETAIL_CHARS,
    LifeRules,
    LifeState,
    is_unmet,
    needs_restart,
    step,
    verdict_on,
    with_last_lines,
)
from runner_svc.policy.load_plan import AS_CONFIGURED
from runner_svc.request_records import RequestRecords
from runner_svc.waiting import SharedOutcome, end_tasks, event_within, first_within, within
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from datetime import datetime


log = structlog.get_logger("weft.instance")

ATTACH_POLL_SECONDS = 0.5
"""How often a server that is being woken is looked for."""
REQUESTS_END_SECONDS = 1.0
"""How long requests that were failed may take to let go, before their backend is ended under them."""
CRASH_LOG_LINES = 10
"""How many of a backend's last lines a crash loop shows."""
INTERNAL_ERROR = "an internal error; the runner's log has the details"

_NOT_UP_YET = frozenset({Reason.CONNECT_FAILED, Reason.LOAD_STALLED})


class LifecycleLoop:
    """One backend, one task: `run`. Everybody else asks through the events and waits for the shared outcomes.

    What may happen when, and what it leads to, is decided by `policy.lifecycle`; here it is carried out.
    """

    def __init__(
        self,
        config: InstanceConfig,
        backend: Backend,
        records: RequestRecords,
        memory: ModelMemory,
        clock: Clock,
        on_change: Callable[[], None],
        run_recipe: RunRecipe,
    ) -> None:
        self._config = config
        self._hibernation = config.hibernation
        self._backend = backend
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
        self._fault: WeftError | None = None
        self._verdict = WeftError(Reason.WORKER_RESTARTED, "the backend was stopped while it worked on the request")
        self._obstacle = ""
        self._memory = memory
        memory.on_lost = self._note_lease_lost
        self.loader = Loader(config, backend, memory, clock)
        self.state = LifeState()
        self.restarts = RestartLog(clock)
        self.crash_lines: tuple[str, ...] = ()
        """The backend's output up to its last crash, at most loading.MAX_CRASH_BYTES of it."""
        self.last_ready_at: datetime | None = None
        """UTC."""
        self.idle = IdleTimer(config.hibernation, memory, records, clock)
        self.stopping = False
        """The runner is about to end."""
        self.wake_asked = asyncio.Event()
        self.awake = SharedOutcome()
        """The next time it is ready, or fails to become so."""
        self.asleep = SharedOutcome()
        """The next time it sleeps, or fails to fall asleep."""

    def ask_sleep(self) -> None:
        """Put it to sleep as soon as that can be done."""
        self._sleep_asked.set()
        self._nudged.set()

    def ask_drain(self) -> None:
        """Take nothing new from now on; what runs goes on."""
        self.stopping = True
        self._nudged.set()

    def note_failure(self, error: WeftError, start: int) -> None:
        """A request of the backend's start number `start` failed so. Some failures ask for a restart."""
        is_heard = self._fault is None and not self._hibernation.requests_fail_alone
        if is_heard and start == self.loader.starts and needs_restart(error.reason, attached=self._rules.attached):
            self._fault = error
            self._nudged.set()

    def note_request_end(self, keep_alive_seconds: float | None) -> None:
        """A request let go of the backend; it said so."""
        if self.idle.note_request_end(keep_alive_seconds):
            self._nudged.set()

    def note_loaded_for(self, keep_alive_seconds: float) -> None:
        """Whoever loaded it said how long to keep it."""
        self.idle.load_seconds = keep_alive_seconds
        self._nudged.set()

    def _note_lease_lost(self) -> None:
        self.loader.note_lease_lost()
        self._nudged.set()

    async def run(self) -> None:
        """Keep it as it should be until cancelled; then the backend is gone and nobody waits any more."""
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
            command = self._note(Begun())
            while True:
                try:
                    command = self._note(await stages[command]())
                except Exception:
                    # Without this the model would look as if it were about to load until the runner is restarted.
                    log.exception("unforeseen error in a model's life", model=self._config.model)
                    await self._end_backend()
                    command = self._note(Broke(INTERNAL_ERROR))
        finally:
            self._note(EndAsked())
            gone = WeftError(Reason.SHUTTING_DOWN, "the runner is stopping")
            self.awake.settle(gone)
            self.asleep.settle(gone)
            try:
                await self._end_backend()
            finally:
                self._memory.give_up()
            self._note(Ended())

    def _note(self, event: Event) -> Command:
        """Something happened: be in the state it leads to, tell whoever waits, and return what to do now."""
        now = self._clock.monotonic()
        before = self.state
        if self.stopping and not before.draining and not isinstance(event, DrainAsked):
            before = step(before, DrainAsked(), now, self._rules).state
        transition = step(before, event, now, self._rules)
        if transition.command in (Command.PAUSE, Command.REST, Command.SEEK):
            self._memory.give_up()  # nothing of the backend is left there
        self._remember(event, transition.state)
        after = transition.state
        if transition.command is Command.PAUSE:
            after = with_last_lines(after, self.loader.last_lines()[-CRASH_LOG_LINES:])
            log.error("backend is not started for now", model=self._config.model, detail=after.detail)
        changed = (after.phase, after.detail) != (self.state.phase, self.state.detail)
        self.state = after
        self._settle(event, transition.command)
        if changed:
            self._on_change()
        return transition.command

    def _remember(self, event: Event, after: LifeState) -> None:
        """What a restart leaves behind for people to read."""
        if isinstance(event, Loaded):
            self.last_ready_at = self._clock.utc_now()
            self.restarts.note_ready()
        elif isinstance(event, (Died, Faulted, LoadFailed, Broke)) and not self._rules.attached and not is_unmet(event):
            self._remember_restart(Reason.INTERNAL if isinstance(event, Broke) else event.reason, event.how)
        elif isinstance(event, WakeFailed) and after.doing is Command.PAUSE:
            self._remember_restart(event.reason, event.how)  # any other wake that fails costs no restart
        if isinstance(event, (Died, Faulted)):
            self._verdict = verdict_on(event, attached=self._rules.attached)
        elif isinstance(event, (Cleared, LoadFailed, WakeFailed)) and self._was_started(event):
            self.crash_lines = self.loader.last_lines()
        if after.doing is Command.REST:
            self.restarts.note_asleep()

    def _was_started(self, event: Event) -> bool:
        return isinstance(event, Cleared) or self.loader.was_started

    def _remember_restart(self, reason: Reason, how: str) -> None:
        log.warning("backend ended", model=self._config.model, how=how, restarts=self.state.history.total + 1)
        self.restarts.note(reason, how)

    def _settle(self, event: Event, command: Command) -> None:
        """Tell those who wait for it to be awake or asleep."""
        if command is Command.SERVE:
            self.wake_asked.clear()
            self.idle.begin()
            self.awake.settle()
        elif command is Command.PAUSE or isinstance(event, (WakeFailed, Broke)) or is_unmet(event):
            unmet = isinstance(event, (LoadFailed, WakeFailed)) and event.reason is Reason.INSUFFICIENT_MEMORY
            reason = Reason.INSUFFICIENT_MEMORY if unmet else Reason.WAKE_FAILED
            self._settle_not_awake(self.state.detail or INTERNAL_ERROR, reason)
        elif isinstance(event, SleepAsked) and command is not Command.SLEEP:
            self._settle_not_awake("it was unloaded meanwhile")
        if isinstance(event, Broke):
            self.asleep.settle(WeftError(Reason.INTERNAL, INTERNAL_ERROR))
        elif command in (Command.REST, Command.SEEK):
            if self._sleep_asked.is_set() or not self._rules.attached:
                # Also where a load came to its end after the unload was asked for.
                self.reset_load_options()
            self._sleep_asked.clear()
            self.asleep.settle()

    def _settle_not_awake(self, why: str, reason: Reason = Reason.WAKE_FAILED) -> None:
        self.wake_asked.clear()
        self.awake.settle(WeftError(reason, why, metadata={"model": self._config.model}))

    def reset_load_options(self) -> None:
        """What loads and requests said holds for one life of the backend; the next one is as configured."""
        self.idle.forget()
        self.loader.plan = AS_CONFIGURED
        self._memory.pinned = self._hibernation.keep_alive_settings.pinned

    async def _load(self) -> Event:
        self.loader.was_started = False
        loading = asyncio.create_task(self._start_backend())
        unloaded = asyncio.create_task(self._sleep_asked.wait())
        try:
            await asyncio.wait({loading, unloaded}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return SleepAsked()
            loading.result()
        except WeftError as error:
            return LoadFailed(error.reason, error.message, self.loader.is_otherwise)
        finally:
            await end_tasks(loading, unloaded)
        return Loaded()

    async def _start_backend(self) -> None:
        await self.loader.start(self._note_waiting)
        self._fault = None
        self.idle.begin_life()

    def _note_waiting(self, detail: str) -> None:
        if self.state.doing in (Command.LOAD, Command.WAKE):
            self._note(Waits(detail))

    async def _serve(self) -> Event:
        """Until the backend ends by itself, is of no use any more, or is to sleep."""
        exited = asyncio.create_task(self._backend.wait_exit())
        watchdog = Watchdog(self._records, self._backend, self._config.timeouts, self._clock)
        watching = asyncio.create_task(watchdog.run())
        for task in (exited, watching):
            task.add_done_callback(lambda _: self._nudged.set())
        try:
            while not exited.done():
                self._nudged.clear()
                if self.stopping and not self.state.draining:
                    self._note(DrainAsked())
                fault = watching.result() if watching.done() else self._fault
                if self._memory.lost.is_set():
                    fault = self._memory.lost_error()
                if fault is not None:
                    return Faulted(fault.reason, fault.message)
                decision = self.idle.decide(stays_awake=self.stopping)
                if decision.sleep or self._sleep_asked.is_set():
                    return SleepAsked()
                await event_within(self._clock, decision.look_again_seconds, self._nudged)
            report = exited.result()
            return Died(report.reason, report.how)
        finally:
            await end_tasks(exited, watching)

    async def _clear(self) -> Event:
        """The process is gone or of no use, but what it started may still be there, and so may its requests."""
        await self._end_backend()
        return Cleared()

    async def _end_backend(self) -> None:
        """Requests first: a server without requests obeys its first SIGTERM. Nothing of them is run again."""
        self._records.fail_all(self._verdict)
        self._verdict = WeftError(Reason.WORKER_RESTARTED, "the backend was stopped while it worked on the request")
        try:
            if not await event_within(self._clock, REQUESTS_END_SECONDS, self._records.idle):
                log.warning("requests hold on to a backend that ends", model=self._config.model)
        finally:
            await self._backend.stop()  # whoever stops us may lose patience; the process must go all the same

    async def _fall_asleep(self) -> Event:
        """New work is refused already, and the router waits and wakes it."""
        sleep = self._hibernation.sleep
        await first_within(self._clock, self._hibernation.drain_seconds, self._records.idle, self._memory.lost)
        try:
            if sleep is not None and sleep.action is not None and not self._memory.lost.is_set():
                await self._run_recipe(sleep.action, sleep.max_wait_seconds)
        except WeftError as error:
            log.warning("model did not go to sleep", model=self._config.model, message=error.message)
            self._sleep_asked.clear()
            self.asleep.settle(WeftError(Reason.BACKEND_ERROR, f"the model did not go to sleep: {error.message}"))
            return SleepFailed()
        await self._end_backend()
        log.info("model went to sleep", model=self._config.model)
        return Slept()

    async def _rest(self) -> Event:
        await self.wake_asked.wait()
        return WakeAsked()

    async def _wake(self) -> Event:
        if not self._rules.attached and self._hibernation.recipe is None:
            # As any load of ours: given up when it stalls and not by a clock, and ended by an unload.
            loaded = await self._load()
            return self._not_woken(loaded.reason, loaded.how) if isinstance(loaded, LoadFailed) else loaded
        limit = self._hibernation.max_wait_seconds
        reason, self.loader.was_started = Reason.WAKE_FAILED, False
        try:
            await within(self._clock, limit, self._bring_up())
        except WeftError as error:
            reason, why = error.reason, error.message
        except TimeoutError:
            why = f"it was not up within {limit:g} s" + (f": {self._obstacle}" if self._obstacle else "")
        else:
            return Loaded()
        await self._backend.stop()
        return self._not_woken(reason, why)

    def _not_woken(self, reason: Reason, why: str) -> WakeFailed:
        log.warning("model could not be woken", model=self._config.model, message=why)
        return WakeFailed(reason, why[:MAX_DETAIL_CHARS], self.loader.is_otherwise)

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
                self._obstacle = error.message
            await self._clock.sleep(ATTACH_POLL_SECONDS)

    async def _seek(self) -> Event:
        while not await event_within(self._clock, self._hibernation.attach_retry_seconds, self.wake_asked):
            try:
                await self._start_backend()
            except WeftError as error:
                self._note(Missing(error.message))
            else:
                return Loaded()
        return WakeAsked()

    async def _pause(self) -> Event:
        while (left := (self.state.resume_at or 0.0) - self._clock.monotonic()) > 0:
            if await event_within(self._clock, left, self._sleep_asked):
                return SleepAsked()
        return PauseOver()
