"""Traces of a mesh whose services are processes of their own, as a collector gets them."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import aiohttp
import pytest
from apart_mesh import Apart, running_apart
from join_process import laptop_server, make_token, relay_facts, running_join
from kit.fake_backend import run_fake_backend
from kit.otlp_receiver import OtlpReceiver, ReceivedSpan, running_receiver
from mesh_process import eventually, fake_runner, write_config

from weft.api.common.v1 import chat_pb2
from weft.api.router.v1 import inference_service_pb2, inference_service_pb2_grpc
from weft.kernel.channels.rpc import open_channel


@dataclass(frozen=True, slots=True)
class TracedMesh:
    """Registry, router, gateway and a runner apart, and the collector that they send their spans to."""

    mesh: Apart
    collector: OtlpReceiver


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedMesh]:
    folder = tmp_path_factory.mktemp("traces")
    config = write_config(
        folder, fake_runner("a", answer_tokens=5, tokens_per_second=200), relay={"listen": "127.0.0.1:0"}
    )
    with running_receiver() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with running_apart(folder, config) as mesh:
            asyncio.run(_ready(mesh))
            yield TracedMesh(mesh, collector)


async def _ready(mesh: Apart, model: str = "m-a") -> None:
    async def answers() -> bool:
        return (await _chat(mesh, model=model, max_tokens=1))[0] == 200

    await eventually(answers, 20.0, f"{model} does not answer")


async def _chat(mesh: Apart, *, traceparent: str = "", **changes: Any) -> tuple[int, Any]:
    body = {"model": "m-a", "messages": [{"role": "user", "content": "a secret"}], **changes}
    headers = {"traceparent": traceparent} if traceparent else {}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{mesh.url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


def _traceparent() -> tuple[str, str, str]:
    trace, span = token_hex(16), token_hex(8)
    return f"00-{trace}-{span}-01", trace, span


def _has(trace: str, *names: str) -> Any:
    return lambda spans: set(names) <= {span.name for span in spans if span.trace_id == trace}


async def test_request_is_one_trace_across_gateway_router_dialled_out_runner_and_engine(
    traced: TracedMesh, tmp_path: Path
) -> None:
    mesh, collector = traced.mesh, traced.collector
    token = (await make_token(mesh.home))["token"]
    traceparent, trace, caller = _traceparent()
    async with run_fake_backend(answer_tokens=5) as engine:
        server = laptop_server(engine.base_url)
        with running_join(tmp_path / "laptop", relay_facts(mesh.home)["url"], token, *server) as laptop:
            await laptop.until("joined as laptop")
            await _ready(mesh, "llama")
            status, answer = await _chat(mesh, model="llama", traceparent=traceparent)
            state = await engine.state()
    assert status == 200
    await asyncio.to_thread(collector.wait_for, _has(trace, "POST /v1/chat/completions", "chat llama"))
    spans = collector.of_trace(trace)
    edge, chat = spans["POST /v1/chat/completions"], spans["chat llama"]
    attempt, generation = spans["weft.attempt"], spans["weft.generate"]
    assert [edge.parent_id, chat.parent_id, attempt.parent_id, generation.parent_id] == [
        caller,
        edge.span_id,
        chat.span_id,
        attempt.span_id,
    ]
    assert [edge.service, chat.service, attempt.service, generation.service] == [
        "weft-gateway",
        "weft-gateway",
        "weft-gateway",
        "weft-runner",
    ]
    assert state.last_request_headers["traceparent"] == f"00-{trace}-{generation.span_id}-01"
    assert edge.start <= chat.start <= attempt.start <= generation.start < generation.end <= attempt.end <= chat.end
    assert chat.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 5
    assert (edge.kind, edge.attributes["http.response.status_code"]) == ("SPAN_KIND_SERVER", 200)
    assert "a secret" not in repr(collector.spans)
    assert not any(span.is_error for span in spans.values())


async def test_task_span_covers_submission_to_end_and_links_the_submission(
    traced: TracedMesh,
) -> None:
    traceparent, trace, _ = _traceparent()
    request = {"model": "m-a", "messages": [{"role": "user", "content": "hi"}]}
    body, headers = {"body": request}, {"traceparent": traceparent}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{traced.mesh.url}/api/v1/inference-tasks", json=body, headers=headers) as answer,
    ):
        assert answer.status == 202, await answer.text()
    submitting = "POST /api/v1/inference-tasks"
    await asyncio.to_thread(traced.collector.wait_for, _has(trace, submitting, "weft.task", "chat m-a"))
    spans = traced.collector.of_trace(trace)
    submission = spans[submitting]
    task, chat = spans["weft.task"], spans["chat m-a"]
    assert task.links == ((trace, submission.span_id),)
    assert (task.parent_id, chat.parent_id) == (submission.span_id, task.span_id)
    assert (task.service, task.attributes["weft.outcome"]) == ("weft-router", "completed")
    assert submission.start < task.start <= chat.start < chat.end <= task.end


async def test_grpc_call_is_a_child_span_of_its_caller(traced: TracedMesh) -> None:
    traceparent, trace, caller = _traceparent()
    channel = open_channel(f"unix:{traced.mesh.home / 'run' / 'router.sock'}")
    try:
        stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        payload = chat_pb2.ChatPayload()
        payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text="hi")
        call = stub.Chat(
            inference_service_pb2.ChatRequest(model="m-a", payload=payload), metadata=(("traceparent", traceparent),)
        )
        async for _ in call:
            pass
    finally:
        await channel.close()
    await asyncio.to_thread(traced.collector.wait_for, _has(trace, "chat m-a"))
    await asyncio.to_thread(traced.collector.wait_for, lambda spans: any(_is_call(span, trace) for span in spans))
    call_span = next(span for span in traced.collector.spans if _is_call(span, trace))
    assert call_span.parent_id == caller
    assert traced.collector.of_trace(trace)["chat m-a"].parent_id == call_span.span_id


def _is_call(span: ReceivedSpan, trace: str) -> bool:
    return span.trace_id == trace and "InferenceService" in span.name
