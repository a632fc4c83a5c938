"""POST /api/v1/apply and PUT: all documents of a body are applied, or none."""

import json

import pytest
from gateway_script import serving
from registry_script import ScriptedRegistry

from gateway.config import GatewayConfig

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


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{", "malformed_request", None),
        (b"[]", "malformed_request", None),
        (b"{}", "invalid_argument", "documents"),
        (encoded({"documents": []}), "invalid_argument", "documents"),
        (encoded({"documents": [AGENT], "dryrun": True}), "invalid_argument", "dryrun"),
        (encoded({"documents": [AGENT], "dry_run": True}), "invalid_argument", "dry_run"),
        (encoded({"documents": [AGENT], "dryRun": "true"}), "invalid_argument", "dryRun"),
        (encoded({"documents": [AGENT, 7]}), "invalid_argument", "documents[1]"),
        (encoded({"documents": [AGENT, {"kind": "model"}]}), "invalid_argument", "documents[1].name"),
        (encoded({"documents": [AGENT | {"kind": "demon"}]}), "invalid_argument", "documents[0].kind"),
        (encoded({"documents": [{"name": "x"}]}), "invalid_argument", "documents[0].kind"),
        (encoded({"documents": [AGENT | {"name": "../x"}]}), "invalid_argument", "documents[0].name"),
        (encoded({"documents": [AGENT | {"systemprompt": "x"}]}), "invalid_argument", "documents[0].systemprompt"),
        (encoded({"documents": [AGENT | {"pool": "p"}]}), "invalid_argument", "documents[0]"),
        (
            encoded({"documents": [AGENT | {"defaultParams": {"temperature": 3}}]}),
            "invalid_argument",
            "documents[0].defaultParams.temperature",
        ),
        (
            encoded({"documents": [{"kind": "model", "name": "m", "contextTokens": -1}]}),
            "invalid_argument",
            "documents[0].contextTokens",
        ),
        (b'{"documents":[{"kind":"model","name":"m","contextTokens":NaN}]}', "malformed_request", None),
        (encoded({"documents": [AGENT, AGENT]}), "invalid_argument", "documents[1].name"),
        (encoded({"documents": [AGENT] * 1001}), "invalid_argument", "documents"),
        (b'{"documents":' + b"[" * 100 + b"]" * 100 + b"}", "malformed_request", None),
    ],
)
async def test_invalid_json_body_is_reported_and_not_applied(body: bytes, code: str, param: str | None) -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        error = (await gateway.request("POST", APPLY, body)).of(400)["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert registry.asked == []


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (TWO_DOCUMENTS + b"---\nkind: model\nname: [x\n", "document 3"),
        (TWO_DOCUMENTS + b"---\nkind: model\nnam: x\n", "document 3"),
        (TWO_DOCUMENTS + b"---\n" + TWO_DOCUMENTS, "has this name already"),
        (b"a: &a [x]\nb: *a\n", "document 1"),
        (b"- just\n- a list\n", "document 1"),
        (b"", "no document"),
        (b"# nothing\n---\n---\n", "no document"),
        (b"\xff\xfe", "UTF-8"),
        (b"kind: model\nname: \x00\n", "document 1"),
        (b"kind: !!python/object/apply:os.system [id]\n", "document 1"),
    ],
)
async def test_invalid_yaml_body_is_reported_and_not_applied(body: bytes, part: str) -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        headers = {**YAML, "Content-Length": str(len(body))}
        error = (await gateway.request("POST", APPLY, body, headers)).of(400)["error"]
    assert part in error["message"]
    assert registry.asked == []


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/yaml", ""]
)
@pytest.mark.parametrize(("method", "path"), [("POST", APPLY), ("PUT", "/api/v1/agents/writer")])
async def test_form_content_types_are_rejected(media_type: str, method: str, path: str) -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        response = await gateway.request(method, path, encoded({"documents": [AGENT]}), {"Content-Type": media_type})
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


@pytest.mark.parametrize(
    ("body", "headers", "code", "param"),
    [
        (encoded(AGENT | {"name": "other"}), {}, "invalid_argument", "name"),
        (encoded({"kind": "model", "name": "writer"}), {}, "invalid_argument", "kind"),
        (encoded([AGENT]), {}, "invalid_argument", "document"),
        (b"{", {}, "malformed_request", None),
        (b'{"kind":"agent","name":"writer","model":"m","x":NaN}', {}, "malformed_request", None),
        (b"kind: model\nname: writer\n", YAML, "invalid_argument", "kind"),
        (b"kind: agent\nname: writer\nmodel: m\n---\nkind: model\nname: m\n", YAML, "malformed_request", None),
    ],
)
async def test_put_accepts_only_the_document_named_in_its_path(
    body: bytes, headers: dict[str, str], code: str, param: str | None
) -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        error = (await gateway.request("PUT", "/api/v1/agents/writer", body, headers)).of(400)["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert registry.asked == []
