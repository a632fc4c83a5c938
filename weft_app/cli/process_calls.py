"""Calls of commands on single processes of a mesh: their health, and the level of their log."""

from pathlib import Path
from typing import Any

import grpc

from weft.api.operations.v1 import process_service_pb2 as pb
from weft.api.operations.v1 import process_service_pb2_grpc
from weft.api.registry.v1 import runner_pb2
from weft.client._channel import open_mesh_channel
from weft.client._home import mesh_address
from weft.client.resources import connect_registry
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import RunnerDocument
from weft.kernel.address import addresses_of, metadata_of
from weft.kernel.errors import WeftError
from weft.kernel.names import require_name
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call
from weft_app.compose.home import WeftHome

CALL_TIMEOUT_SECONDS = 5.0
MESH = "mesh"
RUNNER_PREFIX = "runner/"
SERVICES = ("registry", "router", "gateway")


def call_process(address: str, method: str, request: Any) -> Any:
    """Calls a method of the ProcessService of the process at an address. Every failure is a WeftError."""
    with open_mesh_channel(address) as channel:
        stub: Any = process_service_pb2_grpc.ProcessServiceStub
        try:
            return getattr(stub(channel), method)(request, timeout=CALL_TIMEOUT_SECONDS, metadata=metadata_of(address))
        except grpc.RpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error


def address_of(name: str, home: Path) -> str:
    """Returns the address of a process by its name: `mesh`, a service, or `runner/NAME`.

    A service of `weft up` is the process of the mesh. Raises NOT_FOUND, NO_RUNNER_AVAILABLE and SERVICE_UNAVAILABLE.
    """
    if name in (MESH, "registry"):
        found = mesh_address(home, "registry")
        own = WeftHome(home.expanduser().absolute()).served().get("registry", "")
        # That of this home is meant, also where it is a standby.
        return own if own in addresses_of(found) else found
    if name == "router":
        return mesh_address(home, "router")
    if name == "gateway":
        folder = WeftHome(home.expanduser().absolute())
        running = folder.running()
        return folder.address("gateway") if running is None else str(running["grpc"])
    runner = require_name(name.removeprefix(RUNNER_PREFIX), "NAME")
    with connect_registry(home=home) as registry:
        document = registry.document(ResourceKind.RUNNER, runner)
    assert isinstance(document, RunnerDocument)
    if document.observed is None or document.observed.status != runner_pb2.Runner.STATUS_ACTIVE:
        raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"the runner {runner} is not there")
    return document.observed.address


def health_of(address: str) -> pb.GetHealthResponse:
    """Returns the health of the process at an address. Every failure is a WeftError."""
    answer: pb.GetHealthResponse = call_process(address, "GetHealth", pb.GetHealthRequest())
    return answer
