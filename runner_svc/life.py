"""The life of one backend: the only place that starts it, stops it, wakes it and puts it to sleep."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum, auto

import structlog

from runner_svc.backends.port import Backend
from runner_svc.config import InstanceConfig
from runner_svc.hibernation import RunRecipe, SleepSettings
from runner_svc.policy.phase import Phase
from runner_svc.policy.restart import RestartPolicy
from runner_svc.policy.sleep import IdleSigns, SleepDecision, decide_sleep
from runner_svc.slots import SlotTable
from runner_svc.waiting import SharedOutcome, end_tasks, event_within, within
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

log = structlog.get_logger("weft.instance")

MAX_DETAIL_CHARS = 1000
"""A crash's last words go into reports; the registry refuses a novel."""
DRAIN_CHECK_SECONDS = 0.05
ATTACH_POLL_SECONDS = 0.5
"""How often a server that is being woken is looked for."""
CRASH_LOG_LINES = 10
WAKING = "waking"
FALLING_ASLEEP = "going to sleep"
INTERNAL_ERROR = "an internal error; the runner's log has the details"

_NOT_UP_YET = frozenset({Reason.CONNECT_FAILED, Reason.LOAD_STALLED})


class _Stage(Enum):
    """What is being done; each stage ends with the next one."""

    LOAD = auto()
    SERVE = auto()
    HIBERNATE = auto()
    WAKE = auto()
    SEEK = auto()
    """Looking out for a server that weft can neither start nor wake."""


class InstanceLife:
    """One backend, one task: `run`. Everybody else asks through the events and waits for the shared outcomes."""

    def __init__(
        self,
        config: InstanceConfig,
        backend: Backend,
        slots: SlotTable,
        clock: Clock,
        on_change: Callable[[], None],
        run_recipe: RunRecipe,
    ) -> None:
        self._config = config
        self._hibernation = config.hibernation
        self._backend = backend
        self._slots = slots
        self._clock = clock
        self._on_change = on_change
        self._run_recipe = run_recipe
        self._nudged = asyncio.Event()
        self._sleep_asked = asyncio.Event()
        self._why_asleep = ""
        self._obstacle = ""
        self.restarts = RestartPolicy(config.restart)
        self.phase = Phase.IDLE
        self.detail = ""
        self.context_tokens = 0
        self.last_restart_reason = ""
        self.idle_since = clock.monotonic()
        self.stays_awake = False
        """Loaded to stay: it does not go to sleep by itself."""
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

    def enter(self, phase: Phase, detail: str = "") -> None:
        """Be in a phase from now on, and tell."""
        detail = detail[:MAX_DETAIL_CHARS]
        if (phase, detail) != (self.phase, self.detail):
            self.phase, self.detail = phase, detail
            self._on_change()

    async def run(self) -> None:
        """Keep it as it should be until cancelled; then the backend is gone and nobody waits any more."""
        stages: dict[_Stage, Callable[[], Awaitable[_Stage]]] = {
            _Stage.LOAD: self._load,
            _Stage.SERVE: self._serve,
            _Stage.HIBERNATE: self._hibernate,
            _Stage.WAKE: self._wake,
            _Stage.SEEK: self._seek,
        }
        stage = _Stage.HIBERNATE if self._hibernation.start_asleep else _Stage.LOAD
        try:
            while True:
                try:
                    stage = await stages[stage]()
                except Exception:
                    # Without this the model would look as if it were about to load until the runner is restarted.
                    log.exception("unforeseen error in a model's life", model=self._config.model)
                    stage = await self._begin_anew()
        finally:
            self.enter(Phase.STOPPING)
            gone = WeftError(Reason.SHUTTING_DOWN, "the runner is stopping")
            self.awake.settle(gone)
            self.asleep.settle(gone)
            await self._backend.stop()

    async def _begin_anew(self) -> _Stage:
        """After an error that nobody foresaw: as after a death."""
        await self._backend.stop()
        self._fail_wake(INTERNAL_ERROR)
        self.asleep.settle(WeftError(Reason.INTERNAL, INTERNAL_ERROR))
        return self._absent(INTERNAL_ERROR) if self._hibernation.attached else await self._restart(INTERNAL_ERROR)

    async def _load(self) -> _Stage:
        self.enter(Phase.LOADING, self.last_restart_reason)
        loading = asyncio.create_task(self._start_backend())
        unloaded = asyncio.create_task(self._sleep_asked.wait())
        try:
            await asyncio.wait({loading, unloaded}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return _Stage.HIBERNATE
            loading.result()
        except WeftError as error:
            if self._hibernation.attached:
                return self._absent(error.message)
            return await self._restart(str(error))
        finally:
            await end_tasks(loading, unloaded)
        return _Stage.SERVE

    async def _start_backend(self) -> None:
        began = self._clock.monotonic()
        facts = await self._backend.start()
        self.context_tokens = facts.context_tokens
        seconds = round(self._clock.monotonic() - began, 2)
        log.info("backend ready", model=self._config.model, pid=self._backend.process_id, load_seconds=seconds)

    async def _serve(self) -> _Stage:
        """Ready until the backend ends by itself or goes to sleep."""
        self.wake_asked.clear()
        self.idle_since = self._clock.monotonic()
        self.enter(Phase.DRAINING if self.stopping else Phase.READY)
        self.awake.settle()
        exited = asyncio.create_task(self._backend.wait_exit())
        exited.add_done_callback(lambda _: self._nudged.set())
        try:
            while not exited.done():
                self._nudged.clear()
                decision = self._decide_sleep()
                if decision.sleep or self._sleep_asked.is_set():
                    if await self._fall_asleep():
                        return self._absent("")
                else:
                    await event_within(self._clock, decision.look_again_seconds, self._nudged)
            how = exited.result()
        finally:
            await end_tasks(exited)
        self.enter(Phase.STOPPING, how)
        # The process is gone, but what it started may not be.
        await self._backend.stop()
        return self._absent(how) if self._hibernation.attached else await self._restart(how)

    def _decide_sleep(self) -> SleepDecision:
        signs = IdleSigns(
            now=self._clock.monotonic(),
            idle_since=self.idle_since,
            busy=bool(self._slots.holders),
            stays_awake=self.stays_awake or self.stopping,
        )
        return decide_sleep(signs, self._hibernation.sleep_after_seconds)

    async def _fall_asleep(self) -> bool:
        """Whether it sleeps now. From here on new work is refused, and the router waits and wakes it."""
        self.enter(Phase.STOPPING, FALLING_ASLEEP)
        deadline = self._clock.monotonic() + self._hibernation.drain_seconds
        while self._slots.holders and self._clock.monotonic() < deadline:
            await self._clock.sleep(DRAIN_CHECK_SECONDS)
        try:
            await self._run_sleep_action(self._hibernation.sleep)
        except WeftError as error:
            self._stay_awake(error)
            return False
        await self._backend.stop()
        log.info("model went to sleep", model=self._config.model)
        return True

    async def _run_sleep_action(self, sleep: SleepSettings | None) -> None:
        if sleep is not None and sleep.action is not None:
            await self._run_recipe(sleep.action, sleep.max_wait_seconds)

    def _stay_awake(self, error: WeftError) -> None:
        """The sleep action failed: serve on, and try again after another idle time."""
        log.warning("model did not go to sleep", model=self._config.model, message=error.message)
        self._sleep_asked.clear()
        self.wake_asked.clear()
        self.idle_since = self._clock.monotonic()
        self.enter(Phase.DRAINING if self.stopping else Phase.READY)
        self.awake.settle()
        self.asleep.settle(WeftError(Reason.BACKEND_ERROR, f"the model did not go to sleep: {error.message}"))

    async def _hibernate(self) -> _Stage:
        self._sleep_asked.clear()
        self.enter(Phase.HIBERNATING, self._why_asleep)
        self._why_asleep = ""
        self.asleep.settle()
        await self.wake_asked.wait()
        return _Stage.WAKE

    async def _wake(self) -> _Stage:
        self.enter(Phase.LOADING, WAKING)
        limit = self._hibernation.max_wait_seconds
        try:
            await within(self._clock, limit, self._bring_up())
        except WeftError as error:
            why = error.message
        except TimeoutError:
            why = f"it was not up within {limit:g} s" + (f": {self._obstacle}" if self._obstacle else "")
        else:
            return _Stage.SERVE
        await self._backend.stop()
        self._fail_wake(why)
        return self._absent(why)

    def _fail_wake(self, why: str) -> None:
        log.warning("model could not be woken", model=self._config.model, message=why)
        self.wake_asked.clear()
        self.awake.settle(WeftError(Reason.WAKE_FAILED, why[:MAX_DETAIL_CHARS], metadata={"model": self._config.model}))

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

    def _absent(self, why: str) -> _Stage:
        """Asleep from here on. A server that we cannot wake is looked for, since somebody else may."""
        self._why_asleep = why
        return _Stage.HIBERNATE if self._hibernation.can_wake else _Stage.SEEK

    async def _seek(self) -> _Stage:
        hibernation = self._hibernation
        phase = Phase.HIBERNATING if hibernation.woken_by_mesh else Phase.FAILED
        self._sleep_asked.clear()
        self.enter(phase, self._why_asleep)
        self.asleep.settle()
        while not await event_within(self._clock, hibernation.attach_retry_seconds, self.wake_asked):
            try:
                await self._start_backend()
            except WeftError as error:
                self.enter(phase, error.message)
            else:
                return _Stage.SERVE
        return _Stage.WAKE

    async def _restart(self, how: str) -> _Stage:
        """After a death of a process of ours."""
        self.last_restart_reason = how
        decision = self.restarts.died(self._clock.monotonic())
        log.warning("backend ended", model=self._config.model, how=how, restarts=self.restarts.total)
        if not decision.crash_loop:
            return _Stage.LOAD
        pause = decision.pause_seconds
        self.enter(Phase.CRASH_LOOP, f"{how}; next start in {pause:.0f} s")
        self.wake_asked.clear()
        self.awake.settle(WeftError(Reason.WAKE_FAILED, self.detail))
        lines = self._backend.log_lines(CRASH_LOG_LINES)
        log.error("backend is in a crash loop", model=self._config.model, pause_seconds=pause, last_lines=lines)
        unloaded = await event_within(self._clock, pause, self._sleep_asked)
        return _Stage.HIBERNATE if unloaded else _Stage.LOAD
