"""One supervised instance: one backend process, one model, kept running for as long as the runner runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from runner_svc.backends.port import Backend
from runner_svc.policy.phase import Phase
from runner_svc.policy.restart import RestartLimits, RestartPolicy
from runner_svc.slots import SlotTable
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    import asyncio

log = structlog.get_logger("weft.instance")

LOADING_RETRY_SECONDS = 1.0
MAX_DETAIL_CHARS = 1000
"""A crash's last words go into reports; the registry refuses a novel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceConfig:
    """What an instance is, apart from its backend."""

    model: str
    """The model's name in the mesh."""
    slots: int
    restart: RestartLimits = field(default_factory=RestartLimits)


class Instance:
    """Owns one backend's life: starts it, notices its death, starts it again, gives up in a crash loop.

    Only `_supervise` starts or stops the backend. `on_change` is called with every change that routers should hear of
    at once.
    """

    def __init__(self, config: InstanceConfig, backend: Backend, clock: Clock, on_change: Callable[[], None]) -> None:
        self._config = config
        self._clock = clock
        self._on_change = on_change
        self._restarts = RestartPolicy(config.restart)
        self._task: asyncio.Task[None] | None = None
        self.backend = backend
        self.slots = SlotTable(config.slots)
        self.phase = Phase.IDLE
        self.detail = ""
        """Why it is in this phase, in words."""
        self.context_tokens = 0
        self.digest = ""
        """Digest of the model file, once it is known."""
        self.last_restart_reason = ""

    @property
    def model(self) -> str:
        """The model's name in the mesh."""
        return self._config.model

    @property
    def restart_count(self) -> int:
        """How often the backend was restarted after a fault."""
        return self._restarts.total

    async def start(self) -> None:
        """Begin to supervise. Returns at once; the backend loads in the background."""
        self._task = start_task(self._supervise(), name=f"instance-{self.model}")

    async def stop(self) -> None:
        """End the backend and everything it started. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await stop_tasks([task])
        self._enter(Phase.IDLE)

    def drain(self) -> None:
        """Take nothing new; what runs goes on."""
        if self.phase is Phase.READY:
            self._enter(Phase.DRAINING)

    @contextmanager
    def admit(self, request_id: str) -> Iterator[Backend]:
        """The backend to use for one request, with a slot held meanwhile.

        Raises NO_SLOT_AVAILABLE, SHUTTING_DOWN while draining, BACKEND_NOT_READY in any other phase but ready.
        """
        if self.phase is Phase.DRAINING:
            raise WeftError(Reason.SHUTTING_DOWN, f"{self.model} takes no new work here: the runner is stopping")
        if self.phase is not Phase.READY:
            raise WeftError(
                Reason.BACKEND_NOT_READY,
                f"{self.model} is {self.phase.name.lower()}{': ' + self.detail if self.detail else ''}",
                retry_after_seconds=LOADING_RETRY_SECONDS,
            )
        with self.slots.hold(request_id):
            yield self.backend

    async def _supervise(self) -> None:
        try:
            while True:
                how = await self._run_once()
                self.last_restart_reason = how
                decision = self._restarts.died(self._clock.monotonic())
                log.warning("backend ended", model=self.model, how=how, restarts=self.restart_count)
                if decision.crash_loop:
                    self._enter(Phase.CRASH_LOOP, f"{how}; next start in {decision.pause_seconds:.0f} s")
                    log.error(
                        "backend is in a crash loop",
                        model=self.model,
                        pause_seconds=decision.pause_seconds,
                        last_lines=self.backend.log_lines(10),
                    )
                    await self._clock.sleep(decision.pause_seconds)
        finally:
            self._enter(Phase.STOPPING)
            await self.backend.stop()

    async def _run_once(self) -> str:
        """One life of the backend; returns how it ended."""
        self._enter(Phase.LOADING, self.last_restart_reason)
        began = self._clock.monotonic()
        try:
            facts = await self.backend.start()
        except WeftError as error:
            return str(error)
        self.context_tokens = facts.context_tokens
        log.info(
            "backend ready",
            model=self.model,
            pid=self.backend.process_id,
            load_seconds=round(self._clock.monotonic() - began, 2),
        )
        self._enter(Phase.READY)
        how = await self.backend.wait_exit()
        self._enter(Phase.STOPPING, how)
        # The process is gone, but what it started may not be.
        await self.backend.stop()
        return how

    def _enter(self, phase: Phase, detail: str = "") -> None:
        detail = detail[:MAX_DETAIL_CHARS]
        if (phase, detail) != (self.phase, self.detail):
            self.phase, self.detail = phase, detail
            self._on_change()
