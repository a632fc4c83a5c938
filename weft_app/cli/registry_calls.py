"""Calls of commands on services of the registry that have no client of their own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import grpc

from weft.client._channel import mesh_address, open_mesh_channel
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

CALL_TIMEOUT_SECONDS = 5.0

Stub = TypeVar("Stub")


@contextmanager
def registry_stub(home: Path, stub: Callable[[grpc.Channel], Stub]) -> Iterator[Stub]:
    """Yields a stub of the registry of the mesh on `home`. Failures of calls in the block become WeftErrors."""
    with open_mesh_channel(mesh_address(home, "registry")) as channel:
        try:
            yield stub(channel)
        except grpc.RpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
