"""The registry's calls to runners: load, unload, pull, flush, evict."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeVar, cast

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.session_state import SessionState
from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import load_pb2, permit_pb2, runner_service_pb2, runner_service_pb2_grpc
from weft.dispatch.tickets import Action, PermitTarget, make_permit
from weft.kernel.address import metadata_of
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft.kernel.rpc import ChannelPool, calling

if TYPE_CHECKING:
    import grpc

    from weft.api.runner.v1.runner_service_pb2_grpc import RunnerServiceAsyncStub


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
_NO_LONGER_THERE = frozenset({Reason.WORKER_LOST, Reason.NO_RUNNER_AVAILABLE, Reason.DEADLINE_EXCEEDED})

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]


class RunnerCalls:
    """Calls to active runners by name. The caller owns `channels` and closes it.

    Each call has a permit. All except `evict` raise the runner's WeftError, NO_RUNNER_AVAILABLE if the runner is not
    active, and WORKER_LOST if the connection breaks. Closing or cancelling a call cancels the work.
    """

    def __init__(
        self, core: RegistryCore, channels: ChannelPool, until_owner: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`until_owner` waits until no other registry can own the database and command the same runners."""
        self._until_owner = until_owner or _at_once
        self._core = core
        self._channels = channels

    async def load(
        self, runner: str, model: str, options: load_pb2.LoadOptions, *, operation_id: str
    ) -> AsyncGenerator[runner_service_pb2.LoadResponse]:
        """Loads a model. The last response is the result."""
        state = await self._member(runner)
        request = runner_service_pb2.LoadRequest(
            model=model,
            permit=self._permit(state, Action.LOAD, model=model, operation_id=operation_id),
            options=options,
        )
        stub, metadata = await self._reach(state)
        async with aclosing(_responses(stub.Load(request, metadata=metadata))) as responses:
            async for response in responses:
                yield response

    async def pull(
        self, runner: str, request: operation_pb2.PullModel, *, operation_id: str
    ) -> AsyncGenerator[runner_service_pb2.PullModelResponse]:
        """Pulls the files of a model. The last response has what is stored."""
        state = await self._member(runner)
        permit = self._permit(state, Action.PULL, model=request.source, operation_id=operation_id)
        asked = runner_service_pb2.PullModelRequest(source=request.source, form=request.form, permit=permit)
        stub, metadata = await self._reach(state)
        async with aclosing(_responses(stub.PullModel(asked, metadata=metadata))) as responses:
            async for response in responses:
                yield response

    async def add_model(
        self, runner: str, name: str, request: operation_pb2.LoadModel, *, operation_id: str
    ) -> AsyncGenerator[runner_service_pb2.AddModelResponse]:
        """Serves a model by its source under a name. The last response has the model."""
        state = await self._member(runner)
        asked = runner_service_pb2.AddModelRequest(
            source=request.source,
            name=name,
            permit=self._permit(state, Action.ADD, model=request.source, operation_id=operation_id),
            options=request.options,
        )
        stub, metadata = await self._reach(state)
        async with aclosing(_responses(stub.AddModel(asked, metadata=metadata))) as responses:
            async for response in responses:
                yield response

    async def remove_model(
        self, runner: str, model: str, *, operation_id: str
    ) -> runner_service_pb2.RemoveModelResponse:
        """Removes an added model."""
        state = await self._member(runner)
        request = runner_service_pb2.RemoveModelRequest(
            model=model, permit=self._permit(state, Action.REMOVE, model=model, operation_id=operation_id)
        )
        stub, metadata = await self._reach(state)
        return await _answer(stub.RemoveModel(request, metadata=metadata))

    async def unload(self, runner: str, model: str, *, operation_id: str) -> runner_service_pb2.UnloadResponse:
        """Unloads a model."""
        state = await self._member(runner)
        request = runner_service_pb2.UnloadRequest(
            model=model, permit=self._permit(state, Action.UNLOAD, model=model, operation_id=operation_id)
        )
        stub, metadata = await self._reach(state)
        return await _answer(stub.Unload(request, metadata=metadata))

    async def flush_cache(
        self, runner: str, request: runner_service_pb2.FlushCacheRequest, *, operation_id: str
    ) -> runner_service_pb2.FlushCacheResponse:
        """Deletes cached prefixes."""
        state = await self._member(runner)
        permitted = runner_service_pb2.FlushCacheRequest()
        permitted.CopyFrom(request)
        permitted.permit.CopyFrom(self._permit(state, Action.FLUSH, model=request.model, operation_id=operation_id))
        stub, metadata = await self._reach(state)
        return await _answer(stub.FlushCache(permitted, metadata=metadata))

    async def load_options(self, runner: str) -> dict[str, load_pb2.LoadOptions]:
        """Returns the options with which a runner has loaded or would load each model. Needs no permit."""
        stub, metadata = await self._reach(await self._member(runner))
        request = runner_service_pb2.DescribeRequest()
        found = await _answer(stub.Describe(request, timeout=DESCRIBE_TIMEOUT_SECONDS, metadata=metadata))
        return {each.model: each.load_options for each in found.instances}

    async def source_engines(self, runner: str, source: str) -> Sequence[runner_service_pb2.InstanceDescription]:
        """Returns the engines of a runner that may serve a source; empty if unknown."""
        state = await self._member(runner)
        permit = self._permit(state, Action.ADD, model=source, operation_id="")
        stub, metadata = await self._reach(state)
        request = runner_service_pb2.DescribeRequest(source=source, permit=permit)
        call = stub.Describe(request, timeout=DESCRIBE_TIMEOUT_SECONDS, metadata=metadata)
        return (await _answer(call)).source_engines

    async def incarnation_at(self, address: str) -> str:
        """Returns the incarnation of the runner at an address; empty if none answers. Never raises a WeftError."""
        try:
            stub, metadata = await self._at(address)
            call = stub.Describe(runner_service_pb2.DescribeRequest(), timeout=PROBE_TIMEOUT_SECONDS, metadata=metadata)
            return str((await _answer(call)).runner.incarnation)
        except WeftError:
            return ""

    async def evict(self, request: EvictionRequest) -> EvictionAnswer:
        """Asks a runner to give up the memory of an idle model. Returns once it sleeps. Never raises a WeftError."""
        try:
            state = await self._member(request.runner)
            message = runner_service_pb2.YieldMemoryRequest(
                model=request.model,
                permit=self._permit(state, Action.YIELD, model=request.model, operation_id=""),
                lease_id=request.lease_id,
                priority=request.priority.wire,  # type: ignore[arg-type]  # same numbers
                wanted_by=request.wanted_by,
            )
            stub, metadata = await self._reach(state)
            await _answer(stub.YieldMemory(message, timeout=YIELD_TIMEOUT_SECONDS, metadata=metadata))
        except WeftError as error:
            log.info("memory not given up", runner=request.runner, model=request.model, reason=error.reason.name)
            return EvictionAnswer.UNREACHABLE if error.reason in _NO_LONGER_THERE else EvictionAnswer.REFUSED
        return EvictionAnswer.GIVEN_UP

    async def _member(self, runner: str) -> SessionState:
        await self._until_owner()
        state = self._core.mesh.of_runner(runner)
        if state is None or not state.pulse.active:
            raise WeftError(
                Reason.NO_RUNNER_AVAILABLE,
                f"runner {runner!r} is not there; start it",
                metadata={"runner": runner},
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        return state

    def _permit(
        self, state: SessionState, action: Action, *, model: str, operation_id: str
    ) -> permit_pb2.OperationPermit:
        target = PermitTarget(
            runner=state.profile.name, incarnation=state.profile.incarnation, key=state.session.ticket_key
        )
        now = self._core.mesh_clock.utc_now().timestamp()
        return make_permit(target, action, model=model, operation_id=operation_id, now=now)

    async def _reach(self, state: SessionState) -> tuple["RunnerServiceAsyncStub", Metadata | None]:
        return await self._at(state.profile.address)

    async def _at(self, address: str) -> tuple["RunnerServiceAsyncStub", Metadata | None]:
        channel = await self._channels.get(address)
        stub = cast("RunnerServiceAsyncStub", runner_service_pb2_grpc.RunnerServiceStub(channel))
        return stub, metadata_of(address) or None


async def _at_once() -> None:
    """Returns immediately: there is no other registry."""


async def _responses(call: "grpc.aio.UnaryStreamCall[Any, T]") -> AsyncGenerator[T]:
    """Yields the responses of a call; closing the generator cancels it."""
    try:
        with calling(Reason.WORKER_LOST):
            async for response in call:
                yield response
    except WeftError as error:
        raise _failure(error) from error
    finally:
        call.cancel()


async def _answer(call: Awaitable[T]) -> T:
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
