"""Unloads models that runners have loaded but no longer publish, and records that as events.

Their memory serves no request, and is not considered by the router's eviction: it would stay until the runner ends.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.runner_calls import RunnerCalls
from weft.api.registry.v1 import event_pb2
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger

if TYPE_CHECKING:
    import asyncio

log = get_logger("weft.registry")

UNLOAD_GRACE_SECONDS = 10.0
"""How long an unowned model stays loaded, since a forced delete unloads it itself."""
UNLOAD_RETRY_SECONDS = 60.0
"""Interval of unload requests while it is still loaded."""
MAX_UNLOADS = 16
"""Maximum concurrent unload requests; other models wait for a later sweep."""


@dataclass(frozen=True, slots=True)
class UnownedModel:
    """A model loaded on a runner that does not publish it."""

    runner: str
    model: str


class UnownedModels:
    """Tracks unowned models from sweep to sweep. `leased` returns those with a lease of accelerator memory."""

    def __init__(self, core: RegistryCore, calls: RunnerCalls, leased: Callable[[], Iterable[UnownedModel]]) -> None:
        self._core = core
        self._calls = calls
        self._leased = leased
        self._due: dict[UnownedModel, float] = {}
        """When to request the next unload, in monotonic seconds; never if the runner did not start the engine."""
        self._reported: set[UnownedModel] = set()
        self._unloads: dict[UnownedModel, asyncio.Task[None]] = {}

    async def sweep(self) -> None:
        """Records new unowned models, and unloads them after the grace period."""
        now, present = self._core.clock.monotonic(), set(self._present())
        for gone in self._due.keys() - present:
            del self._due[gone]
            self._reported.discard(gone)
            log.info("unowned model is gone", runner=gone.runner, model=gone.model)
        for each in present - self._due.keys():
            self._due[each] = now + UNLOAD_GRACE_SECONDS
        for each, due in tuple(self._due.items()):
            if now >= due and each not in self._unloads and len(self._unloads) < MAX_UNLOADS:
                self._begin(each, now)

    def _begin(self, unowned: UnownedModel, now: float) -> None:
        if unowned not in self._reported:
            self._reported.add(unowned)
            log.warning("model is loaded and not published", runner=unowned.runner, model=unowned.model)
            self._core.publish((), [_event_of(unowned)])
        self._due[unowned] = now + UNLOAD_RETRY_SECONDS
        self._unloads[unowned] = start_task(self._unload(unowned), name="unload-unowned")

    async def stop(self) -> None:
        """Cancels the calls in progress. Idempotent."""
        tasks, self._unloads = list(self._unloads.values()), {}
        await stop_tasks(tasks)

    def _present(self) -> Iterable[UnownedModel]:
        mesh = self._core.mesh
        active = [state for state in mesh if state.pulse.active]
        yield from (UnownedModel(state.profile.name, model) for state in active for model in state.unowned)
        for each in self._leased():
            state = mesh.of_runner(each.runner)
            if state is not None and state.pulse.active:
                yield each

    async def _unload(self, unowned: UnownedModel) -> None:
        try:
            await self._calls.unload(unowned.runner, unowned.model, operation_id="")
            log.info("unowned model unloaded", runner=unowned.runner, model=unowned.model)
        except WeftError as error:
            log.warning(
                "unowned model not unloaded", runner=unowned.runner, model=unowned.model, reason=error.reason.name
            )
            if unowned in self._due and error.reason is Reason.UNSUPPORTED_OPERATION:
                self._due[unowned] = math.inf
        finally:
            self._unloads.pop(unowned, None)


def _event_of(unowned: UnownedModel) -> event_pb2.Event:
    return event_pb2.Event(
        kind=ResourceKind.RUNNER,
        name=unowned.runner,
        reason=event_pb2.EVENT_REASON_UNOWNED,
        message=(
            f"{unowned.model} was loaded there for {UNLOAD_GRACE_SECONDS:.0f} s and is not published any more: its "
            "memory has no owner, and it is unloaded"
        ),
    )
