"""POST /api/v1/apply and PUT: all documents of a body are applied, or none."""

import json

import pytest
from gateway_script import RawResponse, serving
from registry_script import ScriptedRegistry

from gateway.config import GatewayConfig
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason

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


def error_of(response: RawResponse, status: int) -> dict[str, str]:
    assert response.status == status, response
    error: dict[str, str] = json.loads(response.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_apply_reports_an_outcome_per_document() -> None:
    registry = ScriptedRegistry()
    documents = [
        AGENT,
        {"kind": "model", "name": "tiny", "poolName": "other"},
        {"kind": "runner", "name": "titan", "status": {"state": "active", "whatever": 1}},
    ]
    async with serving(registry=registry) as gateway:
        response = await gateway.request("POST", APPLY, encoded({"documents": documents, "adopt": True}))
    assert response.status == 200
    answer = json.loads(response.body)
    assert (answer["kind"], answer["dryRun"]) == ("ApplyAnswer", False)
    outcomes = [(result["kind"], result["name"], result["outcome"]) for result in answer["results"]]
    assert outcomes == [
        ("agent", "writer", "created"),
        ("model", "tiny", "configured"),
        ("runner", "titan", "unchanged"),
    ]
    assert "before" not in answer["results"][0]
    assert answer["results"][1]["before"]["poolName"] == "chat"
    assert answer["results"][1]["after"]["poolName"] == "other"
    assert registry.asked == [("apply", ["agent/writer", "model/tiny", "runner/titan"], False, True)]


@pytest.mark.parametrize(
    ("query", "dry_run", "adopt"),
    [("", False, False), ("?dryRun=true", True, False), ("?dryRun=0&adopt=1", False, True)],
)
async def test_yaml_stream_is_applied_as_one_request(query: str, dry_run: bool, adopt: bool) -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        response = await gateway.request("POST", APPLY + query, TWO_DOCUMENTS, YAML)
    assert response.status == 200
    answer = json.loads(response.body)
    assert answer["dryRun"] is dry_run
    assert answer["results"][1]["after"]["systemPrompt"] == "Write.\nWell.\n"
    assert registry.asked == [("apply", ["model/tiny", "agent/writer"], dry_run, adopt)]


async def test_list_response_can_be_applied_again() -> None:
    async with serving() as gateway:
        listed = json.loads((await gateway.request("GET", "/api/v1/models")).body)
        response = await gateway.request("POST", APPLY, encoded({"documents": listed["items"]}))
    outcomes = {result["outcome"] for result in json.loads(response.body)["results"]}
    assert outcomes == {"unchanged"}


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
        error = error_of(await gateway.request("POST", APPLY, body), 400)
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
        error = error_of(await gateway.request("POST", APPLY, body, headers), 400)
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
    assert "application/yaml" in error_of(response, 400)["message"]
    assert registry.asked == []


async def test_body_over_the_limit_returns_413() -> None:
    async with serving(config=GatewayConfig(port=0, max_body_bytes=1000)) as gateway:
        response = await gateway.request("POST", APPLY, b"#" * 1001, YAML)
    assert error_of(response, 413)["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("query", "param"), [("?dryrun=1", "dryrun"), ("?dryRun=yes", "dryRun"), ("?adopt=1&adopt=0", "adopt")]
)
@pytest.mark.parametrize(("method", "path"), [("POST", APPLY), ("PUT", "/api/v1/agents/writer")])
async def test_misspelled_option_changes_nothing(query: str, param: str, method: str, path: str) -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        error = error_of(
            await gateway.request(method, path + query, b"kind: agent\nname: writer\nmodel: m\n", YAML), 400
        )
    assert error["param"] == param
    assert registry.asked == []


async def test_json_apply_reads_options_from_its_body() -> None:
    async with serving() as gateway:
        response = await gateway.request("POST", f"{APPLY}?dryRun=1", encoded({"documents": [AGENT]}))
    assert error_of(response, 400)["param"] == "dryRun"


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (WeftError(Reason.ALREADY_EXISTS, "writer is a runner already"), 409, "already_exists"),
        (WeftError(Reason.MODEL_NOT_FOUND, "agent writer: no model is called tiny"), 404, "model_not_found"),
        (FieldError("documents[0].name", "is taken"), 400, "invalid_argument"),
        (WeftError(Reason.TOO_MANY_RESOURCES, "there are 100,000 models"), 429, "too_many_resources"),
        (WeftError(Reason.SERVICE_UNAVAILABLE, "the registry cannot be reached"), 503, "service_unavailable"),
    ],
)
async def test_registry_error_has_its_status(failure: WeftError, status: int, code: str) -> None:
    async with serving(registry=ScriptedRegistry(failure=failure)) as gateway:
        applied = await gateway.request("POST", APPLY, encoded({"documents": [AGENT]}))
        put = await gateway.request("PUT", "/api/v1/agents/writer", encoded(AGENT))
    for response, message in ((applied, failure.message), (put, failure.message.removeprefix("documents[0]."))):
        error = error_of(response, status)
        assert (error["code"], error["message"]) == (code, message)
        assert ("retry-after" in response.headers) is (status in {429, 503})


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
    outcomes = [json.loads(response.body)["results"][0]["outcome"] for response in (created, same, kindless)]
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
        error = error_of(await gateway.request("PUT", "/api/v1/agents/writer", body, headers), 400)
    assert (error["code"], error["param"]) == (code, param)
    assert registry.asked == []


@pytest.mark.parametrize("path", ["/api/v1/runners/titan", "/api/v1/pools/chat"])
async def test_put_of_runners_and_pools_is_rejected(path: str) -> None:
    async with serving() as gateway:
        error_of(await gateway.request("PUT", path, encoded({"kind": "runner", "name": "titan"})), 405)
