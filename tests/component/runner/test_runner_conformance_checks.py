"""The negative control of `weft conformance`: a runner that keeps no promise fails every check."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft.api.common.v1 import event_pb2
from weft.api.registry.v1 import model_pb2, runner_pb2
from weft.api.runner.v1 import (
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    runner_service_pb2,
    runner_service_pb2_grpc,
    ticket_pb2,
)
from weft.dispatch.fleet import RunnerView
from weft.kernel.rpc import new_server, open_channel
from weft_testing.conformance.findings import Finding, Verdict
from weft_testing.conformance.runner_suite import CHECKS, examine
from weft_testing.conformance.runner_under_test import RunnerUnderTest

MODEL = "m"
SHORT = 8


class BrokenRunner:
    """Takes every ticket and every request, counts nothing, forgets nothing, ends nothing."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def Generate(self, request: Any, context: Any) -> AsyncGenerator[Any]:  # noqa: N802
        self.seen.append(ticket_pb2.TicketClaims.FromString(request.ticket.claims).request_id)
        deltas = [event_pb2.InferenceEvent(delta=event_pb2.Delta(text="a")) for _ in range(2)]
        yield generation_service_pb2.GenerateResponse(events=deltas)
        if request.chat.sampling.max_tokens > SHORT:
            await asyncio.Event().wait()
        finished = event_pb2.InferenceEvent(finished=event_pb2.Finished())
        yield generation_service_pb2.GenerateResponse(events=[finished, finished])

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802
        return embedding_service_pb2.EmbedResponse()

    async def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802
        state = runner_pb2.InstanceState(model=MODEL, slots_total=1, context_tokens=64)
        runner = runner_pb2.Runner(name="somebody-else")
        runner.capability.instances.add().CopyFrom(state)
        claim = runner_service_pb2.EngineClaim(name="metrics", claim="m", state=runner_service_pb2.CLAIM_STATE_BROKEN)
        instance = runner_service_pb2.InstanceDescription(
            model=MODEL, process_id=1, active_request_ids=self.seen, engine_claims=[claim]
        )
        return runner_service_pb2.DescribeResponse(runner=runner, instances=[instance])

    async def Load(self, request: Any, context: Any) -> Any:  # noqa: N802
        return runner_service_pb2.LoadResponse()

    async def Unload(self, request: Any, context: Any) -> Any:  # noqa: N802
        return runner_service_pb2.UnloadResponse()

    async def TailLogs(self, request: Any, context: Any) -> AsyncGenerator[Any]:  # noqa: N802
        yield runner_service_pb2.TailLogsResponse(lines=["line"] * 1000)

    async def GetRequest(self, request: Any, context: Any) -> Any:  # noqa: N802
        return runner_service_pb2.GetRequestResponse()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)

    # What the generated registration also asks for.
    Wake = YieldMemory = FlushCache = PullModel = AddModel = RemoveModel = Load
    Watch = Check
    List = Check


@asynccontextmanager
async def broken_runner(folder: Path) -> AsyncGenerator[RunnerUnderTest]:
    address = f"unix:{folder}/runner.sock"
    server = new_server()
    servicer: Any = BrokenRunner()
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    embedding_service_pb2_grpc.add_EmbeddingServiceServicer_to_server(servicer, server)
    runner_service_pb2_grpc.add_RunnerServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    view = RunnerView(
        name="broken",
        incarnation="run-1",
        address=address,
        host="elsewhere",
        runtime="fake",
        active=True,
        draining=False,
        ticket_key=b"key",
        instances={},
    )
    try:
        async with open_channel(address) as channel:
            operations = frozenset({int(model_pb2.MODEL_OPERATION_CHAT), int(model_pb2.MODEL_OPERATION_EMBEDDING)})
            yield RunnerUnderTest(view, MODEL, operations, channel)
    finally:
        await server.stop(grace=None)


async def test_runner_that_breaks_every_promise_fails_every_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_testing.conformance.runner_suite.NOTICE_SECONDS", 0.2)
    monkeypatch.setattr("weft_testing.conformance.runner_suite.GONE_SECONDS", 0.2)
    async with broken_runner(tmp_path) as runner, asyncio.timeout(30):
        found: dict[str, Finding] = {finding.check: finding async for finding in examine(runner)}
    assert set(found) == {check.name for check in CHECKS}
    not_here = {name for name, finding in found.items() if finding.verdict is Verdict.NOT_CHECKED}
    assert not_here == {"teardown"}, "its host is another one"
    assert [name for name, finding in found.items() if finding.verdict is Verdict.HONOURED] == []
    assert "somebody-else" in found["description"].detail
    assert "TICKET_INVALID" in found["tickets"].detail
