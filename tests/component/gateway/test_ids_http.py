"""Ids of models, agents and routes: taken by every path and body that takes names."""

from dataclasses import replace
from typing import Any

import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, agent, model, serving

from weft.api.registry.v1 import route_pb2
from weft.dispatch.agents import named

MODEL_ID, AGENT_ID, ROUTE_ID = (f"{kind}-0123456789abcdef01234567" for kind in ("model", "agent", "route"))
UNKNOWN = "model-ffffffffffffffffffffffff"


def fleet() -> FixedFleet:
    coder = agent("coder")
    coder.id = AGENT_ID
    route = route_pb2.Route(manifest=route_pb2.RouteManifest(name="summaries", candidates=["tiny"]), id=ROUTE_ID)
    found = FixedFleet.of(replace(model("tiny"), id=MODEL_ID), model("small", pool="chat"))
    return FixedFleet(replace(found.view, agents={"coder": coder}, routes={"summaries": route}))


MESSAGES = [{"role": "user", "content": "hi"}]


def test_id_is_the_name_of_its_resource_and_other_texts_are_unchanged() -> None:
    for given, name in (
        (MODEL_ID, "tiny"),
        (AGENT_ID, "agent/coder"),
        (f"agent/{AGENT_ID}", "agent/coder"),
        (ROUTE_ID, "route/summaries"),
        (UNKNOWN, UNKNOWN),
        ("tiny", "tiny"),
        ("model-7b", "model-7b"),
        ("agent/coder", "agent/coder"),
    ):
        assert named(fleet().view, given) == name


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
async def test_request_by_id_is_dispatched_by_name(path: str, body: dict[str, Any]) -> None:
    async with serving(ScriptedDispatcher(), fleet=fleet()) as gateway:
        await gateway.request("POST", path, {**body, "model": MODEL_ID})
        assert [context.model for context in gateway.dispatcher.contexts] == ["tiny"]
