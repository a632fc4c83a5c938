"""Scopes that are limited to names, over HTTP: which models a key may ask, see, declare and load."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from batch_stage import Stage, line
from file_script import MemoryBatches, MemoryFiles
from gateway_script import FixedFleet, RunningGateway, ScriptedDispatcher, model, queued, serving
from kit.fleet import runner_view
from kit.keys import Keys, bearer
from registry_script import ScriptedRegistry
from task_script import ScriptedTasks

from gateway.endpoints import gateway_routers
from gateway.gateway_config import GatewayConfig
from gateway.openapi import shown_path
from gateway.routing import needs_of, routes_of
from gateway.runner_api_service import runner_routers
from weft.api.registry.v1.alias_pb2 import Alias, AliasManifest
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.documents.resource_kinds import ResourceKind
from weft.extension import own_extensions
from weft.kernel.values.unknown_names import unknown_field_target, unknown_target

HOLDERS = {
    "everything00": ("inference:create", "models:edit", "operations:create"),
    "tiny00000000": ("inference/tiny:create", "models/tiny:view"),
    "team00000000": ("inference/team-*:create", "models/team-*:edit", "inference/shared:create"),
    "seers0000000": ("models:edit", "secrets:create"),
    "nobody000000": ("telemetry:view",),
}
KEYS = Keys(HOLDERS)
FLEET = FixedFleet.of(model("tiny", pool="pair"), model("small", pool="pair"), model("team-a"), model("shared"))


async def ask(gateway: RunningGateway, key: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
    answer = await gateway.request(method, path, body, key=key)
    return answer.status, answer.json


def why(found: tuple[int, Any]) -> str:
    status, body = found
    assert (status, body["error"].get("code", "permission_denied")) == (403, "permission_denied"), found
    return str(body["error"]["message"])


MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
    ("/tokenize", {"prompt": "hi"}),
    ("/v1/tokenize", {"prompt": "hi"}),
    ("/v1/images/generations", {"prompt": "hi"}),
    ("/v1/audio/speech", {"input": "hi", "voice": "a"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/v1/responses", {"input": "hi"}),
)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_only_requests_within_the_keys_names_are_dispatched_on_every_surface(
    path: str, body: dict[str, Any]
) -> None:
    async with serving(ScriptedDispatcher(), keys=KEYS, fleet=FLEET) as gateway:
        for name in ("small", "pair", "agent/coder", "route/tiny-route", "auto"):
            found = await ask(gateway, "tiny00000000", "POST", path, {**body, "model": name})
            assert why(found) == f"the key lacks the scope inference/{name.rpartition('/')[2]}:create"
        assert gateway.dispatcher.contexts == []
        answer = await gateway.request("POST", path, {**body, "model": "tiny"}, key="tiny00000000")
        assert answer.status != 403
        assert [context.model for context in gateway.dispatcher.contexts] == ["tiny"]


async def test_unknown_model_of_a_task_does_not_tell_names_that_the_key_may_not_see() -> None:
    """A router suggests names that the gateway may see, which it calls for every key."""
    known = ("shared", "small", "team-a", "tiny")
    tasks = ScriptedTasks(failure=unknown_field_target("team-x1y2z3", known, "spec.model"))
    batches = MemoryBatches(line_failure=unknown_field_target("team-x1y2z3", known, "lines[0].spec.model"))
    asked = {"model": "team-x1y2z3", "messages": MESSAGES}
    files = MemoryFiles()
    async with serving(tasks=tasks, files=files, batches=batches, keys=KEYS, fleet=FLEET) as gateway:
        key = "team00000000"
        task = await gateway.request("POST", "/api/v1/inference-tasks", {"body": asked}, key=key)
        waiting = await gateway.request("POST", "/v1/chat/completions", {**asked, "durable": "wait"}, key=key)
        source = await Stage(gateway, files, batches).file(line(body=asked), tenant="ann")
        made = {"input_file_id": source, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await gateway.request("POST", "/v1/batches", made, key=key)).of(200)
    told = [task.error["message"], waiting.error["message"], batch["errors"]["data"][0]["message"]]
    assert [(task.status, task.error["param"]), (waiting.status, waiting.error["param"])] == [
        (404, "body.model"),
        (404, "model"),
    ]
    assert all("there are shared, team-a" in message for message in told), told
    assert not any(name in message for name in ("small", "tiny") for message in told)


async def test_stream_whose_model_is_removed_while_it_waits_does_not_tell_names_that_the_key_may_not_see() -> None:
    script = ScriptedDispatcher([[queued()], gate := asyncio.Event(), unknown_target("team-b", ("small", "tiny"))])
    config = GatewayConfig(port=0, headers_within_seconds=0.01)
    body = {"model": "team-b", "messages": MESSAGES, "stream": True}
    async with serving(script, config=config, keys=KEYS, fleet=FLEET) as gateway, gateway.connection() as (here, there):
        named = f"Authorization: {bearer('team00000000')['Authorization']}\r\nHost:".encode()
        there.write(gateway.post("/v1/chat/completions", body).replace(b"Host:", named, 1))
        await here.readuntil(b": queued")
        gate.set()
        told = await here.readuntil(b"0\r\n\r\n")
    assert b"did you mean team-a?" in told
    assert b"small" not in told


OLLAMA: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/api/chat", {"messages": MESSAGES}),
    ("/api/generate", {"prompt": "hi"}),
    ("/api/embed", {"input": "hi"}),
    ("/api/embeddings", {"prompt": "hi"}),
)


async def test_ollama_requests_are_restricted_by_name_too() -> None:
    async with serving(ScriptedDispatcher(), keys=KEYS, fleet=FLEET) as gateway:
        for path, body in OLLAMA:
            asked = {**body, "model": "small", "stream": False}
            status, found = await ask(gateway, "tiny00000000", "POST", path, asked)
            assert (status, "inference/small:create" in found["error"]) == (403, True)
            await ask(gateway, "tiny00000000", "POST", path, asked | {"model": "tiny"})
        assert [context.model for context in gateway.dispatcher.contexts] == ["tiny"] * len(OLLAMA)


async def test_agent_is_authorized_by_its_own_name() -> None:
    async with serving(ScriptedDispatcher(), keys=KEYS, fleet=FLEET) as gateway:
        body = {"model": "agent/team-coder", "messages": MESSAGES}
        assert (await ask(gateway, "team00000000", "POST", "/v1/chat/completions", body))[0] == 200
        assert [context.model for context in gateway.dispatcher.contexts] == ["agent/team-coder"]


async def test_model_lists_are_filtered_by_the_key() -> None:
    async with serving(keys=KEYS, fleet=FLEET) as gateway:
        everyone = await ask(gateway, "everything00", "GET", "/v1/models")
        assert [entry["id"] for entry in everyone[1]["data"]] == ["pair", "shared", "team-a"]
        team = await ask(gateway, "team00000000", "GET", "/v1/models")
        assert [entry["id"] for entry in team[1]["data"]] == ["team-a"]
        status, tiny = await ask(gateway, "tiny00000000", "GET", "/v1/models/tiny")
        assert (status, tiny["meta"]["members"]) == (200, ["tiny"]), "small is in the pool, and is not named"
        for name in ("small", "pair", "not-there"):
            found = await ask(gateway, "tiny00000000", "GET", f"/v1/models/{name}")
            assert why(found) == f"the key lacks the scope models/{name}:view"
        assert (await ask(gateway, "nobody000000", "GET", "/v1/models"))[0] == 403
        assert await ask(gateway, "tiny00000000", "GET", "/v1/audio/voices?model=tiny") == (200, {"voices": []})
        assert (await ask(gateway, "tiny00000000", "GET", "/v1/audio/voices?model=shared"))[0] == 403


async def test_ollama_lists_are_filtered_by_the_key() -> None:
    async with serving(keys=KEYS, fleet=FLEET) as gateway:
        for key, names in (("everything00", ["pair", "shared", "team-a"]), ("team00000000", ["team-a"])):
            _, found = await ask(gateway, key, "GET", "/api/tags")
            assert [each["name"] for each in found["models"]] == names
        status, tiny = await ask(gateway, "tiny00000000", "POST", "/api/show", {"model": "tiny:latest"})
        assert (status, tiny["meta"]["members"]) == (200, ["tiny"]), "small is in the pool, and is not named"
        for name in ("small", "pair", "not-there"):
            status, found = await ask(gateway, "tiny00000000", "POST", "/api/show", {"model": name})
            assert (status, f"models/{name}:view" in found["error"]) == (403, True)
        assert (await ask(gateway, "tiny00000000", "GET", "/api/ps")) == (200, {"models": []})
        assert (await ask(gateway, "nobody000000", "GET", "/api/tags"))[0] == 403


async def test_resources_are_listed_and_read_by_the_keys_names() -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry, keys=KEYS, fleet=FLEET) as gateway:
        for plural in ("models", "agents", "pools", "routes"):
            assert (await ask(gateway, "tiny00000000", "GET", f"/api/v1/{plural}"))[0] == 200
        assert [asked[4:] for asked in registry.asked] == [(("tiny",),)] * 4
        await ask(gateway, "everything00", "GET", "/api/v1/models")
        assert registry.asked[-1][4:] == ()
        registry.asked.clear()
        for path, name in (
            ("models/small", "small"),
            ("models/small/members", "small"),
            ("agents/coder", "coder"),
            ("pools/chat", "chat"),
            ("routes/summaries", "summaries"),
        ):
            found = await ask(gateway, "tiny00000000", "GET", f"/api/v1/{path}")
            assert why(found) == f"the key lacks the scope models/{name}:view"
        assert registry.asked == []
        assert (await ask(gateway, "tiny00000000", "GET", "/api/v1/models/tiny"))[0] == 200
        _, members = await ask(gateway, "tiny00000000", "GET", "/api/v1/models/tiny/members")
        assert [member["name"] for member in members["members"]] == ["tiny"]


def a_model(name: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "model", "name": name, "operations": ["chat"], **fields}


@pytest.mark.parametrize(
    ("document", "missing"),
    [
        (a_model("tiny"), "models/tiny:edit"),
        (a_model("team-b", poolName="chat"), "models/chat:edit"),
        ({"kind": "agent", "name": "coder", "model": "team-a"}, "models/coder:edit"),
        ({"kind": "agent", "name": "team-spy", "model": "tiny"}, "inference/tiny:create"),
        ({"kind": "route", "name": "team-way", "candidates": ["team-a", "tiny"]}, "inference/tiny:create"),
    ],
)
async def test_names_outside_the_key_cannot_be_declared_put_or_deleted(document: dict[str, Any], missing: str) -> None:
    registry = ScriptedRegistry()
    kind, name = ResourceKind(document["kind"]), document["name"]
    async with serving(registry=registry, keys=KEYS, fleet=FLEET) as gateway:
        documents = {"documents": [a_model("team-c"), document]}
        assert missing in why(await ask(gateway, "team00000000", "POST", "/api/v1/apply", documents))
        assert missing in why(await ask(gateway, "team00000000", "PUT", f"/api/v1/{kind.plural}/{name}", document))
        if not name.startswith("team-"):
            assert missing in why(await ask(gateway, "team00000000", "DELETE", f"/api/v1/{kind.plural}/{name}"))
        assert registry.asked == []
        # The negative control: the same with the scope for everything.
        assert (await ask(gateway, "everything00", "POST", "/api/v1/apply", documents))[0] == 200
        assert [(author.name, author.own_only) for author in registry.authors] == [("key:everything00", False)]


async def test_team_declares_and_deletes_its_own_names_as_their_owner() -> None:
    registry = ScriptedRegistry()
    documents = [
        a_model("team-b", poolName="team-pool"),
        {"kind": "agent", "name": "team-coder", "model": "shared"},
        {"kind": "route", "name": "team-way", "candidates": ["team-b", "shared"]},
    ]
    async with serving(registry=registry, keys=KEYS, fleet=FLEET) as gateway:
        found = await ask(gateway, "team00000000", "POST", "/api/v1/apply", {"documents": documents})
        assert found[0] == 200, found
        assert [(author.name, author.own_only) for author in registry.authors] == [("key:team00000000", True)]
        assert (await ask(gateway, "team00000000", "DELETE", "/api/v1/models/team-b"))[0] == 204


async def test_key_does_not_end_that_a_resource_answers_for_other_names() -> None:
    fleet = FixedFleet.of(model("team-m", pool="prod"), model("team-a"))
    redirect = Alias(manifest=AliasManifest(name="team-x", pattern="prod-*", target="team-a"))
    fleet = FixedFleet(replace(fleet.view, aliases={"team-x": redirect}))
    alias = {"kind": "alias", "name": "team-x", "target": "team-a"}
    registry = ScriptedRegistry()
    async with serving(registry=registry, keys=KEYS, fleet=fleet) as gateway:
        for path, document, missing in (
            ("aliases/team-x", alias, "models/prod-*:edit"),
            ("models/team-m", a_model("team-m"), "models/prod:edit"),
        ):
            assert missing in why(await ask(gateway, "team00000000", "PUT", f"/api/v1/{path}", document))
            assert missing in why(await ask(gateway, "team00000000", "DELETE", f"/api/v1/{path}"))
        assert registry.asked == []


async def test_delete_that_unloads_or_removes_needs_the_scope_for_operations() -> None:
    instance = InstanceState(model="team-b", added_source="hf:acme/tiny")
    fleet = FixedFleet.of(model("team-a"), model("team-b"))
    fleet = FixedFleet(replace(fleet.view, runners={"r1": runner_view("r1", instances={"team-b": instance})}))
    registry = ScriptedRegistry()
    async with serving(registry=registry, keys=KEYS, fleet=fleet) as gateway:
        for path in ("team-a?force=true", "team-b"):
            missing = f"operations/{path.partition('?')[0]}:create"
            assert missing in why(await ask(gateway, "team00000000", "DELETE", f"/api/v1/models/{path}"))
            assert (await ask(gateway, "everything00", "DELETE", f"/api/v1/models/{path}"))[0] == 204
        assert (await ask(gateway, "team00000000", "DELETE", "/api/v1/models/team-a"))[0] == 204


async def test_secret_reference_needs_the_secret_scope() -> None:
    registry = ScriptedRegistry()
    provider = {"url": "https://api.example.com/v1", "apiKeyRef": "secret/example-key"}
    document = a_model("team-b", provider=provider)
    calls = (("POST", "/api/v1/apply", {"documents": [document]}), ("PUT", "/api/v1/models/team-b", document))
    async with serving(registry=registry, keys=KEYS, fleet=FLEET) as gateway:
        for method, path, body in calls:
            found = await ask(gateway, "everything00", method, path, body)
            assert why(found).startswith("the key lacks the scope secrets:create: model/team-b: provider.api_key_ref")
        assert registry.asked == []
        # Without a secret, or with the scope for secrets, it may.
        bare = a_model("team-b", provider={"url": "https://api.example.com/v1"})
        assert (await ask(gateway, "everything00", "PUT", "/api/v1/models/team-b", bare))[0] in (200, 201)
        for method, path, body in calls:
            assert (await ask(gateway, "seers0000000", method, path, body))[0] in (200, 201)


WAKE = {"byMesh": {"type": "http", "url": "http://127.0.0.1:9/internal"}}


@pytest.mark.parametrize(
    "document",
    [
        a_model("team-b", provider={"url": "https://api.example.com/v1"}),
        a_model("team-b", wake=WAKE),
        {"kind": "agent", "name": "team-spy", "model": "shared", "tools": ["read_note"]},
    ],
)
async def test_right_to_a_name_does_not_cover_addresses_and_tools(document: dict[str, Any]) -> None:
    registry = ScriptedRegistry()
    path = f"/api/v1/{document['kind']}s/{document['name']}"
    several = {"documents": [a_model("team-a"), document]}
    calls = (("POST", "/api/v1/apply", several), ("PUT", path, document))
    async with serving(registry=registry, keys=KEYS, fleet=FLEET) as gateway:
        for method, target, body in calls:
            found = await ask(gateway, "team00000000", method, target, body)
            assert why(found).startswith("the key lacks the scope models:edit: ")
        assert registry.asked == []


def test_endpoints_accepting_a_name_limited_scope_are_listed() -> None:
    routes = routes_of((*gateway_routers(own_extensions()), *runner_routers(own_extensions())))
    named = [route for route in routes if needs_of(route).by_name and needs_of(route).access is not None]
    found = {(method, shown_path(route.path)) for route in named for method in (route.methods or set()) - {"HEAD"}}
    uses = {("POST", path) for path, _ in (*REQUESTS, *OLLAMA)} | {
        ("POST", path)
        for path in (
            "/v1/images/edits",
            "/v1/images/variations",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/v1/batches",
            "/v1/conversations",
            "/v1/conversations/{conversation_id}/items",
            "/v1/files",
            "/api/v1/inference-tasks",
            "/api/v1/pdf-text",
        )
    }
    entries = ("", "/{model}", "/agent/{agent}", "/route/{route}", "/workflow/{workflow}")
    reads = {("GET", f"/v1/models{rest}") for rest in entries}
    kinds = ("models", "agents", "pools", "routes", "aliases", "workflows")
    reads |= {("GET", f"/api/v1/{kind}{rest}") for kind in kinds for rest in ("", "/{name}")}
    edits = {(method, f"/api/v1/{kind}/{{name}}") for method in ("PUT", "DELETE") for kind in kinds if kind != "pools"}
    admin = {("POST", f"/v1/admin/{path}") for path in ("models/{name}/load", "models/{name}/unload", "cache/flush")}
    others = {("GET", "/api/v1/models/{name}/members"), ("POST", "/api/v1/apply"), ("GET", "/openapi.json")}
    others |= {("GET", "/v1/audio/voices"), ("POST", "/v1/quotes"), ("POST", "/mcp")}
    others |= {("GET", "/v1/responses"), *(("POST", f"/v1/responses/{path}") for path in ("compact", "input_tokens"))}
    others |= {("GET", "/api/tags"), ("GET", "/api/ps"), ("POST", "/api/show")}
    assert found == uses | reads | edits | admin | others
