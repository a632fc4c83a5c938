"""Calls of commands on services of the registry that have no separate client."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from weft.client._channel import open_mesh_channel
from weft.client._home import mesh_address
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

CALL_TIMEOUT_SECONDS = 5.0


def call_registry(
    home: Path,
    stub: Callable[[grpc.Channel], Any],
    method: str,
    request: Any,
    timeout_seconds: float = CALL_TIMEOUT_SECONDS,
) -> Any:
    """Calls a method of a service of the registry of the mesh on `home`. Every failure is a WeftError."""
    with open_mesh_channel(mesh_address(home, "registry")) as channel:
        try:
            return getattr(stub(channel), method)(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
