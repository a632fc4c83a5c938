"""Ports of the endpoints under `/v1/admin` that reach single processes and the mesh's machine."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

from weft.api.gateway.v1.discovery_pb2 import Discovery
from weft.api.gateway.v1.engine_log_pb2 import EngineLog
from weft.api.operations.v1 import process_service_pb2 as pb
from weft.dispatch.fleet import ModelView
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class EngineLogSource(Protocol):
    """Reads the output of engines; see `gateway.admin.engine_logs.EngineLogClient`."""

    def lines(self, model: ModelView, line_count: int, *, follow: bool) -> AsyncGenerator[EngineLog]:
        """Yields the last lines of a model's engine, and with `follow` every new one until the runner stops.

        Raises NO_RUNNER_AVAILABLE where no runner serves the model now, WORKER_LOST where its runner cannot be reached,
        and what the runner answers.
        """
        ...


class ProcessesPort(Protocol):
    """Calls single processes of the mesh; see `gateway.admin.processes.ProcessesClient`.

    Every method raises NO_RUNNER_AVAILABLE where a runner is not there, SERVICE_UNAVAILABLE where the process cannot be
    reached, and UNSUPPORTED_OPERATION where it is of a release that has no such call.
    """

    async def health(self, process: str) -> pb.GetHealthResponse:
        """Returns the health of a process."""
        ...

    async def set_log_level(self, process: str, request: pb.SetLogLevelRequest) -> pb.SetLogLevelResponse:
        """Changes the level of a process's log."""
        ...


DiscoverySource = Callable[[], Awaitable[Discovery]]
"""Returns what is found on the mesh's machine. Raises UNSUPPORTED_OPERATION where it may not be looked for."""


async def look_nowhere() -> Discovery:
    """A DiscoverySource of a gateway that runs apart from runners."""
    raise WeftError(
        Reason.UNSUPPORTED_OPERATION,
        "only weft up looks for engines and models on its machine; here: weft discover, then POST /v1/admin/models",
    )
