"""gRPC requests that are journaled by setting: tasks whose callers wait, and receipts that name them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, delta, finished, hello, model, started
from task_script import ScriptedTasks, output

from router_svc.inference_servicer import InferenceServicer
from router_svc.placement import PlacementServicer
from weft.api.common.v1 import chat_pb2, embedding_pb2, rerank_pb2
from weft.api.registry.v1 import model_pb2
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.api.router.v1 import inference_service_pb2_grpc, placement_service_pb2, placement_service_pb2_grpc
from weft.dispatch.call import LayeredDispatcher
from weft.durable.durable_call import durable_calls
from weft.durable.journal_policy import JournalPolicy, JournalRules
from weft.kernel.clock import SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.json_schema import SchemaLimits
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.reasons import Reason
from weft.kernel.request import JournalMode
from weft.kernel.rpc import error_from_call, new_server, open_channel

ANSWER = output([started()], [delta("Hello", finish="STOP"), finished()])
TENANTS = JournalRules(tenants={"ann": JournalMode.KEEP})


@asynccontextmanager
async def inference(folder: Path, tasks: ScriptedTasks, dispatcher: ScriptedDispatcher) -> AsyncIterator[Any]:
    policy = JournalPolicy(FixedFleet.of(model("tiny")), TENANTS)
    journaling = LayeredDispatcher(dispatcher, durable_calls(tasks, SystemClock()))
    server = new_server()
    InferenceServicer(journaling, 30, SchemaLimits(), policy).add_to_server(server)
    address = f"unix:{folder / 'router.sock'}"
    server.add_insecure_port(address)
    await server.start()
    channel = open_channel(address)
    try:
        yield inference_service_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await channel.close(grace=None)
        await server.stop(grace=0.5)


def a_chat() -> pb.ChatRequest:
    payload = chat_pb2.ChatPayload()
    payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text="hi")
    return pb.ChatRequest(model="tiny", payload=payload)


def of(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("x-tenant-id", tenant),)


async def test_calls_of_a_journaled_tenant_become_tasks(tmp_path: Path) -> None:
    tasks, dispatcher = ScriptedTasks(at_once=[ANSWER]), ScriptedDispatcher(hello())
    async with inference(tmp_path, tasks, dispatcher) as stub:
        async for _ in stub.Chat(a_chat(), metadata=of("ann")):
            pass
        assert (tasks.one.new.tenant, dispatcher.contexts) == ("ann", [])
        async for _ in stub.Chat(a_chat(), metadata=of("bob")):
            pass
        assert (len(tasks.kept), len(dispatcher.contexts)) == (1, 1)


async def test_embeddings_become_tasks_too(tmp_path: Path) -> None:
    tasks = ScriptedTasks(at_once=[output([started()], [finished()], vectors=[[0.5]])])
    async with inference(tmp_path, tasks, ScriptedDispatcher()) as stub:
        request = pb.EmbedRequest(model="tiny", payload=embedding_pb2.EmbeddingPayload())
        request.payload.inputs.add(text="hi")
        answer = await stub.Embed(request, metadata=of("ann"))
        assert [list(each.values) for each in answer.embeddings] == [[0.5]]
    assert tasks.one.new.spec.HasField("embedding")


async def test_request_unsupported_as_a_task_is_rejected(tmp_path: Path) -> None:
    dispatcher = ScriptedDispatcher()
    async with inference(tmp_path, ScriptedTasks(), dispatcher) as stub:
        request = pb.RerankRequest(model="tiny", payload=rerank_pb2.RerankPayload(query="a", documents=["b"]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Rerank(request, metadata=of("ann"))
    error = error_from_call(refused.value, Reason.INTERNAL)
    assert (error.reason, dispatcher.contexts) == (Reason.UNSUPPORTED_OPERATION, [])


@dataclass
class NobodyIsPlaced:
    """A router that refuses every placement that reaches it."""

    asked: int = 0

    def place(self, request: PlacementRequest) -> Any:
        self.asked += 1
        raise WeftError(Reason.QUEUE_FULL, "it came to be placed")


@pytest.mark.parametrize(
    ("tenant", "reason", "asked"),
    [("ann", Reason.SERVICE_UNAVAILABLE, 0), ("bob", Reason.QUEUE_FULL, 1)],
)
async def test_router_rejects_unjournaled_placements_of_an_older_gateway(
    tmp_path: Path, tenant: str, reason: Reason, asked: int
) -> None:
    router, server = NobodyIsPlaced(), new_server()
    policy = JournalPolicy(FixedFleet.of(model("tiny")), TENANTS)
    placement_service_pb2_grpc.add_PlacementServiceServicer_to_server(PlacementServicer(router, policy), server)  # type: ignore[arg-type]
    address = f"unix:{tmp_path / 'router.sock'}"
    server.add_insecure_port(address)
    await server.start()
    channel = open_channel(address)
    opening = placement_service_pb2.PlaceOpen(
        request_id="r", tenant=tenant, model="tiny", operation=model_pb2.MODEL_OPERATION_CHAT
    )
    stub: Any = placement_service_pb2_grpc.PlacementServiceStub(channel)
    try:
        call = stub.Place()
        await call.write(placement_service_pb2.PlaceRequest(open=opening))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    finally:
        await channel.close()
        await server.stop(grace=None)
    assert (error_from_call(refused.value, Reason.INTERNAL).reason, router.asked) == (reason, asked)
