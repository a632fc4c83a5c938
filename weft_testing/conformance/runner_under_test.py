"""The runner under test: its connection, tickets and permits, and calls."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft.api.common.v1 import chat_pb2, completion_pb2, event_pb2
from weft.api.registry.v1 import runner_pb2
from weft.api.runner.v1 import (
    embedding_service_pb2,
    generation_service_pb2,
    permit_pb2,
    runner_service_pb2,
    runner_service_pb2_grpc,
    ticket_pb2,
)
from weft.dispatch.fleet import FleetView, FleetWatcher, RunnerView
from weft.dispatch.tickets import TICKET_LIFETIME_SECONDS, Action, PermitTarget, make_permit, sign
from weft.kernel.channels.rpc import error_from_call, open_channel
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.address import metadata_of
from weft.kernel.values.names import new_id
from weft.kernel.values.unknown_names import MODEL, RUNNER, unknown_name
from weft_testing.carried import CarriedStub

if TYPE_CHECKING:
    from weft.api.runner.v1.runner_service_pb2_grpc import RunnerServiceAsyncStub

SNAPSHOT_SECONDS = 10.0
CALL_SECONDS = 10.0
"""Timeout of control plane calls."""
CLAIMS_SECONDS = 120.0
"""Timeout of a description that includes checks of the engine."""
POLL_SECONDS = 0.02
TENANT = "conformance"

Events = list[event_pb2.InferenceEvent]


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketChanges:
    """Deliberate errors in a ticket; none by default."""

    incarnation: str | None = None
    lifetime_seconds: float = TICKET_LIFETIME_SECONDS
    mac: bytes | None = None
    ticket_id: str | None = None


GOOD_TICKET = TicketChanges()


class RunnerUnderTest:
    """A model on a runner, called like a dispatcher does."""

    def __init__(self, runner: RunnerView, model: str, operations: frozenset[int], channel: grpc.aio.Channel) -> None:
        self.runner = runner
        self.model = model
        self.operations = operations
        """Numbers of registry.v1.ModelOperation."""
        self.own_requests: set[str] = set()
        """Ids of this suite's requests; all other requests of the runner belong to other callers."""
        self._metadata = metadata_of(runner.address)
        self._requests = CarriedStub(channel, generation_service_pb2, embedding_service_pb2)
        self._control = cast("RunnerServiceAsyncStub", runner_service_pb2_grpc.RunnerServiceStub(channel))
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    def ticket(self, request_id: str, changes: TicketChanges = GOOD_TICKET) -> ticket_pb2.Ticket:
        """Returns a ticket like a router's."""
        self.own_requests.add(request_id)
        claims = ticket_pb2.TicketClaims(
            request_id=request_id,
            tenant=TENANT,
            model=self.model,
            runner=self.runner.name,
            runner_incarnation=changes.incarnation or self.runner.incarnation,
            attempt=1,
            allow_remote=True,
            ticket_id=changes.ticket_id or new_id("tkt"),
        )
        claims.expire_time.FromNanoseconds(int((time.time() + changes.lifetime_seconds) * 1e9))
        signed = claims.SerializeToString()
        return ticket_pb2.Ticket(claims=signed, mac=changes.mac or sign(signed, self.runner.ticket_key))

    def permit(self, action: Action, model: str, *, key: bytes | None = None) -> permit_pb2.OperationPermit:
        """Returns a permit like the registry's; `key`: signed with another key than the session's."""
        target = PermitTarget(
            runner=self.runner.name, incarnation=self.runner.incarnation, key=key or self.runner.ticket_key
        )
        return make_permit(target, action, model=model, operation_id="conformance", now=time.time())

    async def unload_with(self, permit: permit_pb2.OperationPermit | None) -> None:
        """Unloads the model with this permit; None: without one. Raises WeftError."""
        await self._call(self._control.Unload, runner_service_pb2.UnloadRequest(model=self.model, permit=permit), None)

    async def _call(self, method: Any, request: object, seconds: float | None = CALL_SECONDS) -> Any:
        """Returns the response of a unary method. Raises WeftError."""
        with _errors_of_the_runner():
            return await method(request, metadata=self._metadata, timeout=seconds)

    async def frames(
        self, payload: chat_pb2.ChatPayload | None, request_id: str = "", ticket: ticket_pb2.Ticket | None = None
    ) -> AsyncGenerator[Events]:
        """Yields the frames of one generation; closing it cancels the call. Raises WeftError unless it ends with OK."""
        name = request_id or new_id("req")
        request = generation_service_pb2.GenerateRequest(ticket=ticket or self.ticket(name))
        if payload is not None:
            request.chat.CopyFrom(payload)
        call = self._requests.Generate(request, metadata=self._metadata)
        try:
            async for response in call:
                yield list(response.events)
        finally:
            call.cancel()

    async def run(self, payload: chat_pb2.ChatPayload | None, ticket: ticket_pb2.Ticket | None = None) -> list[Events]:
        """Returns every frame of one generation. Raises WeftError."""
        return [frame async for frame in self.frames(payload, ticket=ticket)]

    async def embed(self, texts: list[str]) -> embedding_service_pb2.EmbedResponse:
        """Returns vectors. Raises WeftError."""
        request = embedding_service_pb2.EmbedRequest(ticket=self.ticket(new_id("req")))
        request.payload.inputs.extend(completion_pb2.PromptInput(text=text) for text in texts)
        response: embedding_service_pb2.EmbedResponse = await self._call(self._requests.Embed, request, None)
        return response

    async def describe(self) -> runner_service_pb2.InstanceDescription:
        """Returns the description of the instance. Raises WeftError; LookupError if the model is not described."""
        for instance in (await self.describe_runner()).instances:
            if instance.model == self.model:
                return instance
        raise LookupError(f"the runner does not describe its model {self.model}")

    async def describe_runner(self) -> runner_service_pb2.DescribeResponse:
        """Returns the runner's description. Raises WeftError."""
        response: runner_service_pb2.DescribeResponse = await self._call(
            self._control.Describe, runner_service_pb2.DescribeRequest()
        )
        return response

    async def engine_claims(self) -> list[runner_service_pb2.EngineClaim]:
        """Returns the runner's claims about the model's engine, with current observations. Raises WeftError."""
        request = runner_service_pb2.DescribeRequest(checks_engine=True)
        response: runner_service_pb2.DescribeResponse = await self._call(
            self._control.Describe, request, CLAIMS_SECONDS
        )
        return [claim for each in response.instances if each.model == self.model for claim in each.engine_claims]

    async def state(self) -> runner_pb2.InstanceState:
        """Returns the instance's state as the runner reports it. Raises LookupError if it reports none."""
        for state in (await self.describe_runner()).runner.capability.instances:
            if state.model == self.model:
                return state
        raise LookupError(f"the runner reports no state of its model {self.model}")

    async def find_request(self, request_id: str) -> runner_service_pb2.GetRequestResponse:
        """Returns the runner's record of a request. Raises WeftError."""
        response: runner_service_pb2.GetRequestResponse = await self._call(
            self._control.GetRequest, runner_service_pb2.GetRequestRequest(request_id=request_id)
        )
        return response

    async def load(self, model: str = "") -> None:
        """Loads the model. Raises WeftError."""
        await self.load_with(self.permit(Action.LOAD, model or self.model), model)

    async def load_with(self, permit: permit_pb2.OperationPermit | None, model: str = "") -> None:
        """Loads the model with this permit; None: without one. Raises WeftError."""
        request = runner_service_pb2.LoadRequest(model=model or self.model, permit=permit)
        with _errors_of_the_runner():
            call = self._control.Load(request, metadata=self._metadata)
            try:
                answers = [response.WhichOneof("kind") async for response in call]
            finally:
                call.cancel()
        if answers[-1:] != ["result"]:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the load ended without a result")

    async def wake(self) -> None:
        """Wakes the model, which may sleep again by its settings, unlike after `load`. Raises WeftError."""
        await self._call(self._control.Wake, runner_service_pb2.WakeRequest(model=self.model), None)

    async def unload(self) -> None:
        """Unloads the model. Raises WeftError."""
        await self.unload_with(self.permit(Action.UNLOAD, self.model))

    async def log_tail(self, line_count: int) -> list[str]:
        """Returns the last lines of the engine's output. Raises WeftError."""
        request = runner_service_pb2.TailLogsRequest(model=self.model, line_count=line_count)
        with _errors_of_the_runner():
            call = self._control.TailLogs(request, metadata=self._metadata, timeout=CALL_SECONDS)
            return [line async for response in call for line in response.lines]
        raise AssertionError

    async def serving(self) -> bool:
        """Whether grpc.health.v1 reports SERVING. Raises WeftError if it does not answer."""
        answer = await self._call(self._health.Check, health_pb2.HealthCheckRequest())
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def slot_holders(self) -> frozenset[str]:
        """Returns the ids of requests that hold a slot, over all models of the runner, which may share one limit."""
        described = await self.describe_runner()
        return frozenset(name for instance in described.instances for name in instance.active_request_ids)


@contextlib.contextmanager
def _errors_of_the_runner() -> Any:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error, Reason.WORKER_LOST) from error


@asynccontextmanager
async def attach(
    registry_target: str, runner: str, model: str | None = None, security: ChannelSecurity | None = None
) -> AsyncIterator[RunnerUnderTest]:
    """Yields the runner with this name or address in a registry's mesh; the registry provides the key of its tickets.

    `security` is for a mesh on other machines. Raises NOT_FOUND for a runner or model that the mesh does not know.
    """
    async with open_channel(registry_target, security) as registry:
        watcher = FleetWatcher(registry, SystemClock(), include_ticket_keys=True)
        await watcher.start()
        try:
            await asyncio.wait_for(watcher.wait_ready(), SNAPSHOT_SECONDS)
        except TimeoutError:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry told nothing of the mesh in time") from None
        finally:
            await watcher.stop()
        found = _find(watcher.view, runner)
        chosen = _choose_model(watcher.view, found, model)
        async with open_channel(found.address, security) as channel:
            operations = frozenset(operation.value for operation in watcher.view.models[chosen].operations)
            yield RunnerUnderTest(found, chosen, operations, channel)


def _find(view: FleetView, runner: str) -> RunnerView:
    found = view.runners.get(runner) or next((one for one in view.runners.values() if one.address == runner), None)
    if found is None:
        raise unknown_name(RUNNER, runner, view.runners)
    if not found.active:
        raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"the runner {runner} sends no heartbeats")
    return found


def _choose_model(view: FleetView, runner: RunnerView, model: str | None) -> str:
    names = sorted(name for name, one in view.models.items() if one.runner == runner.name)
    if model is not None and model not in names:
        raise unknown_name(MODEL, model, names)
    if not names:
        raise WeftError(Reason.MODEL_NOT_FOUND, f"the runner {runner.name} serves no model")
    return model or names[0]
