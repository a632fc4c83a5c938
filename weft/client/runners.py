"""A synchronous client of the runner that serves a model: its backend's output."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc

from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.client._channel import open_mesh_channel
from weft.client.resources import Registry
from weft.documents.document_base import ResourceKind
from weft.documents.documents import ModelDocument, RunnerDocument
from weft.kernel.address import metadata_of
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call


def connect_runner_of(registry: Registry, model: str) -> "RunnerOfModel":
    """The runner that serves a model. Raises MODEL_NOT_FOUND, or NO_RUNNER_AVAILABLE when none does now."""
    document = registry.document(ResourceKind.MODEL, model)
    assert isinstance(document, ModelDocument)
    name = document.status.runner if document.status is not None else None
    if not name:
        raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"no runner serves {model} now")
    runner = registry.document(ResourceKind.RUNNER, name)
    assert isinstance(runner, RunnerDocument)
    if runner.status is None or runner.status.state != "active":
        raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"the runner {name}, which serves {model}, is not there")
    return RunnerOfModel(runner.status.address, model, runner.status.runtime)


class RunnerOfModel:
    """Calls about one model on its runner, behind a relay or not. Every failure is a WeftError with a reason."""

    def __init__(self, address: str, model: str, runtime: str = "") -> None:
        self.runtime = runtime
        """What runs the model, such as "llama_server"."""
        self._model = model
        self._metadata = metadata_of(address)
        self._channel = open_mesh_channel(address)
        self._stub = runner_service_pb2_grpc.RunnerServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def log_lines(self, line_count: int, *, follow: bool) -> Iterator[runner_service_pb2.TailLogsResponse]:
        """The last lines of its backend's output, and with `follow` every new one for as long as they are read."""
        request = runner_service_pb2.TailLogsRequest(model=self._model, line_count=line_count, follow=follow)
        call: Any = self._stub.TailLogs(request, metadata=self._metadata)
        try:
            with _translated():
                yield from call
        finally:
            call.cancel()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_call(error, Reason.WORKER_LOST) from error
