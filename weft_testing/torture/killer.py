"""The killer: kills processes of the mesh by plan, and restarts every process that ends."""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import psutil

from weft_testing.torture.mesh import Member, Mesh
from weft_testing.torture.plan import WAKE_SECONDS, Plan, Target, kills

if TYPE_CHECKING:
    from collections.abc import Awaitable

RESTART_SECONDS = 0.5
"""Pause before the restart of a process that ended by itself."""
POLL_SECONDS = 0.1
MIN_AT_WORK = 3
"""Requests in progress that a router must have before it is paused, so that it loses leases ..."""
AT_WORK_SECONDS = 5.0
"""... how long to wait for them at most ..."""
MOMENT_SECONDS = 0.01
"""... and how often to poll."""
HEAD_START = 2
"""Kills that may be ahead of the tasks."""
RARE_PAUSE_SECONDS = (1.0, 4.0)
"""Range of pauses before the rare model's runner is restarted."""


class Killer:
    """Kills and restarts processes until it is stopped."""

    def __init__(self, plan: Plan, mesh: Mesh, acked: Callable[[], int], at_work: Callable[[], int]) -> None:
        """`acked`: number of acknowledged tasks; `at_work`: number of requests in progress at backends."""
        self._plan = plan
        self._mesh = mesh
        self._acked = acked
        self._at_work = at_work
        self._random = Random(f"{plan.seed}/whom")  # noqa: S311 - the seed must decide it
        self._restarters: dict[str, asyncio.Task[None]] = {}
        self._stale: asyncio.Task[None] | None = None
        self.done: Counter[Target] = Counter()
        """Kills that hit a process, by target."""
        self.exits: Counter[str] = Counter()
        """Unplanned exits, by process and exit code."""

    def restart_all(self) -> None:
        """Starts to restart every process that ends."""
        for member in self._mesh.members:
            self._restart_on_exit(member)

    async def run(self) -> None:
        """Kills until the planned number of kills has hit a process."""
        for pause, target in kills(self._plan):
            if self.done.total() >= self._plan.kills:
                break
            await asyncio.sleep(pause)
            await self._wait_for_tasks()
            if await self._kill(target):
                self.done[target] += 1
        if self._stale is not None:
            await self._stale

    async def _wait_for_tasks(self) -> None:
        """Waits until the share of acknowledged tasks reaches the share of done kills.

        Otherwise all kills on a slow machine would hit a mesh that is still restarting.
        """
        share = (self.done.total() - HEAD_START) / self._plan.kills
        while self._acked() < share * self._plan.tasks:  # noqa: ASYNC110 - other processes write it
            await asyncio.sleep(POLL_SECONDS)

    async def submitters_done(self) -> None:
        """Waits until every submitter has ended with code 0."""
        await asyncio.gather(*(self._restarters[member.name] for member in self._mesh.submitters))

    async def stop(self) -> None:
        """Stops restarting processes."""
        tasks = [*self._restarters.values(), *([self._stale] if self._stale else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _restart_on_exit(self, member: Member) -> None:
        self._restarters[member.name] = asyncio.create_task(self._restart_loop(member))

    async def _restart_loop(self, member: Member) -> None:
        is_submitter = member in self._mesh.submitters
        is_rare = member is self._mesh.runners[-1]
        while (code := await member.wait()) != 0 or not is_submitter:
            if code != -signal.SIGKILL:
                self.exits[f"{member.name} with {code}"] += 1
                await asyncio.sleep(RESTART_SECONDS)
            elif is_rare:
                await asyncio.sleep(self._random.uniform(*RARE_PAUSE_SECONDS))
            await member.start()

    async def _kill(self, target: Target) -> bool:
        """Kills a target; returns whether it hit a process."""
        ways: dict[Target, Callable[[], Awaitable[bool]]] = {
            Target.SUBMITTER: lambda: self._random.choice(self._mesh.submitters).kill(),
            Target.BACKEND: self._kill_backend,
            Target.RUNNER: lambda: _kill_serving(self._random.choice(self._mesh.runners)),
            Target.ROUTER: lambda: _kill_serving(self._mesh.router),
            Target.REGISTRY: lambda: _kill_serving(self._mesh.registry),
            Target.STALE_ROUTER: self._make_stale,
        }
        return await ways[target]()

    async def _kill_backend(self) -> bool:
        backends = await asyncio.to_thread(self._mesh.backends)
        if not backends:
            return False
        with suppress(psutil.NoSuchProcess):
            self._random.choice(backends).kill()
            return True
        return False

    async def _make_stale(self) -> bool:
        """Pauses the router for longer than its leases, with another one in its place; one at a time."""
        if self._stale is not None and not self._stale.done():
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(AT_WORK_SECONDS):
                while self._at_work() < MIN_AT_WORK:  # noqa: ASYNC110 - other processes write it
                    await asyncio.sleep(MOMENT_SECONDS)
        if not self._mesh.router.serves or not self._mesh.router.signal(signal.SIGSTOP):
            return False
        old = self._mesh.replace_router()
        self._restarters[old.name].cancel()
        await self._mesh.router.start()
        self._restart_on_exit(self._mesh.router)
        self._stale = asyncio.create_task(self._wake(old))
        return True

    async def _wake(self, old: Member) -> None:
        try:
            await asyncio.sleep(self._plan.sleep_seconds)
            old.signal(signal.SIGCONT)
            await asyncio.sleep(WAKE_SECONDS)
        finally:
            await old.kill()


async def _kill_serving(member: Member) -> bool:
    """Kills a process that serves; returns whether it was hit. One that is still starting is spared."""
    return member.serves and await member.kill()
