"""gRPC requests that are journaled by setting: tasks whose callers wait, and receipts that name them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, delta, finished, hello, model, started
from inference_stage import conversation, embedding, inference, outcome, refused, stub_of
from kit.grpc_server import served
from task_script import ScriptedTasks, output

from router_svc.placement import PlacementServicer, add_placement_to_server
from weft.api.common.v1 import rerank_pb2
from weft.api.registry.v1 import model_pb2
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.api.router.v1 import placement_service_pb2
from weft.dispatch.call import LayeredDispatcher
from weft.durable.durable_call import durable_calls
from weft.durable.journal_policy import JournalPolicy, JournalRules
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import JournalMode
from weft.kernel.time.clock import SystemClock
from weft_testing.carried import CarriedStub

ANSWER = output([started()], [delta("Hello", finish="STOP"), finished()])
TENANTS = JournalRules(tenants={"ann": JournalMode.KEEP})


def journaling(folder: Path, tasks: ScriptedTasks, dispatcher: ScriptedDispatcher) -> Any:
    policy = JournalPolicy(FixedFleet.of(model("tiny")), TENANTS)
    return inference(folder, LayeredDispatcher(dispatcher, durable_calls(tasks, SystemClock())), policy)


def of(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("x-tenant-id", tenant),)


async def test_calls_of_a_journaled_tenant_become_tasks(tmp_path: Path) -> None:
    tasks, dispatcher = ScriptedTasks(at_once=[ANSWER]), ScriptedDispatcher(hello())
    request = pb.ChatRequest(model="tiny", payload=conversation())
    async with journaling(tmp_path, tasks, dispatcher) as channel:
        await outcome(stub_of(channel).Chat(request, metadata=of("ann")))
        assert (tasks.one.new.tenant, dispatcher.contexts) == ("ann", [])
        await outcome(stub_of(channel).Chat(request, metadata=of("bob")))
        assert (len(tasks.kept), len(dispatcher.contexts)) == (1, 1)


async def test_embeddings_become_tasks_too(tmp_path: Path) -> None:
    tasks = ScriptedTasks(at_once=[output([started()], [finished()], vectors=[[0.5]])])
    async with journaling(tmp_path, tasks, ScriptedDispatcher()) as channel:
        request = pb.EmbedRequest(model="tiny", payload=embedding())
        (answer,) = await outcome(stub_of(channel).Embed(request, metadata=of("ann")))
        assert [list(each.values) for each in answer.embeddings] == [[0.5]]
    assert tasks.one.new.spec.HasField("embedding")


async def test_request_unsupported_as_a_task_is_rejected(tmp_path: Path) -> None:
    dispatcher = ScriptedDispatcher()
    async with journaling(tmp_path, ScriptedTasks(), dispatcher) as channel:
        request = pb.RerankRequest(model="tiny", payload=rerank_pb2.RerankPayload(query="a", documents=["b"]))
        refusal = await refused(stub_of(channel).Rerank(request, metadata=of("ann")))
    assert (refusal.reason, dispatcher.contexts) == (Reason.UNSUPPORTED_OPERATION, [])


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
    tenant: str, reason: Reason, asked: int
) -> None:
    router = NobodyIsPlaced()
    servicer: Any = PlacementServicer(router, JournalPolicy(FixedFleet.of(model("tiny")), TENANTS))  # type: ignore[arg-type]
    opening = placement_service_pb2.PlaceOpen(
        request_id="r", tenant=tenant, model="tiny", operation=model_pb2.MODEL_OPERATION_CHAT
    )
    async with served(partial(add_placement_to_server, servicer)) as channel:
        call = CarriedStub(channel, placement_service_pb2).Place(placement_service_pb2.PlaceRequest(open=opening))
        with pytest.raises(WeftError) as told:
            await call.read()
    assert (told.value.reason, router.asked) == (reason, asked)
