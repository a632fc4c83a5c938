"""Aliases over HTTP: taken by every API that takes a model, and listed under their own names."""

from dataclasses import replace

import pytest
from gateway_script import FixedFleet, ScriptedDispatcher, model, serving

from weft.api.registry.v1.alias_pb2 import Alias, AliasManifest

MESSAGES = [{"role": "user", "content": "hi"}]


def fleet() -> FixedFleet:
    aliases = {
        name: Alias(manifest=AliasManifest(name=name, pattern=pattern, target=target, tenant=tenant))
        for name, pattern, target, tenant in (
            ("claude", "claude-*", "tiny", ""),
            ("gpt-4o", "gpt-4o", "tiny", ""),
            ("own", "gpt-4o", "small", "team-a"),
            ("taken", "small", "tiny", ""),
        )
    }
    return FixedFleet(replace(FixedFleet.of(model("tiny"), model("small")).view, aliases=aliases))


async def test_ollama_client_can_append_a_tag_to_an_alias() -> None:
    async with serving(ScriptedDispatcher(), fleet=fleet()) as gateway:
        body = {"model": "gpt-4o:latest", "messages": MESSAGES, "stream": False}
        await gateway.request("POST", "/api/chat", body)
        assert [(each.model, each.asked_model) for each in gateway.dispatcher.contexts] == [("tiny", "gpt-4o")]


@pytest.mark.parametrize(("tenant", "meant"), [("team-b", "tiny"), ("team-a", "small")])
async def test_lists_include_the_exact_aliases_of_the_caller_but_no_patterns(tenant: str, meant: str) -> None:
    async with serving(fleet=fleet()) as gateway:
        headers = {"x-tenant-id": tenant}
        listed = (await gateway.request("GET", "/v1/models", headers=headers)).json["data"]
        found = {entry["id"]: entry["meta"].get("alias_of") for entry in listed}
        assert found == {"small": None, "tiny": None, "gpt-4o": meant}
        tags = (await gateway.request("GET", "/api/tags", headers=headers)).json["models"]
        assert {each["name"] for each in tags} == set(found)


async def test_name_matched_by_a_pattern_is_shown_under_that_name() -> None:
    async with serving(fleet=fleet()) as gateway:
        shown = (await gateway.request("GET", "/v1/models/claude-opus-4")).json
        assert (shown["id"], shown["meta"]["alias_of"]) == ("claude-opus-4", "tiny")
        assert (await gateway.request("GET", "/v1/models/gpt-5")).status == 404
