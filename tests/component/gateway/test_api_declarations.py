"""POST /api/v1/apply and PUT: all documents of a body are applied, or none."""

import json

import pytest
from gateway_script import serving
from registry_script import ScriptedRegistry

from gateway.gateway_config import GatewayConfig

APPLY = "/api/v1/apply"
YAML = {"Content-Type": "application/yaml"}
AGENT = {"kind": "agent", "name": "writer", "model": "tiny"}
TWO_DOCUMENTS = b"""kind: model
name: tiny
poolName: chat
runner: titan
---
kind: agent
name: writer
model: tiny
systemPrompt: |
  Write.
  Well.
"""


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


async def test_invalid_json_body_is_reported_and_not_applied() -> None:
    """Wrong fields of a document: `tests/unit/resources` and `tests/baseline`."""
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        for body, param in (
            (b"{}", "documents"),
            (encoded({"documents": [AGENT], "dryrun": True}), "dryrun"),
            (encoded({"documents": [AGENT], "dry_run": True}), "dry_run"),
            (encoded({"documents": [AGENT], "dryRun": "true"}), "dryRun"),
            (encoded({"documents": [AGENT, 7]}), "documents[1]"),
            (encoded({"documents": [AGENT, {"kind": "model"}]}), "documents[1].name"),
            (encoded({"documents": [AGENT | {"pool": "p"}]}), "documents[0]"),
            (encoded({"documents": [AGENT, AGENT]}), "documents[1].name"),
            (encoded({"documents": [AGENT] * 1001}), "documents"),
            (b'{"documents":[{"kind":"model","name":"m","contextTokens":NaN}]}', None),
            (b'{"documents":' + b"[" * 100 + b"]" * 100 + b"}", None),
        ):
            error = (await gateway.request("POST", APPLY, body)).of(400)["error"]
            assert (error["code"], error["param"]) == ("invalid_argument" if param else "malformed_request", param)
    assert registry.asked == []


async def test_invalid_yaml_body_is_reported_and_not_applied() -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        for body, part in (
            (TWO_DOCUMENTS + b"---\nkind: model\nnam: x\n", "document 3"),
            (TWO_DOCUMENTS + b"---\n" + TWO_DOCUMENTS, "has this name already"),
            (b"", "no document"),
            (b"# nothing\n---\n---\n", "no document"),
            (b"\xff\xfe", "UTF-8"),
            (b"kind: model\nname: \x00\n", "document 1"),
        ):
            headers = {**YAML, "Content-Length": str(len(body))}
            assert part in (await gateway.request("POST", APPLY, body, headers)).of(400)["error"]["message"]
    assert registry.asked == []


@pytest.mark.parametrize(("method", "path"), [("POST", APPLY), ("PUT", "/api/v1/agents/writer")])
async def test_form_content_types_are_rejected(method: str, path: str) -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/yaml", ""):
            headers = {"Content-Type": media_type}
            response = await gateway.request(method, path, encoded({"documents": [AGENT]}), headers)
            assert "application/yaml" in response.of(400)["error"]["message"]
    assert registry.asked == []


async def test_body_over_the_limit_returns_413() -> None:
    async with serving(config=GatewayConfig(port=0, max_body_bytes=1000)) as gateway:
        response = await gateway.request("POST", APPLY, b"#" * 1001, YAML)
    assert response.of(413)["error"]["code"] == "request_too_large"


async def test_json_apply_reads_options_from_its_body() -> None:
    async with serving() as gateway:
        response = await gateway.request("POST", f"{APPLY}?dryRun=1", encoded({"documents": [AGENT]}))
    assert response.of(400)["error"]["param"] == "dryRun"


async def test_first_put_creates_and_a_repeat_changes_nothing() -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        created = await gateway.request("PUT", "/api/v1/agents/writer", encoded(AGENT))
        rehearsed = await gateway.request("PUT", "/api/v1/agents/writer?dryRun=1", encoded(AGENT))
        same = await gateway.request(
            "PUT", "/api/v1/models/tiny", b"name: tiny\npoolName: chat\nrunner: titan\nkind: model\n", YAML
        )
        kindless = await gateway.request("PUT", "/api/v1/models/tiny", encoded({"name": "tiny"}))
    assert [response.status for response in (created, rehearsed, same, kindless)] == [201, 200, 200, 200]
    outcomes = [response.json["results"][0]["outcome"] for response in (created, same, kindless)]
    assert outcomes == ["created", "unchanged", "configured"]
    assert registry.asked[1] == ("apply", ["agent/writer"], True, False)


async def test_put_accepts_only_the_document_named_in_its_path() -> None:
    registry = ScriptedRegistry()
    two = b"kind: agent\nname: writer\nmodel: m\n---\nkind: model\nname: m\n"
    async with serving(registry=registry) as gateway:
        for body, headers, code, param in (
            (encoded(AGENT | {"name": "other"}), {}, "invalid_argument", "name"),
            (encoded({"kind": "model", "name": "writer"}), {}, "invalid_argument", "kind"),
            (encoded([AGENT]), {}, "invalid_argument", "document"),
            (b'{"kind":"agent","name":"writer","model":"m","x":NaN}', {}, "malformed_request", None),
            (b"kind: model\nname: writer\n", YAML, "invalid_argument", "kind"),
            (two, YAML, "malformed_request", None),
        ):
            error = (await gateway.request("PUT", "/api/v1/agents/writer", body, headers)).of(400)["error"]
            assert (error["code"], error["param"]) == (code, param)
    assert registry.asked == []
