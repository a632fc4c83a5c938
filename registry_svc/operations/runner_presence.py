"""Runners as operations see them, and calls that end when their runner goes, whatever the connection shows."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from registry_svc.mesh.claims import claim_to
from registry_svc.mesh.core import RegistryCore
from registry_svc.operations.policy.loads import PoolMember
from weft.api.registry.v1 import runner_pb2
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

_LOADED = frozenset({runner_pb2.InstanceState.PHASE_LOADING, runner_pb2.InstanceState.PHASE_READY})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSnapshot:
    """A runner right now."""

    name: str
    incarnation: str
    active: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedModelView:
    """A model that a runner which is there serves by its source."""

    model: str
    source: str
    """As it is shown: a URL without its query."""
    runner: str


class RunnerDirectory:
    """Lookup of runners, models and pools."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    def runner_of(self, model: str) -> str | None:
        """The runner that serves a model; empty: none yet. None: no model of this name is known."""
        found = self._core.mesh.model(model)
        return None if found is None else found.runner

    def holder_of(self, model: str) -> str | None:
        """See `runner_of`; also the runner that has the model loaded and does not publish it any more."""
        found = self.runner_of(model)
        return self._core.mesh.unowned_on(model) if found is None else found

    def pool(self, name: str) -> tuple[PoolMember, ...]:
        """The members of a pool by name; empty: there is none of this name."""
        found = self._core.mesh.pool(name)
        if found is None:
            return ()
        return tuple(self._pool_member(model.manifest.name, model.runner) for model in found.members)

    def names_pool(self, name: str) -> bool:
        """Whether models name a pool of this name, so that it is more than one model's own."""
        return self._core.mesh.pools.is_explicit(name)

    def runner(self, name: str) -> RunnerSnapshot | None:
        """A runner; None: unknown."""
        member = self._core.mesh.of_runner(name)
        if member is None:
            return None
        return RunnerSnapshot(name=name, incarnation=member.profile.incarnation, active=member.pulse.active)

    def active_runners(self) -> list[str]:
        """The names of all that are there, in order."""
        return sorted(member.profile.name for member in self._core.mesh if member.pulse.active)

    def is_active(self, runner: str) -> bool:
        """Whether a runner is there."""
        member = self._core.mesh.of_runner(runner)
        return member is not None and member.pulse.active

    def adding_runners(self) -> list[str]:
        """The names of those that are there and serve models by their source, in order."""
        return sorted(name for name, report in self._reports() if report.adds_models)

    def attaching_runners(self) -> list[str]:
        """The names of those that are there and attach servers, in order."""
        return sorted(name for name, report in self._reports() if report.attaches_servers)

    def runner_of_server(self, server: str) -> str | None:
        """The runner that is there and has attached a server; None: none has one of this name."""
        return next((name for name, report in self._reports() if server in report.attached_servers), None)

    def added_models(self) -> list[AddedModelView]:
        """The models that runners which are there serve by their source."""
        return [
            AddedModelView(model=instance.model, source=instance.added_source, runner=name)
            for name, report in self._reports()
            for instance in report.instances
            if instance.added_source
        ]

    def known_names(self) -> Iterable[str]:
        """The names of all models and pools."""
        mesh = self._core.mesh
        return {*mesh.names_of(ResourceKind.MODEL), *mesh.names_of(ResourceKind.POOL)}

    def runner_names(self) -> Iterable[str]:
        """The names of all runners, also of those that are not there."""
        return self._core.mesh.names_of(ResourceKind.RUNNER)

    def is_taken(self, name: str) -> bool:
        """Whether any resource has a name, so that a runner could not publish a model of it."""
        mesh = self._core.mesh
        return bool(claim_to(mesh, ResourceKind.MODEL, name).owners or mesh.pools.is_explicit(name))

    def _reports(self) -> Iterator[tuple[str, runner_pb2.Capability]]:
        """Yields the name and the last report of each runner that is there."""
        for member in self._core.mesh:
            if member.pulse.active:
                yield member.profile.name, member.capability.message()

    def _pool_member(self, model: str, runner: str) -> PoolMember:
        member = self._core.mesh.of_runner(runner) if runner else None
        instances = () if member is None else member.capability.message().instances
        instance = next((each for each in instances if each.model == model), None)
        return PoolMember(
            model=model,
            reachable=member is not None and member.pulse.active,
            loaded=instance is not None and instance.phase in _LOADED,
            slots_used=0 if instance is None else instance.slots_used,
        )


# A broken connection is noticed at once, a frozen one within 40 s (see weft.kernel.rpc). This notices what a relay in
# between hides: a runner that came back as another incarnation, or whose heartbeats stopped.
LOOK_INTERVAL_SECONDS = 5.0
RETRY_PAUSE_SECONDS = 2.0
RETRY_AFTER_SECONDS = 5.0
_NOT_REACHED = frozenset({Reason.NO_RUNNER_AVAILABLE, Reason.WORKER_LOST, Reason.CONNECT_FAILED, Reason.SHUTTING_DOWN})

T = TypeVar("T")


class RunnerPresence:
    """Makes calls to runners, and watches the runners meanwhile."""

    def __init__(self, directory: RunnerDirectory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock

    async def call(self, runner: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `call` returns.

        Raises its own error, NO_RUNNER_AVAILABLE when the runner is not active, and WORKER_LOST or WORKER_RESTARTED
        when it goes meanwhile; then the call was cancelled.
        """
        sight = self._directory.runner(runner) if runner else None
        if sight is None or not sight.active:
            raise WeftError(
                Reason.NO_RUNNER_AVAILABLE,
                f"runner {runner!r} is not there; start it" if runner else "no runner serves this model; start one",
                metadata={"runner": runner},
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        working = asyncio.create_task(call(), name=f"call-{runner}")
        watching = asyncio.create_task(self._until_gone(sight), name=f"attend-{runner}")
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
        """As `call`; until that moment of the clock, calls to an unreachable runner are retried.

        `while_there`: but not to one that is known to be gone.
        """
        while True:
            try:
                return await self.call(runner, call)
            except WeftError as error:
                if error.reason not in _NOT_REACHED or self._clock.monotonic() >= until:
                    raise
                if while_there and not self.is_there(runner):
                    raise
            await self._clock.sleep(RETRY_PAUSE_SECONDS)

    def is_there(self, runner: str) -> bool:
        """Whether a runner is active."""
        sight = self._directory.runner(runner) if runner else None
        return sight is not None and sight.active

    async def _until_gone(self, at_start: RunnerSnapshot) -> WeftError:
        while True:
            await self._clock.sleep(LOOK_INTERVAL_SECONDS)
            sight = self._directory.runner(at_start.name)
            if sight is None or not sight.active:
                return WeftError(Reason.WORKER_LOST, f"runner {at_start.name!r} sends no heartbeats any more")
            if sight.incarnation != at_start.incarnation:
                return WeftError(Reason.WORKER_RESTARTED, f"runner {at_start.name!r} was restarted meanwhile")


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until each has ended, however it ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
