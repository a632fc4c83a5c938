"""Unloads models that runners have loaded but no longer publish, and records that as events.

Their memory serves no request, and is not considered by the router's eviction: it would stay until the runner ends.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.runner_calls import RunnerCalls
from weft.api.registry.v1 import event_pb2
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    import asyncio

from dataclasses import dataclass

UNLOAD_GRACE_SECONDS = 10.0
"""How long an unowned model stays loaded, since a forced delete unloads it itself."""
UNLOAD_RETRY_SECONDS = 60.0
"""Interval of unload requests while it is still loaded."""


@dataclass(frozen=True, slots=True)
class UnownedModel:
    """A model loaded on a runner that does not publish it."""

    runner: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnownedSince:
    """Since when a model is unowned, and whether an unload was requested. Times are monotonic seconds."""

    seen_at: float
    asked_at: float | None = None
    """When an unload was last requested; None: never."""
    can_be_unloaded: bool = True
    """False: the runner answered that it did not start the engine."""

    def asked(self, now: float) -> "UnownedSince":
        """Returns the state after an unload was requested."""
        return replace(self, asked_at=now)


def is_to_be_unloaded(since: UnownedSince, now: float) -> bool:
    """Whether to request an unload now."""
    if not since.can_be_unloaded:
        return False
    if since.asked_at is None:
        return now >= since.seen_at + UNLOAD_GRACE_SECONDS
    return now >= since.asked_at + UNLOAD_RETRY_SECONDS


log = get_logger("weft.registry")

MAX_UNLOADS = 16
"""Maximum concurrent unload requests; other models wait for a later sweep."""


class UnownedModels:
    """Tracks unowned models from sweep to sweep. `leased` returns those with a lease of accelerator memory."""

    def __init__(self, core: RegistryCore, calls: RunnerCalls, leased: Callable[[], Iterable[UnownedModel]]) -> None:
        self._core = core
        self._calls = calls
        self._leased = leased
        self._since: dict[UnownedModel, UnownedSince] = {}
        self._unloads: dict[UnownedModel, asyncio.Task[None]] = {}

    async def sweep(self) -> None:
        """Records new unowned models, and unloads them after the grace period."""
        now, present = self._core.clock.monotonic(), set(self._present())
        for gone in self._since.keys() - present:
            del self._since[gone]
            log.info("unowned model is gone", runner=gone.runner, model=gone.model)
        for each in present - self._since.keys():
            self._since[each] = UnownedSince(seen_at=now)
        for each, since in tuple(self._since.items()):
            if is_to_be_unloaded(since, now) and each not in self._unloads and len(self._unloads) < MAX_UNLOADS:
                self._begin(each, since, now)

    def _begin(self, unowned: UnownedModel, since: UnownedSince, now: float) -> None:
        if since.asked_at is None:
            log.warning("model is loaded and not published", runner=unowned.runner, model=unowned.model)
            self._core.publish((), [_event_of(unowned)])
        self._since[unowned] = since.asked(now)
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
            since = self._since.get(unowned)
            if since is not None and error.reason is Reason.UNSUPPORTED_OPERATION:
                self._since[unowned] = replace(since, can_be_unloaded=False)
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
