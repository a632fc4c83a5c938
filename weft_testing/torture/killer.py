"""Kills members of a mesh when the plan says so, and sees that each gets another life."""

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
"""Pause before the next life of a member that ended by itself."""
POLL_SECONDS = 0.1
MIN_AT_WORK = 3
"""Requests that a router has under way when it is put to sleep: one that has none loses no lease ..."""
AT_WORK_SECONDS = 5.0
"""... but so long is waited for them at most ..."""
MOMENT_SECONDS = 0.01
"""... and so often is looked."""
HEAD_START = 2
"""How many kills may be ahead of the tasks."""
RARE_PAUSE_SECONDS = (1.0, 4.0)
"""How long the rare model is away after its runner was killed."""


class Killer:
    """Ends members and begins them again, until it is told to stop."""

    def __init__(self, plan: Plan, mesh: Mesh, acked: Callable[[], int], at_work: Callable[[], int]) -> None:
        """`acked`: how many tasks are acknowledged by now; `at_work`: how many requests backends work on."""
        self._plan = plan
        self._mesh = mesh
        self._acked = acked
        self._at_work = at_work
        self._random = Random(f"{plan.seed}/whom")  # noqa: S311 - who is killed is no secret
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stale: asyncio.Task[None] | None = None
        self.done: Counter[Target] = Counter()
        """Kills that hit somebody."""
        self.exits: Counter[str] = Counter()
        """Ends that nobody wanted, by member and exit code."""

    def keep_all(self) -> None:
        """From now on whoever ends is started again."""
        for member in self._mesh.members:
            self._keep(member)

    async def run(self) -> None:
        """Until as many kills as planned have hit somebody."""
        for pause, target in kills(self._plan):
            if self.done.total() >= self._plan.kills:
                break
            await asyncio.sleep(pause)
            await self._tasks_keep_up()
            if await self._kill(target):
                self.done[target] += 1
        if self._stale is not None:
            await self._stale

    async def _tasks_keep_up(self) -> None:
        """Until so large a part of the tasks is acknowledged as is done of the kills.

        On a slow machine all kills would otherwise hit a mesh that is still getting up from the ones before.
        """
        share = (self.done.total() - HEAD_START) / self._plan.kills
        while self._acked() < share * self._plan.tasks:  # noqa: ASYNC110 - other processes write it
            await asyncio.sleep(POLL_SECONDS)

    async def submitters_done(self) -> None:
        """Until every submitter has ended well."""
        await asyncio.gather(*(self._keepers[member.name] for member in self._mesh.submitters))

    async def stop(self) -> None:
        """Whoever ends now stays so."""
        tasks = [*self._keepers.values(), *([self._stale] if self._stale else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep(self, member: Member) -> None:
        self._keepers[member.name] = asyncio.create_task(self._keep_alive(member))

    async def _keep_alive(self, member: Member) -> None:
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
        """Whether it hit somebody."""
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
        """Stop the router for longer than its leases, with another one in its place; one at a time."""
        if self._stale is not None and not self._stale.done():
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(AT_WORK_SECONDS):
                while self._at_work() < MIN_AT_WORK:  # noqa: ASYNC110 - other processes write it
                    await asyncio.sleep(MOMENT_SECONDS)
        if not self._mesh.router.serves or not self._mesh.router.signal(signal.SIGSTOP):
            return False
        old = self._mesh.replace_router()
        self._keepers[old.name].cancel()
        await self._mesh.router.start()
        self._keep(self._mesh.router)
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
    """Whether it was hit; one that is still starting is let alone."""
    return member.serves and await member.kill()
