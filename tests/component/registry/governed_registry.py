"""Operations on a real SQLite database behind a real gate, without runners. As a program: one life that is killed."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from registry_svc.config import GovernanceMode, OperationLimits
from registry_svc.mesh.store import SqlStore
from registry_svc.operations.governance import Gatekeeper, build_gate
from registry_svc.operations.job import JobDeps
from registry_svc.operations.operation_store import OperationStore
from registry_svc.operations.operations import Operations
from registry_svc.operations.policy.loads import LoadTimes, PoolMember
from registry_svc.operations.runner_presence import AddedModelView, RunnerDirectory, RunnerPresence, RunnerSnapshot
from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1.operation_service_pb2 import CreateOperationRequest
from weft.kernel.clock import Clock, SystemClock

DATABASE = "registry.db"
WITNESS = "witness.json"


class NobodyThere(RunnerDirectory):
    """Two models are known, and no runner."""

    def __init__(self) -> None: ...

    def runner_of(self, model: str) -> str | None:
        return "" if model in ("qwen", "other") else None

    def holder_of(self, model: str) -> str | None:
        return self.runner_of(model)

    def pool(self, name: str) -> tuple[PoolMember, ...]:
        return ()

    def names_pool(self, name: str) -> bool:
        return False

    def runner(self, name: str) -> RunnerSnapshot | None:
        return None

    def active_runners(self) -> list[str]:
        return []

    def is_active(self, runner: str) -> bool:
        return False

    def adding_runners(self) -> list[str]:
        return []

    def attaching_runners(self) -> list[str]:
        return []

    def runner_of_server(self, server: str) -> str | None:
        return None

    def added_models(self) -> list[AddedModelView]:
        return []

    def known_names(self) -> list[str]:
        return ["qwen", "other"]

    def runner_names(self) -> list[str]:
        return []

    def is_taken(self, name: str) -> bool:
        return self.runner_of(name) is not None


@asynccontextmanager
async def governed(folder: Path, gate: Gatekeeper, clock: Clock) -> AsyncIterator[Operations]:
    """Operations on the database in `folder`, from start to stop."""
    store = SqlStore(f"sqlite:///{folder / DATABASE}")
    await store.open()
    directory = NobodyThere()
    tools = JobDeps(
        calls=cast("Any", None),  # nobody is there to be called
        directory=directory,
        clock=clock,
        times=LoadTimes(),
        presence=RunnerPresence(directory, clock),
    )
    operations = Operations(OperationStore(store), tools, gate, OperationLimits())
    await operations.start()
    try:
        yield operations
    finally:
        await operations.stop(5.0)
        await store.close()


def asked(action: operation_pb2.OperationAction, token: str, request_id: str) -> CreateOperationRequest:
    """A request within all limits."""
    return CreateOperationRequest(request_id=request_id, action=action, requested_by="a test", authorization=token)


def _say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


async def _one_killed_life(folder: Path) -> None:
    from governance_stage import AUDIENCE, config, load  # noqa: PLC0415 - the stage is found beside this program alone

    settings = config(GovernanceMode.SIGNATURES, audience=AUDIENCE, witness_file=folder / WITNESS)
    async with governed(folder, build_gate(settings, SystemClock()), SystemClock()) as operations:
        _say(ready=True)
        token = await asyncio.to_thread(sys.stdin.readline)
        view, existed = await operations.create(asked(load(), token, "first"))
        _say(name=view.operation.name, existed=existed)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(_one_killed_life(Path(sys.argv[1])))
