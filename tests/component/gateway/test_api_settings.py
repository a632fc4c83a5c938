"""GET and PUT /api/v1/config."""

import json

import pytest
from gateway_script import RawResponse, serving
from registry_script import ScriptedRegistry

from weft.api.registry.v1.settings_pb2 import MeshSettings
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

PATH = "/api/v1/config"
JSON = {"content-type": "application/json"}


def body_of(response: RawResponse, status: int = 200) -> dict[str, object]:
    assert response.status == status, response
    found = json.loads(response.body)
    assert isinstance(found, dict)
    return found


def error_of(response: RawResponse, status: int) -> tuple[object, object]:
    error = body_of(response, status)["error"]
    assert isinstance(error, dict)
    return error["code"], error["param"]


async def test_settings_are_read_and_updated() -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        assert body_of(await gateway.request("GET", PATH)) == {"allowCloudFallback": True}
        for allowed in (False, True):
            put = await gateway.request("PUT", PATH, json.dumps({"allowCloudFallback": allowed}).encode(), headers=JSON)
            assert body_of(put) == {"allowCloudFallback": allowed}
            assert body_of(await gateway.request("GET", PATH)) == {"allowCloudFallback": allowed}
    assert ("update settings", MeshSettings(allow_cloud_fallback=False)) in registry.asked


async def test_journal_setting_is_shown_once_set_and_kept_if_omitted() -> None:
    async with serving(registry=ScriptedRegistry()) as gateway:
        put = await gateway.request("PUT", PATH, b'{"allowCloudFallback": true, "journal": "wait"}', headers=JSON)
        assert body_of(put) == {"allowCloudFallback": True, "journal": "wait"}
        again = await gateway.request("PUT", PATH, b'{"allowCloudFallback": true}', headers=JSON)
        assert body_of(again) == {"allowCloudFallback": True, "journal": "wait"}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"allowCloudFallback": true, "journal": "always"}', "invalid_argument", "journal"),
        (b"{}", "invalid_argument", "allowCloudFallback"),
        (b'{"allowCloudFallback": "false"}', "invalid_argument", "allowCloudFallback"),
        (b'{"allowCloudFallback": 0}', "invalid_argument", "allowCloudFallback"),
        (b'{"allowCloudFallback": null}', "invalid_argument", "allowCloudFallback"),
        (b'{"allow_cloud_fallback": false}', "invalid_argument", "allowCloudFallback"),
        (b'{"allowCloudFallback": false, "allowCloud": false}', "invalid_argument", "allowCloud"),
        (b'{"allowCloudFallback": false, "allowCloudFallback": true}', "malformed_request", None),
        (b"[]", "malformed_request", None),
        (b"{", "malformed_request", None),
    ],
)
async def test_invalid_body_is_rejected_by_name_and_changes_nothing(body: bytes, code: str, param: str | None) -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        assert error_of(await gateway.request("PUT", PATH, body, headers=JSON), 400) == (code, param)
        mistyped = await gateway.request("PUT", f"{PATH}?dryRun=1", b'{"allowCloudFallback": false}', headers=JSON)
        assert error_of(mistyped, 400) == ("invalid_argument", "dryRun")
    assert registry.asked == []


async def test_failed_update_is_not_reported_as_set() -> None:
    registry = ScriptedRegistry(failure=WeftError(Reason.SERVICE_UNAVAILABLE, "the registry is away"))
    async with serving(registry=registry) as gateway:
        sent = await gateway.request("PUT", PATH, b'{"allowCloudFallback": false}', headers=JSON)
        assert error_of(sent, 503)[0] == "service_unavailable"
    assert registry.allow_cloud_fallback


async def test_other_methods_are_rejected() -> None:
    async with serving() as gateway:
        for method in ("POST", "DELETE", "PATCH"):
            assert (await gateway.request(method, PATH, b"{}", headers=JSON)).status == 405


async def test_route_supports_put_get_and_delete_like_an_agent() -> None:
    registry = ScriptedRegistry()
    document = {"candidates": ["tiny", "chat"], "budgetSeconds": 60, "keepAlive": "5m", "pinPrimary": True}
    async with serving(registry=registry) as gateway:
        path = "/api/v1/routes/fast"
        put = body_of(
            await gateway.request("PUT", path, json.dumps({**document, "name": "fast"}).encode(), headers=JSON), 201
        )
        bad = await gateway.request("PUT", path, b'{"name": "fast", "candidates": []}', headers=JSON)
        assert error_of(bad, 400) == ("invalid_argument", "candidates")
        found = body_of(await gateway.request("GET", "/api/v1/routes/summaries"))
        assert (await gateway.request("DELETE", "/api/v1/routes/summaries")).status == 204
    assert isinstance(put["results"], list)
    assert put["results"][0]["after"] == {
        "kind": "route",
        "name": "fast",
        "description": "",
        **document,
        "keepAlive": 300,
    }
    assert (found["candidates"], found["budgetSeconds"], found["keepAlive"]) == (["tiny", "small"], 60, 300)
    assert registry.asked[0] == ("apply", ["route/fast"], False, False)
