"""A whole `weft up` of its own, for what is measured by doing something to it."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil

from bench.launch import LaunchError, free_port, started
from weft.api.operations.v1.operation_pb2 import OperationAction
from weft.client import WeftError, connect
from weft.client.operations import Operations
from weft.documents.operation_documents import OperationDocument

START_SECONDS = 60.0
OPERATION_SECONDS = 120.0
POLL_SECONDS = 0.005


@contextmanager
def own_mesh(folder: Path, model: str, config: Path | None = None) -> Iterator[tuple[psutil.Process, Path]]:
    """Its host process and its home, once `model` answers; without a configuration it serves the demo model."""
    home = folder / "home"
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).with_name("weft")), "up", "--home", str(home), "--port", str(free_port())]
    if config is not None:
        command += ["--config", str(config)]
    with started(command, {}, folder / "output.log") as host:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(home, model):
            if time.monotonic() > deadline:
                raise LaunchError("weft up did not come up")
            time.sleep(POLL_SECONDS)
        yield host, home


def carried_out(operations: Operations, action: OperationAction) -> OperationDocument:
    """An operation, once it has succeeded. Raises LaunchError when it has not."""
    begun = operations.create(action)
    *_, last = operations.watch(begun.name, OPERATION_SECONDS)
    if last.state != "succeeded":
        raise LaunchError(f"{last.action.type} {last.state}: {last.detail}")
    return last


def _answers(home: Path, model: str) -> bool:
    try:
        with connect(home=home) as mesh:
            return bool(list(mesh.chat(model, "Hi", max_tokens=2, timeout=START_SECONDS)))
    except (WeftError, grpc.RpcError):
        return False
