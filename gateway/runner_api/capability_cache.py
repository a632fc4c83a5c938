"""The capability descriptor, composed in the background and answered from memory."""

import asyncio
from collections.abc import Callable

import structlog

from gateway.answers.sse import encode_json
from gateway.runner_api.capabilities import QueueFacts, capabilities_body
from gateway.runner_api.facts import DeviceFacts, ModelStage, RunnerFacts
from gateway.runner_api.ports import RunnerPort
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.service import start_critical, stop_tasks

TTL_SECONDS = 5.0
"""How old an answer is at most while all is well; what clients may keep it for, too."""
STALE_SECONDS = 3 * TTL_SECONDS
"""An older one is not told any more."""
DEVICES_TIMEOUT_SECONDS = 2.0

Stages = tuple[tuple[str, ModelStage], ...]

log = structlog.get_logger("weft.gateway")


class CapabilityCache:
    """Life cycle: start, stop."""

    def __init__(self, runner: RunnerPort, queue: Callable[[], QueueFacts], clock: Clock) -> None:
        self._runner = runner
        self._queue = queue
        self._clock = clock
        self._body = b""
        self._composed_at = 0.0
        self._stages: Stages = ()
        self._task: asyncio.Task[None] | None = None
        self.devices: tuple[DeviceFacts, ...] | None = None
        """As last seen; None: nobody can tell."""

    async def start(self) -> None:
        """Compose the first answer and keep it fresh."""
        await self.refresh()
        self._task = start_critical(self._keep_fresh(), name="runner-capabilities")

    async def stop(self) -> None:
        """Stop. Idempotent."""
        if self._task is not None:
            await stop_tasks([self._task])
            self._task = None

    def body(self) -> bytes:
        """The newest answer, as JSON. Raises SERVICE_UNAVAILABLE when it is too old to be told.

        A model that came up or went down since is told at once: who waits for one would ask again for nothing.
        """
        facts = self._runner.facts()
        if _stages(facts) != self._stages:
            self._compose(facts)
        if not self._body or self._clock.monotonic() - self._composed_at > STALE_SECONDS:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the runner does not know its own state")
        return self._body

    async def refresh(self) -> None:
        """Compose the answer anew."""
        self.devices = await self._devices()
        self._compose(self._runner.facts())
        self._composed_at = self._clock.monotonic()

    def _compose(self, facts: RunnerFacts) -> None:
        self._stages = _stages(facts)
        self._body = encode_json(capabilities_body(facts, self.devices, self._queue()))

    async def _devices(self) -> tuple[DeviceFacts, ...] | None:
        try:
            async with asyncio.timeout(DEVICES_TIMEOUT_SECONDS):
                return await self._runner.devices()
        except TimeoutError:
            return None

    async def _keep_fresh(self) -> None:
        while True:
            await self._clock.sleep(TTL_SECONDS)
            try:
                await self.refresh()
            except Exception:
                # The last answer stays until it is stale; a loop that ended would make it so for good.
                log.exception("the capability descriptor could not be composed")


def _stages(facts: RunnerFacts) -> Stages:
    return tuple((model.name, model.stage) for model in facts.models)
