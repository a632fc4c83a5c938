"""What the runner API needs: the runner itself, its queue, and who carries out operations. The host connects them."""

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
        """How it is right now. Cheap: asked for with every health check."""
        ...

    async def devices(self) -> tuple[DeviceFacts, ...] | None:
        """The accelerators that it may use, by index; None: nobody can tell."""
        ...


class QueueView(Protocol):
    """The queue in front of the runner; see `router_svc.service.RouterService`."""

    @property
    def load(self) -> tuple[int, int]:
        """How many requests wait and how many run."""
        ...


class OperationsPort(Protocol):
    """Who carries out operations; see `gateway.runner_api.operations_client.OperationsClient`.

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
        """The operation once it has ended; as it was last seen when time is over or the registry is lost."""
        ...

    async def cancel(self, name: str, requested_by: str) -> operation_pb2.Operation:
        """Ask for its end; as it is afterwards."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerApiPorts:
    """Everybody whom the surface of one runner talks to. Dispatcher, fleet and queue know this runner alone."""

    runner: RunnerPort
    dispatcher: RequestDispatcher
    fleet: FleetSource
    queue: QueueView
    operations: OperationsPort
    keys: KeyRingSource | None = None
    """Who knows the keys; None: nobody needs one."""
