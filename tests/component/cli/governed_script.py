"""An OperationService behind a real gate, and the `weft` command run against it: tokens are really checked."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from cli_harness import refuse, served_home
from kit.home_gateway import home_gateway
from typer.testing import CliRunner, Result

from registry_svc.operations.governance import Admission, Gatekeeper, build_gate
from registry_svc.operations.policy.governance import Refused
from registry_svc.registry_config import GovernanceConfig, GovernanceMode, Signer
from weft.api.operations.v1 import operation_pb2, operation_service_pb2_grpc
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.kernel.errors.reasons import Reason
from weft_app.cli.main import app
from weft_testing.fake_clock import FakeClock

SHARED_KEY = b"a shared key of more than 32 bytes, really"
NAMES = ("alice", "bob", "carol")


@dataclass
class GovernedRegistry:
    """What was admitted and refused, and where the key is."""

    home: Path
    gate: Gatekeeper
    admitted: list[tuple[operation_pb2.OperationAction, Admission]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The file of the shared key."""
        file = self.home / "model-api.key"
        file.write_bytes(SHARED_KEY + b"\n")
        return str(file)

    def run(self, *arguments: str, stdin: str | None = None) -> Result:
        """A `weft` command to its end."""
        return CliRunner().invoke(app, arguments, input=stdin, env={"WEFT_HOME": str(self.home), "COLUMNS": "200"})


class _Governed(operation_service_pb2_grpc.OperationServiceServicer):
    def __init__(self, registry: GovernedRegistry) -> None:
        self._registry = registry

    def GetGovernance(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._registry.gate.describe()

    def CreateOperation(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            admission = self._registry.gate.admit(request.action, request.authorization, datetime.now(UTC))
        except Refused as error:
            self._registry.refused.append(error.why)
            refuse(context, Reason.OPERATION_REFUSED, "refused")
        self._registry.admitted.append((request.action, admission))
        return pb.CreateOperationResponse(operation=_done(request.action))

    def WatchOperation(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        yield pb.WatchOperationResponse(operation=_done(self._registry.admitted[-1][0]))


def _done(action: operation_pb2.OperationAction) -> operation_pb2.Operation:
    return operation_pb2.Operation(
        name="operations/op-1", state=operation_pb2.Operation.STATE_SUCCEEDED, action=action, request_id="r-1"
    )


@contextmanager
def governed_registry(home: Path, mode: GovernanceMode) -> Iterator[GovernedRegistry]:
    """A registry that has run for a minute, with Alice, Bob and Carol, two of whom must agree."""
    (home / "run").mkdir(parents=True)
    signers = tuple(Signer(id=name) for name in NAMES)
    settings: dict[str, Any] = {"signers": signers, "required_signers": 2, "shared_key": SHARED_KEY}
    config = GovernanceConfig(mode=mode, **settings)
    gate = build_gate(config, FakeClock(utc=datetime.fromtimestamp(time.time() - 60.0, UTC)))
    gate.recall(None)
    registry = GovernedRegistry(home, gate)
    servicer = _Governed(registry)  # type: ignore[abstract]  # only what the CLI calls
    add = partial(operation_service_pb2_grpc.add_OperationServiceServicer_to_server, servicer)
    with served_home(home, add) as address, home_gateway(home, address):
        yield registry
