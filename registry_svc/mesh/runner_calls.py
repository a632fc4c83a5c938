"""The registry's calls to runners: carry this out, give that up. A port; `grpc_runner_calls` is it over gRPC."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from weft.api.runner.v1 import load_pb2, runner_service_pb2
from weft.kernel.request import Priority


class YieldAnswer(Enum):
    """What a runner said when it was asked to give up the memory of a model."""

    GIVEN_UP = auto()
    """The model sleeps; its lease has been released, or is about to be."""
    REFUSED = auto()
    """It is busy, pinned or of a higher priority, or cannot sleep."""
    UNREACHABLE = auto()
    """No answer, or none that means anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldRequest:
    """What is asked of a runner."""

    runner: str
    model: str
    lease_id: str
    priority: Priority
    """Of whoever needs the memory."""
    wanted_by: str
    """For the log."""


class RunnerCalls(Protocol):
    """Whom the registry has carry out what it decides; runners are found by name, and must be active.

    Each call carries a permit made for it. But for `yield_memory`, every one raises the runner's own WeftError,
    NO_RUNNER_AVAILABLE when the runner is not there, and WORKER_LOST when the connection breaks. Closing or cancelling
    a call cancels the work.
    """

    def load(
        self, runner: str, model: str, options: load_pb2.LoadOptions, *, operation_id: str
    ) -> AsyncGenerator[runner_service_pb2.LoadResponse]:
        """Load a model; the last response is the result."""
        ...

    async def unload(self, runner: str, model: str, *, operation_id: str) -> runner_service_pb2.UnloadResponse:
        """Unload a model."""
        ...

    async def flush_cache(
        self, runner: str, request: runner_service_pb2.FlushCacheRequest, *, operation_id: str
    ) -> runner_service_pb2.FlushCacheResponse:
        """Forget cached prefixes; the permit is added to `request`."""
        ...

    async def yield_memory(self, request: YieldRequest) -> YieldAnswer:
        """Have a runner give up the memory of an idle model. Returns once it sleeps. Never raises a WeftError."""
        ...
