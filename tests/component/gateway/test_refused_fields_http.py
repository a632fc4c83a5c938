"""Whatever field of a message a service refuses: an answer over HTTP names the field that the caller sent."""

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from admin_script import ScriptedEngineLogs, ScriptedInstances, ScriptedProcesses, ScriptedQueues
from gateway_script import FixedFleet, model, serving
from kit.keys import bearer
from kit.refusing_services import RefusingServices, refusing_services
from test_api_keys_http import KEYS

from gateway.admin.admin_operations import AdminPorts
from gateway.operation_client import OperationsClient
from gateway.registry_client import RegistryClient
from weft.api.registry.v1 import join_token_service_pb2_grpc, key_service_pb2_grpc, secret_service_pb2_grpc
from weft.durable.batches import BatchClient, FileClient
from weft.durable.requests import RequestClient
from weft.durable.responses import ResponseClient
from weft.durable.tasks import TaskClient
from weft.durable.usage import UsageClient

CHAT = {"model": "zz-m", "messages": [{"role": "user", "content": "hi"}]}
REQUESTS: tuple[tuple[str, str, Any], ...] = (
    (
        "POST",
        "/v1/admin/models/zz-m/load",
        {"contextTokens": 8192, "quantization": "zz", "memoryBudgetMb": 7, "keepAlive": 7, "evictModel": "zz-e",
         "replicas": 7, "parameters": {"batch": 7}},
    ),
    ("POST", "/v1/admin/models", {"source": "hf:zz/zz-b", "name": "zz-n", "runner": "zz-r", "evictModel": "zz-e"}),
    ("POST", "/v1/admin/pulls", {"source": "hf:zz/zz-b", "runner": "zz-r"}),
    ("POST", "/v1/admin/models/zz-m/unload", {}),
    ("POST", "/v1/admin/models/zz-m/remove", {}),
    ("POST", "/v1/admin/servers/zz-m/detach", None),
    ("POST", "/v1/admin/cache/flush", {"scope": "tag", "tag": "zz-t", "tenant": "zz", "model": "zz-m"}),
    ("GET", "/v1/admin/operations?pageSize=7&pageToken=zz", None),
    ("GET", "/v1/admin/operations/zz-o", None),
    ("DELETE", "/v1/admin/operations/zz-o", None),
    ("DELETE", "/v1/admin/leases/zz-l", None),
    ("GET", "/v1/admin/audit?after=7&pageSize=7", None),
    ("DELETE", "/v1/admin/join-tokens/zz-i", None),
    ("POST", "/api/v1/keys", {"tenant": "zz", "description": "zz", "lifetimeSeconds": 8192}),
    ("POST", "/v1/admin/secrets", {"name": "zz-s", "value": "zz"}),
    ("PUT", "/v1/admin/secrets/zz-s", {"value": "zz"}),
    ("DELETE", "/v1/admin/secrets/zz-s", None),
    ("GET", "/v1/requests?limit=7", None),
    ("GET", "/v1/requests/zz-q", None),
    ("POST", "/v1/requests/zz-q/cancel", None),
    ("GET", "/v1/usage?model=zz-m&limit=7", None),
    ("GET", "/v1/admin/usage?model=zz-m&tenant=zz&by=model", None),
    ("POST", "/api/v1/inference-tasks", {"api": "chat", "body": CHAT, "max_attempts": 7}),
    ("GET", "/api/v1/inference-tasks?limit=7&page_token=zz&caller=zz&model=zz-m&request_id=zz-q", None),
    ("GET", "/api/v1/inference-tasks/zz-t", None),
    ("GET", "/api/v1/inference-tasks/zz-t/events?after=7", None),
    ("POST", "/api/v1/inference-tasks/zz-t/cancel", None),
    ("DELETE", "/api/v1/inference-tasks/zz-t", None),
    ("GET", "/v1/files?limit=7&after=zz", None),
    ("GET", "/v1/files/zz-f", None),
    ("DELETE", "/v1/files/zz-f", None),
    ("GET", "/v1/batches?limit=7&after=zz", None),
    ("GET", "/v1/batches/zz-b", None),
    ("POST", "/v1/batches/zz-b/cancel", None),
    ("GET", "/v1/responses/zz-p", None),
    ("DELETE", "/v1/responses/zz-p", None),
    ("GET", "/v1/responses/zz-p/input_items?limit=7&after=zz", None),
    ("GET", "/api/v1/models?pageSize=7&pageToken=zz&labels=zz", None),
    ("GET", "/api/v1/runners/zz-r", None),
    ("DELETE", "/api/v1/models/zz-m", None),
    ("DELETE", "/api/v1/runners/zz-r", None),
    ("POST", "/api/v1/apply", {"documents": [{"kind": "agent", "name": "zz-a", "model": "zz-m"}]}),
    ("PUT", "/api/v1/agents/zz-a", {"kind": "agent", "name": "zz-a", "model": "zz-m"}),
    ("GET", "/api/v1/events?kind=model&name=zz-m&limit=7", None),
)  # fmt: skip


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[RefusingServices, str]]:
    with refusing_services() as services:
        yield services


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS, ids=[f"{each[0]} {each[1]}" for each in REQUESTS])
async def test_rejected_field_has_the_name_the_caller_used(
    method: str, path: str, body: Any, services: tuple[RefusingServices, str]
) -> None:
    refusing, address = services
    refusing.place, refusing.typed = 0, []
    raw = b"" if body is None else json.dumps(body).encode()
    headers = {"Idempotency-Key": "zz-k"} | bearer("admin0000000")
    fleet = FixedFleet.of(model("zz-m"), model("zz-e"))
    async with grpc.aio.insecure_channel(address) as channel:
        operations = OperationsClient(channel, timeout_seconds=5.0)
        async with serving(
            fleet=fleet,
            registry=RegistryClient(channel, fleet, timeout_seconds=5.0),
            admin=AdminPorts(
                operations=operations,
                instances=ScriptedInstances(),
                queues=ScriptedQueues(),
                engine_logs=ScriptedEngineLogs(),
                processes=ScriptedProcesses(),
            ),
            requests=RequestClient(channel),
            keys=KEYS if "/keys" in path else None,
            api_keys=key_service_pb2_grpc.KeyServiceStub(channel),
            secrets=secret_service_pb2_grpc.SecretServiceStub(channel),
            join_tokens=join_token_service_pb2_grpc.JoinTokenServiceStub(channel),
            responses=ResponseClient(channel),
            files=FileClient(channel),
            batches=BatchClient(channel),
            tasks=TaskClient(channel),
            usage_source=UsageClient(channel),
        ) as gateway:
            while refusing.place == 0 or refusing.place < len(refusing.typed):
                answer = await gateway.request(method, path, raw, headers)
                assert refusing.typed, f"no field was sent: {answer}"
                field = refusing.typed[refusing.place]
                assert answer.status == 400, f"{field}: {answer}"
                param = answer.error["param"]
                assert _sent(param, path, body), f"{field} is called {param!r}"
                refusing.place += 1


_PATH_NAMES = frozenset({"name", "id", "file_id", "batch_id", "response_id", "Idempotency-Key"})


def _sent(param: str | None, path: str, body: Any) -> bool:
    """Whether a name is that of a header, a part of the path, a parameter of the query or a field of the body."""
    if param is None or param in _PATH_NAMES or f"{param}=" in path:
        return param is not None
    found = body
    for index, name in re.findall(r"\[(\d+)\]|([^.\[\]]+)", param):
        if isinstance(found, list):
            found = found[int(index)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return False
    return True
