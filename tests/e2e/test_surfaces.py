"""What every service answers, and what travels along with a request."""

from collections.abc import Iterator
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kit.quick_weft import within
from mesh_process import POOL, MeshProcess, fake_runner, running_mesh, write_config

from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import inference_service_pb2, inference_service_pb2_grpc
from weft.kernel.reasons import Reason

QUICK = within({"gateway.config:GatewayConfig": {"sse_keepalive_seconds": 0.2}})
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MESH_SERVICES = [
    "weft.api.registry.v1.RegistryService",
    "weft.api.registry.v1.RunnerSessionService",
    "weft.api.router.v1.InferenceService",
    "weft.api.router.v1.PlacementService",
]
RUNNER_SERVICES = [
    "weft.api.runner.v1.GenerationService",
    "weft.api.runner.v1.EmbeddingService",
    "weft.api.runner.v1.RunnerService",
]


@pytest.fixture(scope="module")
def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("surfaces")
    config = write_config(
        folder,
        fake_runner("a", slots=1),
        router={"queue_depth_per_runner": 1, "queue_timeout_seconds": 2.0},
        gateway={"max_body_bytes": 100_000},
        grpc_port=0,
    )
    with running_mesh(folder / "home", "--config", str(config), within=QUICK) as mesh:
        yield mesh


@pytest.fixture
async def mesh(shared_mesh: MeshProcess) -> MeshProcess:
    await shared_mesh.reset("a")
    return shared_mesh


async def _runner_address(mesh: MeshProcess) -> str:
    return (await mesh.runners())[0].address


def _body(**changes: Any) -> dict[str, Any]:
    return {"model": POOL, "messages": [{"role": "user", "content": "hi"}], **changes}


@pytest.mark.parametrize(("where", "services"), [("mesh", MESH_SERVICES), ("runner", RUNNER_SERVICES)])
async def test_reflection_lists_every_service_and_its_methods(
    mesh: MeshProcess, where: str, services: list[str]
) -> None:
    address = mesh.grpc if where == "mesh" else await _runner_address(mesh)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=services[0]),
    ]
    with grpc.insecure_channel(address) as channel:
        listed, described = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter(requests), timeout=5.0
        )
    assert set(services) <= {service.name for service in listed.list_services_response.service}
    file = FileDescriptorProto.FromString(described.file_descriptor_response.file_descriptor_proto[0])
    assert services[0].rpartition(".")[2] in {service.name for service in file.service}


async def test_trace_and_request_ids_reach_the_backend_and_the_log(mesh: MeshProcess) -> None:
    headers = {"traceparent": TRACEPARENT, "X-Request-Id": "my-request", "X-Tenant-ID": "lab", "X-Priority": "high"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{mesh.url}/v1/chat/completions", json=_body(), headers=headers) as response,
    ):
        assert response.status == 200
        assert response.headers["x-request-id"] == "my-request"
    async with await mesh.backend("a") as backend:
        seen = {name.lower(): value for name, value in (await backend.state()).last_request_headers.items()}
    assert seen["traceparent"] == TRACEPARENT
    assert seen["x-request-id"] == "my-request"
    line = mesh.request_line("my-request")
    assert line["trace_id"] == TRACEPARENT.split("-")[1]
    assert line["tenant"] == "lab"


async def test_trailer_contains_the_receipt_on_success_and_on_failure(mesh: MeshProcess) -> None:
    request = inference_service_pb2.ChatRequest(model=POOL)
    request.payload.messages.add(role=3).content.add(text="hi")
    with grpc.insecure_channel(mesh.grpc) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        good = stub.Chat(request, timeout=5.0, metadata=(("x-request-id", "good"),))
        list(good)
        request.model = "nobody"
        bad = stub.Chat(request, timeout=5.0, metadata=(("x-request-id", "bad"),))
        with pytest.raises(grpc.RpcError):
            list(bad)
        trailers: list[dict[str, Any]] = [dict(call.trailing_metadata()) for call in (good, bad)]
        receipts = [receipt_pb2.Receipt.FromString(trailer["weft-receipt-bin"]) for trailer in trailers]
    assert [receipt.request_id for receipt in receipts] == ["good", "bad"]
    assert receipts[0].outcome == receipt_pb2.OUTCOME_COMPLETED
    assert receipts[1].outcome == receipt_pb2.OUTCOME_REJECTED
    assert Reason(receipts[1].reason) is Reason.MODEL_NOT_FOUND
