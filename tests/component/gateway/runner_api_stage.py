"""A runner's HTTP API with a scripted runner, queue and registry behind it."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from gateway_script import FixedFleet, ScriptedDispatcher, model
from kit.runner_facts import model_facts

from gateway.auth.authentication import KeyRingSource
from gateway.gateway_config import GatewayConfig
from gateway.operation_client import ENDED, OperationsClient
from gateway.runner_api.deps import RunnerApiConfig, RunnerApiPorts
from gateway.runner_api.facts import ModelFacts, ModelStage, RunnerFacts, RunnerStage
from gateway.runner_api_service import RunnerApiService, build
from weft.api.operations.v1 import operation_pb2, operation_service_pb2
from weft.api.runner.v1.runner_service_pb2 import CacheFigures
from weft.dispatch.call import RequestDispatcher
from weft.extension import own_extensions
from weft.gpu.snapshot import DeviceSnapshot
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock

GIB = 1024**3
Operation = operation_pb2.Operation


def device(index: int = 0, total_bytes: int = 8 * GIB, used_bytes: int | None = None) -> DeviceSnapshot:
    return DeviceSnapshot(index=index, id=f"GPU-{index}", name="Big", total_bytes=total_bytes, used_bytes=used_bytes)


def facts(stage: RunnerStage = RunnerStage.SERVING, *models: ModelFacts) -> RunnerFacts:
    return RunnerFacts(
        name="gpu-0",
        kind="llama_server-weft-0.1.0",
        stage=stage,
        models=models
        or (
            model_facts(
                "tiny",
                context_tokens=2048,
                loaded_at=1745880000,
                memory_bytes=2 * GIB,
                slots_used=1,
                takes_chats=True,
                tenants_apart=True,
                cache=CacheFigures(hit_count=3, miss_count=1, prompt_token_count=400, cached_token_count=200),
            ),
            model_facts("small", ModelStage.AVAILABLE, takes_chats=True, tenants_apart=True),
        ),
    )


@dataclass
class ScriptedRunner:
    told: RunnerFacts = field(default_factory=facts)
    seen: tuple[DeviceSnapshot, ...] | None = (device(used_bytes=3 * GIB),)

    def facts(self) -> RunnerFacts:
        return self.told

    async def devices(self) -> tuple[DeviceSnapshot, ...] | None:
        return self.seen


@dataclass
class ScriptedQueue:
    load: tuple[int, int] = (0, 0)


@dataclass
class ScriptedOperations(OperationsClient):
    """Has operations by name; a new one ends at once as `ends` says, or never while that is None."""

    ends: Operation | None = None
    failure: WeftError | None = None
    known: dict[str, Operation] = field(default_factory=dict)
    asked: list[operation_service_pb2.CreateOperationRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    cancelled_by: list[str] = field(default_factory=list)

    async def create(self, request: operation_service_pb2.CreateOperationRequest, traceparent: str = "") -> Operation:
        del traceparent
        self.asked.append(request)
        if self.failure is not None:
            raise self.failure
        name = f"operations/op-{request.request_id}"
        if name not in self.known:
            self.known[name] = Operation(name=name, state=Operation.STATE_PENDING, action=request.action)
        return self.known[name]

    async def get(self, name: str) -> Operation:
        if name not in self.known:
            raise WeftError(Reason.NOT_FOUND, "there is no such operation")
        return self.known[name]

    async def watch(self, name: str) -> AsyncGenerator[Operation]:
        if self.ends is None:
            await asyncio.Event().wait()
        assert self.ends is not None
        ended = Operation()
        ended.CopyFrom(self.known[name])
        ended.MergeFrom(self.ends)
        self.known[name] = ended
        yield ended

    async def list_page(self, request: operation_service_pb2.ListOperationsRequest) -> Any:
        raise AssertionError("the API of a runner lists no operations")

    async def audit(self, request: operation_service_pb2.ListAuditEntriesRequest) -> Any:
        raise AssertionError("the API of a runner has no audit log")

    async def host_memory(self, host: str) -> Any:
        raise AssertionError("the API of a runner has no ledger")

    async def release_lease(self, lease_id: str, requested_by: str) -> Any:
        raise AssertionError("the API of a runner has no ledger")

    async def cancel(self, name: str, requested_by: str) -> Operation:
        self.cancelled.append(name)
        self.cancelled_by.append(requested_by)
        operation = self.known[name]
        if operation.state not in ENDED:
            operation.state = Operation.STATE_CANCELLED
        return operation


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        return self.json["error"]


@dataclass
class RunnerApiStage:
    service: RunnerApiService
    runner: ScriptedRunner
    queue: ScriptedQueue
    operations: ScriptedOperations
    http: aiohttp.ClientSession

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.ask("GET", path, None, headers)

    async def post(self, path: str, body: object, **headers: str) -> Answer:
        return await self.ask("POST", path, body, headers)

    async def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        url = path if path.startswith("http") else f"{self.service.url}{path}"
        named = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
        async with self.http.request(method, url, json=body, headers=named) as response:
            return Answer(response.status, response.headers, await response.text())

    async def chat(self, **headers: str) -> Answer:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        return await self.post("/v1/chat/completions", body, **headers)


@asynccontextmanager
async def runner_api(
    dispatcher: RequestDispatcher | None = None,
    *,
    config: RunnerApiConfig | None = None,
    runner: ScriptedRunner | None = None,
    operations: ScriptedOperations | None = None,
    clock: Clock | None = None,
    keys: KeyRingSource | None = None,
) -> AsyncIterator[RunnerApiStage]:
    """The API on a free port."""
    runner, queue, operations = runner or ScriptedRunner(), ScriptedQueue(), operations or ScriptedOperations()
    given = config or RunnerApiConfig()
    service = build(
        replace(given, edge=replace(given.edge, port=0)),
        RunnerApiPorts(
            runner=runner,
            dispatcher=dispatcher or ScriptedDispatcher(),
            fleet=FixedFleet.of(model("tiny"), model("small")),
            queue=queue,
            operations=operations,
            keys=keys,
            extensions=own_extensions(),
        ),
        clock=clock,
    )
    await service.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield RunnerApiStage(service, runner, queue, operations, http)
    finally:
        await service.stop(grace_seconds=0.0)


def edge(**settings: Any) -> RunnerApiConfig:
    """A configuration with these HTTP settings."""
    return RunnerApiConfig(edge=GatewayConfig(**settings))
