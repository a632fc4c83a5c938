"""gRPC calls of commands: to services without HTTP, and to single processes if no gateway answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from weft.api.operations.v1 import process_service_pb2 as pb
from weft.api.operations.v1 import process_service_pb2_grpc
from weft.client._channel import open_mesh_channel
from weft.client._home import mesh_address
from weft.kernel.channels.rpc import error_from_call
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import metadata_of

CALL_TIMEOUT_SECONDS = 5.0
MESH = "mesh"
RUNNER_PREFIX = "runner/"


def health_of(address: str) -> pb.GetHealthResponse:
    """Returns the health of a process. Every failure is a WeftError."""
    found: pb.GetHealthResponse = call(
        address, process_service_pb2_grpc.ProcessServiceStub, "GetHealth", pb.GetHealthRequest()
    )
    return found


def call_registry(
    home: Path, stub: Callable[..., Any], method: str, request: Any, timeout_seconds: float = CALL_TIMEOUT_SECONDS
) -> Any:
    """Calls a registry service of the mesh on `home`. Every failure is a WeftError."""
    return call(mesh_address(home, "registry"), stub, method, request, timeout_seconds)


def call(
    address: str, stub: Callable[..., Any], method: str, request: Any, timeout_seconds: float = CALL_TIMEOUT_SECONDS
) -> Any:
    """Calls a service at an address. Every failure is a WeftError."""
    with open_mesh_channel(address) as channel:
        try:
            return getattr(stub(channel), method)(request, timeout=timeout_seconds, metadata=metadata_of(address))
        except grpc.RpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
