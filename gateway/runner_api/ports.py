"""Ports of the runner API: the runner, its queue, and operations. `weft_app.compose` connects them."""

from dataclasses import dataclass
from typing import Protocol

from gateway.auth.authentication import KeyRingSource
from gateway.ports import RequestDispatcher
from gateway.runner_api.facts import DeviceFacts, RunnerFacts
from weft.api.operations.v1 import operation_pb2, operation_service_pb2
from weft.dispatch.fleet import FleetSource


class RunnerPort(Protocol):
    """The runner of this process."""

    def facts(self) -> RunnerFacts:
        """Returns the current facts. Cheap: called with every health check."""
        ...

    async def devices(self) -> tuple[DeviceFacts, ...] | None:
        """The accelerators that it may use, by index; None: unknown."""
        ...


class QueueView(Protocol):
    """The queue in front of the runner; see `router_svc.service.RouterService`."""

    @property
    def load(self) -> tuple[int, int]:
        """Number of waiting and of running requests."""
        ...


class OperationsPort(Protocol):
    """Creates and follows operations; see `gateway.runner_api.operations_client.OperationsClient`.

    Every method raises the WeftError that the registry answers, SERVICE_UNAVAILABLE when it cannot be reached, and
    DEADLINE_EXCEEDED when it does not answer in time.
    """

    async def create(self, request: operation_service_pb2.CreateOperationRequest) -> operation_pb2.Operation:
        """A new operation, or the one that the same request id created before."""
        ...

    async def get(self, name: str) -> operation_pb2.Operation:
        """One operation. Raises NOT_FOUND."""
        ...

    async def wait(self, operation: operation_pb2.Operation, timeout_seconds: float) -> operation_pb2.Operation:
        """Waits for the operation to end; returns it as last seen at the timeout or when the registry is lost."""
        ...

    async def cancel(self, name: str, requested_by: str) -> operation_pb2.Operation:
        """Requests cancellation; returns the operation as it is then."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerApiPorts:
    """Services that the API of one runner calls. Dispatcher, fleet and queue know this runner alone."""

    runner: RunnerPort
    dispatcher: RequestDispatcher
    fleet: FleetSource
    queue: QueueView
    operations: OperationsPort
    keys: KeyRingSource | None = None
    """The valid API keys; None: callers need none."""
