"""The registry's calls to runners: load, unload, pull, flush, evict."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from registry_svc.mesh.core import RegistryCore
from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import load_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1 import runner_service_pb2_grpc as pb_grpc
from weft.dispatch.tickets import Action, PermitTarget, make_permit
from weft.kernel.channels.rpc import ChannelPool, calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.address import metadata_of


class EvictionAnswer(Enum):
    """Answer of a runner to an eviction request."""

    GIVEN_UP = auto()
    """The model sleeps; its lease was released, or will be soon."""
    REFUSED = auto()
    """The model is busy, pinned or of a higher priority, or cannot sleep."""
    UNREACHABLE = auto()
    """No usable answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRequest:
    """A request to a runner to evict a model."""

    runner: str
    model: str
    lease_id: str
    priority: Priority
    """Priority of the request that needs the memory."""
    wanted_by: str
    """Purpose of the request that needs the memory, for the log."""


log = get_logger("weft.registry.operations")

# An idle model stops within its backend's grace periods, which add up to less.
YIELD_TIMEOUT_SECONDS = 60.0
PROBE_TIMEOUT_SECONDS = 2.0
DESCRIBE_TIMEOUT_SECONDS = 5.0
RETRY_AFTER_SECONDS = 5.0
_NO_LONGER_THERE = frozenset(
    {Reason.WORKER_LOST, Reason.RUNNER_UNREACHABLE, Reason.NO_RUNNER_AVAILABLE, Reason.DEADLINE_EXCEEDED}
)


class Permission(NamedTuple):
    """What a call may do."""

    action: Action
    model: str
    """The model, or its source."""
    operation_id: str = ""


class RunnerCalls:
    """Calls to active runners by name. The caller owns `channels` and closes it.

    Each call has a permit. All except `evict` raise the runner's WeftError, NO_RUNNER_AVAILABLE if the runner is not
    active, and WORKER_LOST if the connection breaks. Closing or cancelling a call cancels the work.
    """

    def __init__(
        self, core: RegistryCore, channels: ChannelPool, until_owner: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`until_owner` waits until no other registry can own the database and command the same runners."""
        self._until_owner = until_owner or _no_wait
        self._core = core
        self._channels = channels

    def load(
        self, runner: str, model: str, options: load_pb2.LoadOptions, *, operation_id: str
    ) -> AsyncGenerator[pb.LoadResponse]:
        """Loads a model. The last response is the result."""
        request = pb.LoadRequest(model=model, options=options)
        return self._responses(runner, "Load", request, Permission(Action.LOAD, model, operation_id))

    def pull(
        self, runner: str, request: operation_pb2.PullModel, *, operation_id: str
    ) -> AsyncGenerator[pb.PullModelResponse]:
        """Pulls the files of a model. The last response has what is stored."""
        asked = pb.PullModelRequest(source=request.source, form=request.form)
        return self._responses(runner, "PullModel", asked, Permission(Action.PULL, request.source, operation_id))

    def add_model(
        self, runner: str, name: str, request: operation_pb2.LoadModel, *, operation_id: str
    ) -> AsyncGenerator[pb.AddModelResponse]:
        """Serves a model by its source under a name. The last response has the model."""
        asked = pb.AddModelRequest(source=request.source, name=name, options=request.options)
        return self._responses(runner, "AddModel", asked, Permission(Action.ADD, request.source, operation_id))

    async def remove_model(self, runner: str, model: str, *, operation_id: str) -> pb.RemoveModelResponse:
        """Removes an added model."""
        request, permission = pb.RemoveModelRequest(model=model), Permission(Action.REMOVE, model, operation_id)
        answer: pb.RemoveModelResponse = await self._answer(runner, "RemoveModel", request, permission)
        return answer

    async def unload(self, runner: str, model: str, *, operation_id: str) -> pb.UnloadResponse:
        """Unloads a model."""
        request, permission = pb.UnloadRequest(model=model), Permission(Action.UNLOAD, model, operation_id)
        answer: pb.UnloadResponse = await self._answer(runner, "Unload", request, permission)
        return answer

    async def flush_cache(
        self, runner: str, request: pb.FlushCacheRequest, *, operation_id: str
    ) -> pb.FlushCacheResponse:
        """Deletes cached prefixes."""
        permitted, permission = pb.FlushCacheRequest(), Permission(Action.FLUSH, request.model, operation_id)
        permitted.CopyFrom(request)
        answer: pb.FlushCacheResponse = await self._answer(runner, "FlushCache", permitted, permission)
        return answer

    async def source_engines(self, runner: str, source: str) -> Sequence[pb.InstanceDescription]:
        """Returns the engines of a runner that may serve a source; empty if unknown."""
        found: pb.DescribeResponse = await self._answer(
            runner,
            "Describe",
            pb.DescribeRequest(source=source),
            Permission(Action.ADD, source),
            timeout=DESCRIBE_TIMEOUT_SECONDS,
        )
        return found.source_engines

    async def incarnation_at(self, address: str) -> str:
        """Returns the incarnation of the runner at an address; empty if none answers. Never raises a WeftError."""
        try:
            call = await self._call(address, "Describe", pb.DescribeRequest(), timeout=PROBE_TIMEOUT_SECONDS)
            return str((await _answered(call)).runner.incarnation)
        except WeftError:
            return ""

    async def evict(self, request: EvictionRequest) -> EvictionAnswer:
        """Asks a runner to give up the memory of an idle model. Returns once it sleeps. Never raises a WeftError."""
        message = pb.YieldMemoryRequest(
            model=request.model,
            lease_id=request.lease_id,
            priority=request.priority.wire,  # type: ignore[arg-type]  # same numbers
            wanted_by=request.wanted_by,
        )
        permission = Permission(Action.YIELD, request.model)
        try:
            await self._answer(request.runner, "YieldMemory", message, permission, timeout=YIELD_TIMEOUT_SECONDS)
        except WeftError as error:
            log.info("memory not released", runner=request.runner, model=request.model, reason=error.reason.name)
            return EvictionAnswer.UNREACHABLE if error.reason in _NO_LONGER_THERE else EvictionAnswer.REFUSED
        return EvictionAnswer.GIVEN_UP

    async def _answer(
        self,
        runner: str,
        method: str,
        request: Any,
        permission: Permission | None = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        address = await self._permitted(runner, request, permission)
        return await _answered(await self._call(address, method, request, timeout=timeout))

    async def _responses(self, runner: str, method: str, request: Any, permission: Permission) -> AsyncGenerator[Any]:
        """Yields the responses of a call; closing the generator cancels it."""
        call = await self._call(await self._permitted(runner, request, permission), method, request)
        try:
            with calling(Reason.WORKER_LOST):
                async for response in call:
                    yield response
        except WeftError as error:
            raise _failure(error) from error
        finally:
            call.cancel()

    async def _permitted(self, runner: str, request: Any, permission: Permission | None) -> str:
        """Sets the permit in a request. Returns the runner's address."""
        await self._until_owner()
        state = self._core.mesh.of_runner(runner)
        if state is None or not state.pulse.active:
            raise WeftError(
                Reason.NO_RUNNER_AVAILABLE,
                f"runner {runner!r} is not there; start it",
                metadata={"runner": runner},
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        profile = state.profile
        if permission is not None:
            target = PermitTarget(runner=profile.name, incarnation=profile.incarnation, key=state.session.ticket_key)
            action, model, operation_id = permission
            now = self._core.mesh_clock.utc_now().timestamp()
            permit = make_permit(target, action, model=model, operation_id=operation_id, now=now)
            request.permit.CopyFrom(permit)
        return profile.address

    async def _call(self, address: str, method: str, request: Any, *, timeout: float | None = None) -> Any:
        stub = pb_grpc.RunnerServiceStub(await self._channels.get(address))
        return getattr(stub, method)(request, timeout=timeout, metadata=metadata_of(address) or None)


async def _no_wait() -> None:
    """Returns immediately: there is no other registry."""


async def _answered(call: Awaitable[Any]) -> Any:
    try:
        with calling(Reason.WORKER_LOST):
            return await call
    except WeftError as error:
        raise _failure(error) from error


def _failure(failure: WeftError) -> WeftError:
    # The registry did not cancel: a stopping runner ends its calls with this status.
    if failure.reason is Reason.CANCELLED:
        return WeftError(Reason.WORKER_LOST, "the runner ended the call; it is being stopped")
    return failure
