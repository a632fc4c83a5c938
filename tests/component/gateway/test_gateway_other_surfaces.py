import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, agent, model, serving
from openai import NotFoundError

from gateway.gateway_health import health_status
from weft.dispatch.fleet import FleetView


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
        assert starting.json["status"] == "starting"
        assert idle.json["status"] == "no_active_model"
        assert idle.error["code"] == "no_runner_available"
        assert healthy.json == {"status": "ok"}
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
        is_reachable = False

    router = Router()
    async with serving(router=router) as gateway:
        away = await gateway.request("GET", "/health")
        router.is_reachable = True
        back = await gateway.request("GET", "/health")
    assert (away.status, away.json["status"]) == (503, "no_router")
    assert away.error["code"] == "service_unavailable"
    assert back.status == 200
