"""Calls to runners that end when their runner is gone, whatever the connection shows."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from registry_svc.operations.targets import RunnerDirectory
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock

# A broken connection is detected immediately, a frozen one within 40 s (`channels.rpc`). This detects what a relay
# hides: a runner that came back as another incarnation, or stopped its heartbeats.
LOOK_INTERVAL_SECONDS = 5.0
RETRY_PAUSE_SECONDS = 2.0
RETRY_AFTER_SECONDS = 5.0
_NOT_REACHED = frozenset(
    {
        Reason.NO_RUNNER_AVAILABLE,
        Reason.RUNNER_UNREACHABLE,
        Reason.WORKER_LOST,
        Reason.CONNECT_FAILED,
        Reason.SHUTTING_DOWN,
    }
)

T = TypeVar("T")


class RunnerPresence:
    """Makes calls to runners, and watches the runners during the call."""

    def __init__(self, directory: RunnerDirectory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock

    async def call(self, runner: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of `call`.

        Raises its error, NO_RUNNER_AVAILABLE if the runner is not active, and WORKER_LOST or WORKER_RESTARTED if it
        leaves during the call, which is then cancelled.
        """
        incarnation = self._directory.incarnation_of(runner)
        if incarnation is None:
            raise WeftError(
                Reason.NO_RUNNER_AVAILABLE,
                f"runner {runner!r} is not there; start it" if runner else "no runner serves this model; start one",
                metadata={"runner": runner},
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        working = asyncio.create_task(call(), name=f"call-{runner}")
        watching = asyncio.create_task(self._until_gone(runner, incarnation), name=f"attend-{runner}")
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise watching.result()
        finally:
            await cancelled(working, watching)

    async def patient_call(
        self, runner: str, call: Callable[[], Coroutine[Any, Any, T]], until: float, *, while_there: bool = False
    ) -> T:
        """As `call`, but retries calls to an unreachable runner until `until`, in monotonic seconds.

        With `while_there`, only while the runner is active.
        """
        while True:
            try:
                return await self.call(runner, call)
            except WeftError as error:
                if error.reason not in _NOT_REACHED or self._clock.monotonic() >= until:
                    raise
                if while_there and not self._directory.is_active(runner):
                    raise
            await self._clock.sleep(RETRY_PAUSE_SECONDS)

    async def _until_gone(self, runner: str, incarnation: str) -> WeftError:
        while True:
            await self._clock.sleep(LOOK_INTERVAL_SECONDS)
            current = self._directory.incarnation_of(runner)
            if current is None:
                return WeftError(Reason.WORKER_LOST, f"runner {runner!r} sends no heartbeats any more")
            if current != incarnation:
                return WeftError(Reason.WORKER_RESTARTED, f"runner {runner!r} was restarted meanwhile")


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancels tasks and waits until each has ended. Ignores their errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
