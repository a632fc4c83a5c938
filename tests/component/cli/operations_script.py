"""A scripted OperationService, and the `weft` command run against it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from cli_harness import refuse, served_home
from kit.home_gateway import home_gateway
from typer.testing import CliRunner, Result

from registry_svc.operations.audit_chain import chained, empty_head
from registry_svc.operations.audit_log import entry_draft
from weft.api.operations.v1 import operation_pb2, operation_service_pb2_grpc
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.main import app

GIB = 1024**3
Operation = operation_pb2.Operation


@dataclass
class ScriptedRegistry:
    """What the service tells, and what it was asked."""

    home: Path
    told: list[Operation] = field(default_factory=list)
    """What a watch tells, one after the other."""
    refusal: WeftError | None = None
    unknown: frozenset[str] = frozenset()
    """The models that loads without a source do not find."""
    created: list[pb.CreateOperationRequest] = field(default_factory=list)
    cancelled: list[pb.CancelOperationRequest] = field(default_factory=list)
    audit: list[pb.AuditEntry] = field(default_factory=list)

    def run(self, *arguments: str, stdin: str | None = None) -> Result:
        """A `weft` command to its end."""
        return CliRunner().invoke(app, arguments, input=stdin, env={"WEFT_HOME": str(self.home), "COLUMNS": "200"})


def an_operation(state: str, action: operation_pb2.OperationAction | None = None, **facts: Any) -> Operation:
    return Operation(
        name="operations/op-1",
        state=Operation.State.Value(f"STATE_{state}"),
        action=action or operation_pb2.OperationAction(load_model=operation_pb2.LoadModel(model="qwen")),
        request_id="r-1",
        **facts,
    )


def audit_entries() -> list[pb.AuditEntry]:
    """A log that is whole."""
    at = datetime(2026, 11, 20, 12, 0, 0, 250_000, UTC)
    return chained(
        empty_head(),
        [
            entry_draft(
                at=at, event="operation.accepted", actor="cli:alice", operation=f"operations/op-{n}", detail="{}"
            )
            for n in range(3)
        ],
    )


class ScriptedOperations(operation_service_pb2_grpc.OperationServiceServicer):
    """Tells what the script says."""

    def __init__(self, script: ScriptedRegistry) -> None:
        self._script = script

    def CreateOperation(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self._script.refusal is not None:
            refusal = self._script.refusal
            refuse(context, refusal.reason, refusal.message, **refusal.metadata)
        load = request.action.load_model
        if load.model in self._script.unknown and not load.source:
            refuse(context, Reason.MODEL_NOT_FOUND, f"there is no model or pool {load.model}")
        self._script.created.append(request)
        return pb.CreateOperationResponse(operation=an_operation("PENDING", request.action))

    def GetOperation(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name != "operations/op-1":
            refuse(context, Reason.NOT_FOUND, f"there is no operation {request.name}")
        return pb.GetOperationResponse(operation=self._script.told[0])

    def ListOperations(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ListOperationsResponse(operations=self._script.told)

    def WatchOperation(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        for operation in self._script.told:
            yield pb.WatchOperationResponse(operation=operation)

    def CancelOperation(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._script.cancelled.append(request)
        return pb.CancelOperationResponse(operation=self._script.told[0])

    def ListAuditEntries(self, request: Any, context: Any) -> Any:  # noqa: N802
        log = self._script.audit
        found = [entry for entry in log if entry.sequence > request.after_sequence][: request.page_size]
        head = pb.AuditHead(sequence=log[-1].sequence, hash=log[-1].hash) if log else None
        return pb.ListAuditEntriesResponse(entries=found, head=head)


@contextmanager
def scripted_registry(home: Path) -> Iterator[ScriptedRegistry]:
    """A registry that says what it is told to say, written down in `home` like that of `weft up`."""
    script = ScriptedRegistry(home)

    def add(server: grpc.Server) -> None:
        operation_service_pb2_grpc.add_OperationServiceServicer_to_server(ScriptedOperations(script), server)  # type: ignore[abstract]  # only what the CLI calls

    with served_home(home, add) as address, home_gateway(home, address):
        yield script
