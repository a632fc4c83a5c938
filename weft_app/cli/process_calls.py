"""The health of single processes of a mesh, from themselves: where no gateway answers, too."""

from typing import Any

import grpc

from weft.api.operations.v1 import process_service_pb2 as pb
from weft.api.operations.v1 import process_service_pb2_grpc
from weft.client._channel import open_mesh_channel
from weft.kernel.address import metadata_of
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

CALL_TIMEOUT_SECONDS = 5.0
MESH = "mesh"
RUNNER_PREFIX = "runner/"


def health_of(address: str) -> pb.GetHealthResponse:
    """Returns the health of the process at an address. Every failure is a WeftError."""
    with open_mesh_channel(address) as channel:
        stub: Any = process_service_pb2_grpc.ProcessServiceStub(channel)
        try:
            answer: pb.GetHealthResponse = stub.GetHealth(
                pb.GetHealthRequest(), timeout=CALL_TIMEOUT_SECONDS, metadata=metadata_of(address)
            )
        except grpc.RpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        return answer
