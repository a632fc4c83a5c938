"""One instance: one model on one backend, kept running or asleep for as long as the runner runs."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runner_svc.backends.port import Backend
from runner_svc.config import InstanceConfig
from runner_svc.hibernation import RunRecipe, no_recipes
from runner_svc.life import InstanceLife
from runner_svc.policy.life_events import Command
from runner_svc.policy.phase import Phase
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.records import RequestRecords
from runner_svc.restart_log import Restart
from runner_svc.slots import RequestLimit, SlotTable
from runner_svc.waiting import within
from runner_svc.work import Work
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    import asyncio
    from datetime import datetime

LOADING_RETRY_SECONDS = 1.0


class Instance:
    """What others see of a backend's life and may ask of it. `InstanceLife` does the work, in one task.

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
    ) -> None:
        self._config = config
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self.backend = backend
        self.slots = SlotTable(config.slots, limit)
        self.records = RequestRecords(config.model, clock)
        self._life = InstanceLife(config, backend, self.records, clock, on_change, run_recipe)
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
        return self._life.context_tokens

    @property
    def last_restart_reason(self) -> str:
        """How the backend last ended by itself."""
        return self._life.restarts.last_detail

    @property
    def restart_count(self) -> int:
        """How often the backend was restarted after a fault."""
        return self._life.state.history.total

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
    def timeouts(self) -> TimeoutProfile:
        """The limits of time it works under."""
        return self._config.timeouts

    async def start(self) -> None:
        """Begin its life. Returns at once; the backend loads in the background."""
        self._task = start_task(self._life.run(), name=f"instance-{self.model}")

    async def stop(self) -> None:
        """End the backend and everything it started. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await stop_tasks([task])

    def drain(self) -> None:
        """Take nothing new; what runs goes on. The runner is about to end."""
        self._life.ask_drain()

    @contextmanager
    def admit(self, request_id: str) -> Iterator[Work]:
        """What one request works with, with a slot held and a record kept meanwhile; to be used within one task.

        Raises NO_SLOT_AVAILABLE, SHUTTING_DOWN while draining, BACKEND_NOT_READY in any other phase but ready. When the
        backend dies, stalls or is stopped the block is ended with the reason for that.
        """
        if self._life.stopping:
            raise self._shutting_down()
        if self.phase is not Phase.READY:
            raise WeftError(
                Reason.BACKEND_NOT_READY,
                f"{self.model} is {self.phase.name.lower()}{': ' + self.detail if self.detail else ''}",
                retry_after_seconds=LOADING_RETRY_SECONDS,
            )
        start = self._life.starts
        try:
            with self.slots.hold(request_id), self.records.keep(request_id) as record:
                yield Work(record, self.backend, lambda error: self._life.note_failure(error, start))
        finally:
            self._life.idle_since = self._clock.monotonic()

    async def wake(self) -> None:
        """Return once it takes requests. Callers share one wake; cancelling one leaves it to the others.

        Raises WAKE_FAILED with what went wrong, at once while it pauses after a crash, and when it is unloaded before;
        SHUTTING_DOWN when the runner is stopping.
        """
        self._require_running()
        if self.phase is Phase.READY:
            return
        if self._life.state.doing is Command.PAUSE:
            raise WeftError(Reason.WAKE_FAILED, self.detail, metadata={"model": self.model})
        self._life.wake_asked.set()
        await self._bounded(self._life.awake.wait(), Reason.WAKE_FAILED)

    async def load(self) -> None:
        """Wake it; it stays awake until it is unloaded, whatever its idle time. Raises as `wake`."""
        await self.wake()
        # Not before: several may load at once, and one that gives up must not undo what another has done. An unload
        # that was asked for meanwhile has the last word.
        if self.phase is Phase.READY:
            self._life.stays_awake = True

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
        self._life.stays_awake = False
        if self.phase not in (Phase.HIBERNATING, Phase.FAILED):
            self._life.ask_sleep()
            await self._bounded(self._life.asleep.wait(), Reason.BACKEND_NOT_READY)

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
