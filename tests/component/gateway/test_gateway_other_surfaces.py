import json

import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, Step, agent, delta, finished, model, serving, usage
from openai import NotFoundError

from gateway.health import health_status
from weft.api.common.v1 import completion_pb2, embedding_pb2, event_pb2
from weft.dispatch.fleet import FleetView

POEM = [[delta("roses"), delta(" are")], [delta(" red", finish="LENGTH"), usage(), finished()]]


async def test_text_completion_returns_one_text() -> None:
    async with serving(ScriptedDispatcher(list(POEM))) as gateway:
        answer = await gateway.sdk.completions.create(model="tiny", prompt="A poem:", max_tokens=3, suffix="!")
        payload = gateway.dispatcher.payloads[0]
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("roses are red", "length")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 10
    assert isinstance(payload, completion_pb2.CompletionPayload)
    assert (payload.prompts[0].text, payload.suffix, payload.sampling.max_tokens) == ("A poem:", "!", 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_legacy_logprobs_are_four_lists(stream: bool) -> None:
    tokens = [event_pb2.TokenLogprob(token="ab", logprob=-1.0), event_pb2.TokenLogprob(token="c", logprob=-2.0)]
    tokens[0].top.add(token="ab", logprob=-1.0)
    steps: list[Step] = [[delta("abc", logprobs=tokens)], [delta(finish="STOP"), finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        if stream:
            chunks = await gateway.sdk.completions.create(model="tiny", prompt="x", logprobs=1, stream=True)
            logprobs = (await anext(aiter(chunks))).choices[0].logprobs
            await chunks.close()
        else:
            answer = await gateway.sdk.completions.create(model="tiny", prompt="x", logprobs=1)
            logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["ab", "c"]
    assert logprobs.token_logprobs == [-1.0, -2.0]
    assert logprobs.top_logprobs == [{"ab": -1.0}, {}]
    assert logprobs.text_offset == [0, 2]


async def test_each_prompt_times_n_yields_a_choice() -> None:
    steps: list[Step] = [[delta(f"t{index}", index=index, finish="STOP") for index in range(4)], [finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        answer = await gateway.sdk.completions.create(model="tiny", prompt=[[1, 2], [3]], n=2)
        payload = gateway.dispatcher.payloads[0]
    assert [choice.text for choice in answer.choices] == ["t0", "t1", "t2", "t3"]
    assert isinstance(payload, completion_pb2.CompletionPayload)
    assert [list(prompt.tokens.ids) for prompt in payload.prompts] == [[1, 2], [3]]


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_embeddings_support_both_encodings(encoding: str) -> None:
    async with serving(ScriptedDispatcher(vectors=[[0.5, -1.25], [2.0, 0.0]])) as gateway:
        raw = await gateway.sdk.embeddings.with_raw_response.create(
            model="tiny",
            input=["one", "two"],
            encoding_format=encoding,  # type: ignore[arg-type]
            dimensions=2,
        )
        answer, payload = raw.parse(), gateway.dispatcher.payloads[0]
    vectors = [entry.embedding for entry in answer.data]
    if encoding == "base64":
        assert json.loads(raw.text)["data"][0]["embedding"] == "AAAAPwAAoL8="
    else:
        assert vectors == [[0.5, -1.25], [2.0, 0.0]]
    assert answer.usage.prompt_tokens == 7
    assert raw.headers["x-queue-wait-ms"] == "150"
    assert isinstance(payload, embedding_pb2.EmbeddingPayload)
    assert ([entry.text for entry in payload.inputs], payload.dimensions) == (["one", "two"], 2)


async def test_sdk_default_encoding_is_supported() -> None:
    async with serving(ScriptedDispatcher(vectors=[[0.5, -1.25]])) as gateway:
        answer = await gateway.sdk.embeddings.create(model="tiny", input="one")
    assert answer.data[0].embedding == [0.5, -1.25]


async def test_sleeping_models_and_agents_are_listed() -> None:
    fleet = FixedFleet.of(
        model("asleep", active=False, hibernating=True),
        model("tiny"),
        model("gone", active=False),
        agents=[agent("coder"), agent("dreamer", "asleep"), agent("lost", "gone"), agent("stray", "nowhere")],
    )
    async with serving(fleet=fleet) as gateway:
        page = await gateway.sdk.models.list()
        coder = await gateway.sdk.models.retrieve("agent/coder")
        with pytest.raises(NotFoundError) as caught:
            await gateway.sdk.models.retrieve("agent/lost")
        encoded = await gateway.request("GET", "/v1/models/agent%2Fcoder")
    entries = {entry.id: entry.model_dump() for entry in page.data}
    assert list(entries) == ["asleep", "tiny", "agent/coder", "agent/dreamer"]
    assert entries["asleep"]["meta"]["status"] == "hibernating"
    assert entries["agent/dreamer"]["meta"]["status"] == "hibernating"
    assert coder.model_dump() == entries["agent/coder"]
    assert (coder.owned_by, coder.created) == ("weft", 1_700_000_001)
    assert entries["agent/coder"]["meta"] == {
        "agent": True,
        "model": "tiny",
        "description": "Reviews code",
        "status": "active",
        "context_tokens": 4096,
        "operations": ["chat"],
        "members": ["tiny"],
        "remote": False,
    }
    assert caught.value.code == "model_not_found"
    assert encoded.status == 200


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_reflects_the_fleet(method: str) -> None:
    fleet = FixedFleet(FleetView())
    async with serving(fleet=fleet) as gateway:
        starting = await gateway.request(method, "/health")
        fleet.view = FixedFleet.of(model("tiny", active=False)).view
        idle = await gateway.request(method, "/health")
        fleet.view = FixedFleet.of(model("tiny")).view
        healthy = await gateway.request(method, "/health")
    assert (starting.status, idle.status, healthy.status) == (503, 503, 200)
    fleet.view = FixedFleet.of(model("tiny", active=False, hibernating=True)).view
    assert health_status(fleet.view) == "ok"
    fleet.view = FixedFleet.of(model("tiny", active=False, failed=True)).view
    assert health_status(fleet.view) == "no_active_model"
    assert starting.headers["retry-after"] == "1"
    if method == "GET":
        assert json.loads(starting.body)["status"] == "starting"
        assert json.loads(idle.body)["status"] == "no_active_model"
        assert json.loads(idle.body)["error"]["code"] == "no_runner_available"
        assert json.loads(healthy.body) == {"status": "ok"}
    else:
        assert starting.body == idle.body == healthy.body == b""


async def test_metrics_count_requests_and_tokens_without_caller_supplied_labels() -> None:
    async with serving() as gateway:
        stream = await gateway.sdk.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            extra_headers={"X-Tenant-ID": "acme", "X-Request-Id": "request-of-mine"},
        )
        async for _ in stream:
            pass
        await gateway.sdk.chat.completions.create(model="invented", messages=[{"role": "user", "content": "hi"}])
        await gateway.request("POST", "/v1/chat/completions", b"{")
        await gateway.exchange(b"nonsense\r\n\r\n")
        metrics = (await gateway.request("GET", "/metrics")).body.decode()
        probe = await gateway.request("HEAD", "/metrics")
    assert 'weft_gateway_requests_total{code="200",model="chat",reason="completed",surface="chat"} 1.0' in metrics
    assert 'weft_gateway_requests_total{code="200",model="unknown",reason="completed",surface="chat"} 1.0' in metrics
    assert 'code="400",model="unknown",reason="malformed_request"' in metrics
    assert 'code="400",model="unknown",reason="refused"' in metrics
    assert 'weft_gateway_tokens_total{kind="prompt",model="chat"} 7.0' in metrics
    assert 'weft_gateway_time_to_first_token_seconds_count{model="chat",surface="chat"} 1.0' in metrics
    assert "weft_gateway_active_streams 0.0" in metrics
    assert all(word not in metrics for word in ("acme", "request-of-mine", "invented"))
    assert probe.status == 200


async def test_health_reports_a_missing_router() -> None:
    class Router:
        is_there = False

    router = Router()
    async with serving(router=router) as gateway:
        away = await gateway.request("GET", "/health")
        router.is_there = True
        back = await gateway.request("GET", "/health")
    assert (away.status, json.loads(away.body)["status"]) == (503, "no_router")
    assert json.loads(away.body)["error"]["code"] == "service_unavailable"
    assert back.status == 200
