"""Scripted collaborators of the admin endpoints."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.fleet import runner_view

from gateway.admin.admin_operations import AdminPorts
from gateway.admin.instances import EngineLogClient, RunnerDescriptions
from gateway.admin.process_client import ProcessesClient
from gateway.operation_client import OperationsClient
from weft.api.gateway.v1.engine_log_pb2 import EngineLog
from weft.api.operations.v1 import operation_pb2, process_service_pb2
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.api.registry.v1 import lease_pb2, lease_service_pb2, runner_pb2
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.runner.v1 import load_pb2, runner_service_pb2
from weft.dispatch.fleet import FleetView, ModelView
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.requests.placement_request import PoolQueue
from weft.kernel.requests.request_values import Operation
from weft.kernel.values.unknown_names import RUNNER, unknown_name

GIB = 1024**3


def an_operation(
    state: str = "PENDING", *, action: operation_pb2.OperationAction | None = None
) -> operation_pb2.Operation:
    return operation_pb2.Operation(
        name="operations/op-1",
        state=operation_pb2.Operation.State.Value(f"STATE_{state}"),
        action=action or operation_pb2.OperationAction(unload_model=operation_pb2.UnloadModel(model="tiny")),
        request_id="r-1",
        progress=0.5 if state == "RUNNING" else None,
    )


@dataclass
class ScriptedOperations(OperationsClient):
    """Returns scripted answers, and records its requests."""

    failure: WeftError | None = None
    watch_states: tuple[str, ...] = ("RUNNING", "SUCCEEDED")
    created: list[pb.CreateOperationRequest] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)
    """Of what was created, in order."""
    asked: list[tuple[object, ...]] = field(default_factory=list)

    async def create(self, request: pb.CreateOperationRequest, traceparent: str = "") -> operation_pb2.Operation:
        self._fail()
        self.traceparents.append(traceparent)
        self.created.append(request)
        return an_operation(action=request.action)

    async def get(self, name: str) -> operation_pb2.Operation:
        self._fail()
        self.asked.append(("get", name))
        return an_operation("RUNNING")

    async def list_page(self, request: pb.ListOperationsRequest) -> pb.ListOperationsResponse:
        self._fail()
        self.asked.append(("list", request.page_size, request.page_token, request.unfinished_only))
        return pb.ListOperationsResponse(operations=[an_operation()], next_page_token="2")

    async def watch(self, name: str) -> AsyncGenerator[operation_pb2.Operation]:
        self._fail()
        self.asked.append(("watch", name))
        for state in self.watch_states:
            yield an_operation(state)

    async def cancel(self, name: str, requested_by: str) -> operation_pb2.Operation:
        self._fail()
        self.asked.append(("cancel", name, requested_by))
        return an_operation("CANCELLED")

    async def audit(self, request: pb.ListAuditEntriesRequest) -> pb.ListAuditEntriesResponse:
        self._fail()
        self.asked.append(("audit", request.after_sequence, request.page_size))
        return pb.ListAuditEntriesResponse()

    async def host_memory(self, host: str) -> Sequence[lease_service_pb2.HostMemory]:
        self._fail()
        self.asked.append(("host_memory", host))
        device = lease_service_pb2.DeviceMemory(
            device=lease_pb2.Device(index=0, id="GPU-1", name="Big", total_bytes=24 * GIB),
            booked_bytes=5 * GIB,
            free_bytes=18 * GIB,
            margin_bytes=GIB // 2,
        )
        nvml = lease_pb2.HostSighting.SOURCE_NVML
        hosts = [lease_service_pb2.HostMemory(host="titan", source=nvml, devices=[device])]
        return [each for each in hosts if host in ("", each.host)]

    async def release_lease(self, lease_id: str, requested_by: str) -> lease_pb2.Lease:
        self._fail()
        self.asked.append(("release_lease", lease_id, requested_by))
        return lease_pb2.Lease(lease_id=lease_id, state=lease_pb2.Lease.STATE_RELEASING, purpose="training")

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


@dataclass
class ScriptedInstances(RunnerDescriptions):
    """Instance descriptions, by runner and model."""

    said: dict[str, dict[str, runner_service_pb2.InstanceDescription]] = field(default_factory=dict)
    asked: list[Sequence[str]] = field(default_factory=list)

    async def instances(self, runners: Sequence[str]) -> dict[str, dict[str, runner_service_pb2.InstanceDescription]]:
        self.asked.append(runners)
        return {name: self.said[name] for name in runners if name in self.said}

    async def describe(self, runner: str, line_count: int) -> runner_service_pb2.DescribeResponse:
        del line_count
        if runner not in self.said:
            raise unknown_name(RUNNER, runner)
        return runner_service_pb2.DescribeResponse(instances=self.said[runner].values())


@dataclass
class ScriptedQueues:
    """Queue depths, or the error of a request for them."""

    told: tuple[PoolQueue, ...] = ()
    failure: WeftError | None = None

    async def queues(self) -> Sequence[PoolQueue]:
        if self.failure is not None:
            raise self.failure
        return self.told


@dataclass
class ScriptedEngineLogs(EngineLogClient):
    """Lines of engines in batches, or the error of a request for them."""

    batches: tuple[tuple[str, ...], ...] = (("one", "two"), ("three",))
    failure: WeftError | None = None
    asked: list[tuple[str, int, bool]] = field(default_factory=list)

    async def lines(self, model: ModelView, line_count: int, *, follow: bool) -> AsyncGenerator[EngineLog]:
        self.asked.append((model.name, line_count, follow))
        if self.failure is not None:
            raise self.failure
        for batch in self.batches:
            yield EngineLog(model=model.name, runner=model.runner, lines=batch)


@dataclass
class ScriptedProcesses(ProcessesClient):
    """The health of processes."""

    failure: WeftError | None = None
    asked: list[str] = field(default_factory=list)

    async def health(self, process: str) -> process_service_pb2.GetHealthResponse:
        self._note(process)
        found = process_service_pb2.GetHealthResponse(status="degraded", live=True, ready=True, log_level="info")
        found.components.add(name="engines", state="degraded", reason="engine_failed", message="qwen failed")
        return found

    def _note(self, process: str) -> None:
        self.asked.append(process)
        if self.failure is not None:
            raise self.failure


def admin_ports(
    operations: ScriptedOperations | None = None,
    instances: ScriptedInstances | None = None,
    queues: ScriptedQueues | None = None,
    **others: Any,
) -> AdminPorts:
    """Returns scripted ports; `others` are fields of AdminPorts."""
    given = {"engine_logs": ScriptedEngineLogs(), "processes": ScriptedProcesses(), **others}
    return AdminPorts(
        operations=operations or ScriptedOperations(),
        instances=instances or ScriptedInstances(),
        queues=queues or ScriptedQueues(),
        **given,
    )


def two_replicas() -> FleetView:
    """A pool "qwen" with a model that is ready on titan and a hibernating one of a runner that is gone."""
    ready = InstanceState(
        model="qwen",
        phase=InstanceState.PHASE_READY,
        slots_total=4,
        slots_used=1,
        load_progress=None,
        detail="",
        context_tokens=2048,
        memory=runner_pb2.InstanceMemory(
            leased_bytes=5 * GIB, estimated_bytes=4 * GIB, estimate_source="header", device_indexes=[0]
        ),
        pinned=True,
    )
    models = [_member("qwen", "r1"), _member("qwen-2", "r2", hibernating=True)]
    runner = runner_view("r1", instances={"qwen": ready}, host="titan", runtime="llama_server")
    return FleetView(1, {"r1": runner}, {one.name: one for one in models}, {})


def described() -> dict[str, dict[str, runner_service_pb2.InstanceDescription]]:
    """The description of qwen on r1."""
    context = load_pb2.LoadParameter(
        name="context_tokens", description="Context of one slot.", minimum=16, maximum=32_768, integer=True
    )
    context.default.integer = 2048
    return {
        "r1": {
            "qwen": runner_service_pb2.InstanceDescription(
                model="qwen",
                model_path="/models/qwen.gguf",
                load_parameters=[
                    context,
                    load_pb2.LoadParameter(name="cache_type_k", description="Of keys.", words=["f16", "q8_0"]),
                ],
                quantizations=["q4_k_m", "q8_0"],
                cache_isolation=runner_service_pb2.CACHE_ISOLATION_SLOTS,
            )
        }
    }


def _member(name: str, runner: str, *, hibernating: bool = False) -> ModelView:
    return ModelView(
        name=name,
        pool="qwen",
        runner=runner,
        operations=frozenset({Operation.CHAT, Operation.EMBEDDING}),
        remote=False,
        active=not hibernating,
        context_tokens=2048,
        created_at_seconds=1_700_000_000,
        hibernating=hibernating,
    )
