"""A registry with operations and without a server. It has one runner, r1, and the calls to it are scripted."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from operation_stage import ScriptedCalls
from roster_harness import BareRegistry

from registry_svc.mesh.declarations import Declarations
from registry_svc.mesh.states import Session
from registry_svc.mesh.store import SqlStore
from registry_svc.operations.governance import Gatekeeper
from registry_svc.operations.operations import OperationService
from registry_svc.registry_config import OperationLimits, RegistryConfig
from weft.api.operations.v1.operation_service_pb2 import GetGovernanceResponse
from weft.api.registry.v1.model_pb2 import MODEL_OPERATION_CHAT, ModelManifest
from weft.api.registry.v1.runner_pb2 import Capability, InstanceState, Runner
from weft.api.registry.v1.runner_session_service_pb2 import HeartbeatRequest, OpenSessionRequest
from weft.documents.codec import word_of
from weft.documents.resource_kinds import ResourceKind
from weft_testing.fake_clock import FakeClock


@dataclass(kw_only=True)
class OperatedRegistry:
    """The parts of the registry, and the session of its runner."""

    registry: BareRegistry
    declarations: Declarations
    desk: OperationService
    calls: ScriptedCalls
    session: Session
    sequence: int = 0

    async def beat(self, *instances: InstanceState) -> None:
        """The runner reports these instances."""
        self.sequence += 1
        report = Capability(instances=instances)
        await self.registry.roster.heartbeat(
            HeartbeatRequest(
                session_id=self.session.id, incarnation="life-1", sequence=self.sequence, capability=report
            )
        )

    def events(self, kind: ResourceKind | None = None) -> list[str]:
        """All events, such as "m1 configured"."""
        found = self.registry.core.events.newest(kind, "", 1000)
        return [f"{each.name} {word_of(each, 'reason')}" for each in found]


class GovernedGate(Gatekeeper):
    """Operations need tokens."""

    def describe(self) -> GetGovernanceResponse:
        return GetGovernanceResponse(mode=GetGovernanceResponse.MODE_SHARED_KEY)


def opening(
    *instances: InstanceState, models: tuple[str, ...] = ("m1", "m2"), incarnation: str = "life-1"
) -> OpenSessionRequest:
    """The request with which the runner opens its session."""
    capability = Capability(instances=instances)
    return OpenSessionRequest(
        request_id=f"open-{incarnation}",
        runner=Runner(name="r1", incarnation=incarnation, address="unix:/r1", host="h1", capability=capability),
        models=[ModelManifest(name=name, operations=[MODEL_OPERATION_CHAT]) for name in models],
    )


@asynccontextmanager
async def operated_registry(
    config: RegistryConfig,
    request: OpenSessionRequest,
    *,
    gate: Callable[[], Gatekeeper] = Gatekeeper,
    limits: OperationLimits | None = None,
) -> AsyncIterator[OperatedRegistry]:
    """A registry that runs, and has answered the runner's request."""
    calls, store = ScriptedCalls(), SqlStore(config.database_url)
    registry = BareRegistry(store, FakeClock(), config)
    await registry.start()
    desk = OperationService(registry.core, store, calls, gate(), limits or OperationLimits())
    await desk.start()
    declarations = Declarations(registry.core, desk.unloader)
    session = await registry.roster.open_session(request)
    try:
        yield OperatedRegistry(registry=registry, declarations=declarations, desk=desk, calls=calls, session=session)
    finally:
        await desk.stop(1.0)
        await registry.stop()
