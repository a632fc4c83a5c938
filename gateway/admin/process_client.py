"""The client of the ProcessService in each process of the mesh."""

from collections.abc import Mapping
from typing import Any

import grpc

from weft.api.operations.v1 import process_service_pb2 as pb
from weft.api.operations.v1 import process_service_pb2_grpc
from weft.dispatch.fleet import FleetSource
from weft.kernel.channels.rpc import ChannelPool, error_from_call
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import metadata_of

MESH = "mesh"
SERVICES = (MESH, "registry", "router", "gateway")
RUNNER_PREFIX = "runner/"
CALL_TIMEOUT_SECONDS = 5.0


class ProcessesClient:
    """The ProcessService of services and of runners, also behind a relay.

    Every method raises NO_RUNNER_AVAILABLE if a runner is away, SERVICE_UNAVAILABLE if the process cannot be reached,
    and UNSUPPORTED_OPERATION if its release lacks the call.
    """

    def __init__(self, services: Mapping[str, grpc.aio.Channel], fleet: FleetSource, channels: ChannelPool) -> None:
        """`services`: a channel to the process of each of SERVICES."""
        self._services = services
        self._fleet = fleet
        self._channels = channels

    async def health(self, process: str) -> pb.GetHealthResponse:
        """Returns the health of a process."""
        found: pb.GetHealthResponse = await self._call(process, "GetHealth", pb.GetHealthRequest())
        return found

    async def _call(self, process: str, method: str, request: Any) -> Any:
        channel, metadata = await self._reach(process)
        stub: Any = process_service_pb2_grpc.ProcessServiceStub
        try:
            return await getattr(stub(channel), method)(request, timeout=CALL_TIMEOUT_SECONDS, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
            if found.reason is Reason.UNSUPPORTED_OPERATION:
                raise WeftError(found.reason, f"{process} runs an older release that does not support this") from error
            raise found from error

    async def _reach(self, process: str) -> tuple[grpc.aio.Channel, tuple[tuple[str, str], ...]]:
        if not process.startswith(RUNNER_PREFIX):
            return self._services[process], ()
        name = process.removeprefix(RUNNER_PREFIX)
        runner = self._fleet.view.runners.get(name)
        if runner is None or not runner.active:
            raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"there is no runner {name}")
        return await self._channels.get(runner.address), metadata_of(runner.address)
