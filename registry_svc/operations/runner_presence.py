"""Lookups of runners for operations, and calls that end when their runner is gone, whatever the connection shows."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from registry_svc.mesh.claims import claim_to
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.session_state import SessionState
from registry_svc.operations.policy.loads import PoolMember
from weft.api.registry.v1 import runner_pb2
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

_LOADED = frozenset({runner_pb2.InstanceState.PHASE_LOADING, runner_pb2.InstanceState.PHASE_READY})


@dataclass(frozen=True, slots=True)
class AddedModelView:
    """A model that an active runner serves by its source."""

    model: str
    source: str
    """For display: a URL has no query."""
    runner: str
    is_joined: bool = False
    """Whether this is what a joined machine says: it counts only for loads that name the machine."""


class RunnerDirectory:
    """Lookup of runners, models and pools."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    def runner_of(self, model: str) -> str | None:
        """Returns the runner that serves a model, "" if none does yet; None if the model is unknown."""
        found = self._core.mesh.model(model)
        return None if found is None else found.runner

    def holder_of(self, model: str) -> str | None:
        """As `runner_of`, but also returns a runner that has the model loaded but no longer publishes it."""
        found = self.runner_of(model)
        return self._core.mesh.unowned_on(model) if found is None else found

    def pool(self, name: str) -> tuple[PoolMember, ...]:
        """Returns the members of a pool; empty if there is no such pool."""
        found = self._core.mesh.pool(name)
        if found is None:
            return ()
        return tuple(self._pool_member(model.manifest.name, model.runner) for model in found.members)

    def names_pool(self, name: str) -> bool:
        """Whether models name this pool, so that it is not just the implicit pool of one model."""
        return self._core.mesh.pools.is_explicit(name)

    def incarnation_of(self, runner: str) -> str | None:
        """Returns the incarnation of an active runner, otherwise None."""
        member = self._core.mesh.of_runner(runner)
        return member.profile.incarnation if member is not None and member.pulse.active else None

    def active_runners(self) -> list[str]:
        """Returns the names of active runners, sorted."""
        return sorted(member.profile.name for member in self._core.mesh if member.pulse.active)

    def is_active(self, runner: str) -> bool:
        """Whether a runner is active."""
        return self.incarnation_of(runner) is not None

    def adding_runners(self, *, joined: bool = False) -> list[str]:
        """Returns the names of active runners that serve models by source, sorted; `joined`: also joined machines."""
        return sorted(each.profile.name for each in self._active(joined) if each.capability.message().adds_models)

    def attaching_runners(self) -> list[str]:
        """Returns the names of active runners that attach servers, sorted; joined machines attach none."""
        return sorted(each.profile.name for each in self._active() if each.capability.message().attaches_servers)

    def runner_of_server(self, server: str) -> str | None:
        """Returns the active runner that has attached a server, or None."""
        found = (each for each in self._active() if server in each.capability.message().attached_servers)
        return next((each.profile.name for each in found), None)

    def added_models(self) -> list[AddedModelView]:
        """Returns the models that active runners serve by source."""
        return [
            AddedModelView(instance.model, instance.added_source, each.profile.name, each.profile.dial_out)
            for each in self._active(joined=True)
            for instance in each.capability.message().instances
            if instance.added_source
        ]

    def known_names(self) -> Iterable[str]:
        """Returns the names of all models and pools."""
        mesh = self._core.mesh
        return {*mesh.names_of(ResourceKind.MODEL), *mesh.names_of(ResourceKind.POOL)}

    def runner_names(self) -> Iterable[str]:
        """Returns the names of all runners, including inactive ones."""
        return self._core.mesh.names_of(ResourceKind.RUNNER)

    def is_taken(self, name: str) -> bool:
        """Whether a resource has a name, so that a runner cannot publish a model with it."""
        mesh = self._core.mesh
        return bool(claim_to(mesh, ResourceKind.MODEL, name).owners or mesh.pools.is_explicit(name))

    def _active(self, joined: bool = False) -> Iterator[SessionState]:
        """Yields active runners; `joined`: also machines that joined, which may report what they like."""
        return (each for each in self._core.mesh if each.pulse.active and (joined or not each.profile.dial_out))

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


# A broken connection is detected immediately, a frozen one within 40 s (see weft.kernel.rpc). This detects what a relay
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
