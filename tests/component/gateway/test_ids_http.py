"""Ids of models, agents and routes: taken by every path and body that takes names."""

import json
from dataclasses import replace
from typing import Any

import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, agent, model, serving
from registry_script import ScriptedRegistry

from weft.api.registry.v1 import route_pb2
from weft.dispatch.agents import named
from weft.documents.resource_kinds import ResourceKind

MODEL_ID, AGENT_ID, ROUTE_ID = (f"{kind}-0123456789abcdef01234567" for kind in ("model", "agent", "route"))
UNKNOWN = "model-ffffffffffffffffffffffff"


def fleet() -> FixedFleet:
    coder = agent("coder")
    coder.id = AGENT_ID
    route = route_pb2.Route(manifest=route_pb2.RouteManifest(name="summaries", candidates=["tiny"]), id=ROUTE_ID)
    found = FixedFleet.of(replace(model("tiny"), id=MODEL_ID), model("small", pool="chat"))
    return FixedFleet(replace(found.view, agents={"coder": coder}, routes={"summaries": route}))


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (MODEL_ID, "tiny"),
        (AGENT_ID, "agent/coder"),
        (f"agent/{AGENT_ID}", "agent/coder"),
        (ROUTE_ID, "route/summaries"),
        (UNKNOWN, UNKNOWN),
        ("tiny", "tiny"),
        ("model-7b", "model-7b"),
        ("agent/coder", "agent/coder"),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/tokenize", {"prompt": "hi"}),
        ("/v1/images/generations", {"prompt": "hi"}),
        ("/v1/audio/speech", {"input": "hi", "voice": "a"}),
    ],
)
async def test_request_by_id_is_dispatched_by_name(path: str, body: dict[str, Any], given: str, name: str) -> None:
    assert named(fleet().view, given) == name
    async with serving(ScriptedDispatcher(), fleet=fleet()) as gateway:
        await gateway.request("POST", path, json.dumps({**body, "model": given}).encode())
        assert [context.model for context in gateway.dispatcher.contexts] == [name]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (f"/v1/models/{MODEL_ID}", "tiny"),
        (f"/v1/models/agent/{AGENT_ID}", "agent/coder"),
        (f"/v1/models/route/{ROUTE_ID}", "route/summaries"),
    ],
)
async def test_openai_model_endpoint_accepts_an_id(path: str, shown: str) -> None:
    async with serving(fleet=fleet()) as gateway:
        answer = await gateway.request("GET", path)
        assert (answer.status, json.loads(answer.body)["id"]) == (200, shown)
        assert (await gateway.request("GET", f"/v1/models/{UNKNOWN}")).status == 404


@pytest.mark.parametrize(
    ("method", "path", "asked"),
    [
        ("GET", f"/api/v1/models/{MODEL_ID}", ("get", ResourceKind.MODEL, "tiny")),
        ("GET", f"/api/v1/models/{MODEL_ID}/members", ("members", "tiny")),
        ("GET", f"/api/v1/agents/{AGENT_ID}", ("get", ResourceKind.AGENT, "coder")),
        ("GET", f"/api/v1/routes/{ROUTE_ID}", ("get", ResourceKind.ROUTE, "summaries")),
        ("DELETE", f"/api/v1/models/{MODEL_ID}", ("delete", ResourceKind.MODEL, "tiny")),
        ("DELETE", f"/api/v1/agents/{AGENT_ID}", ("delete", ResourceKind.AGENT, "coder")),
        ("DELETE", f"/api/v1/routes/{ROUTE_ID}", ("delete", ResourceKind.ROUTE, "summaries")),
    ],
)
async def test_resource_is_read_and_deleted_by_id(method: str, path: str, asked: tuple[object, ...]) -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry, fleet=fleet()) as gateway:
        assert (await gateway.request(method, path)).status in (200, 204)
    assert registry.asked[0][: len(asked)] == asked


async def test_events_can_be_filtered_by_id() -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry, fleet=fleet()) as gateway:
        assert (await gateway.request("GET", f"/api/v1/events?kind=model&name={MODEL_ID}")).status == 200
    wanted: Any = registry.asked[0][1]
    assert wanted.name == "tiny"
