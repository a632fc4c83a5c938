"""Reading and deleting resources under /api/v1."""

import pytest
from gateway_script import FixedFleet, model, serving
from registry_script import ScriptedRegistry, model_row

from weft.documents.resource_kinds import ResourceKind


async def test_model_with_other_letters_in_its_name_is_found_by_either_form() -> None:
    registry = ScriptedRegistry(documents=[model_row("xn--ber-goa/tiny")])
    async with serving(registry=registry) as gateway:
        for owner in ("%C3%BCber", "xn--ber-goa"):
            found = await gateway.read(f"/api/v1/models/{owner}/tiny")
            assert found["name"] == "xn--ber-goa/tiny"


async def test_members_response_has_the_size_and_each_full_member() -> None:
    async with serving() as gateway:
        found = await gateway.read("/api/v1/models/tiny/members")
    members = found.pop("members")
    assert found == {
        "kind": "PoolMembers",
        "poolName": "chat",
        "explicit": True,
        "explicitPoolName": "chat",
        "size": 2,
        "activeCount": 1,
    }
    assert isinstance(members, list)
    assert [(member["kind"], member["name"]) for member in members] == [("model", "tiny"), ("model", "small")]


async def test_list_is_read_in_pages() -> None:
    registry = ScriptedRegistry()
    names: list[str] = []
    async with serving(registry=registry) as gateway:
        token = ""
        while True:
            page = await gateway.read(f"/api/v1/models?pageSize=1&pageToken={token}")
            assert page["kind"] == "ModelList"
            items, token = page["items"], str(page["nextPageToken"])
            assert isinstance(items, list)
            names += [item["name"] for item in items]
            if not token:
                break
    assert names == ["small", "tiny"]
    assert registry.asked[0] == ("list", ResourceKind.MODEL, 1, "")


async def test_invalid_query_parameter_is_reported() -> None:
    async with serving() as gateway:
        for query, param in (
            ("labels=a%3D", "labels"),
            ("labels=a,,b", "labels"),
            ("labels=" + "a," * 17, "labels"),
            ("pageSize=0", "pageSize"),
            ("pagesize=1", "pagesize"),
        ):
            error = (await gateway.request("GET", f"/api/v1/models?{query}")).of(400)["error"]
            assert (error["code"], error["param"]) == ("invalid_argument", param)


async def test_hostile_name_never_reaches_the_registry() -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        for name in ("-x", "a%20b", "..", "..%2f..%2fx", "agent/x", "%00", "a" * 129, "m%C3%B6%20del", "x%0d%0ax"):
            for method in ("GET", "DELETE"):
                error = (await gateway.request(method, f"/api/v1/models/{name}")).of(400)["error"]
                assert error["param"] == "name"
        for path in ("/api/v1/agents/a/b", "/api/v1/models/a//b", "/api/v1/secrets", "/api/v1/models/"):
            assert (await gateway.request("GET", path)).of(404)["error"]["code"] == "not_found"
    assert registry.asked == []


@pytest.mark.parametrize("path", ["/api/v1/profiles", "/api/v1/profiles/night/switch"])
async def test_removed_path_names_its_replacement(path: str) -> None:
    async with serving(registry=ScriptedRegistry()) as gateway:
        error = (await gateway.request("POST", path)).of(404)["error"]
    assert error["message"].startswith("/api/v1/profiles was removed; use: weft apply -f FILE")


async def test_forced_delete_is_passed_to_the_registry_and_other_flag_values_are_rejected() -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        assert (await gateway.request("DELETE", "/api/v1/models/tiny?force=true")).status == 204
        error = (await gateway.request("DELETE", "/api/v1/models/tiny?force=maybe")).of(400)["error"]
    assert error["param"] == "force"
    assert registry.asked == [("delete", ResourceKind.MODEL, "tiny", "force")]


async def test_page_of_the_gateway_can_make_changes() -> None:
    async with serving() as gateway:
        response = await gateway.request("DELETE", "/api/v1/models/tiny", headers={"Origin": gateway.service.url})
    assert response.status == 204


@pytest.mark.parametrize("name", ["org/tiny", "org%2Ftiny"])
async def test_slash_in_a_model_name_can_be_literal_or_escaped(name: str) -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry, fleet=FixedFleet.of(model("org/tiny"))) as gateway:
        assert (await gateway.read(f"/v1/models/{name}"))["id"] == "org/tiny"
        assert (await gateway.request("DELETE", f"/api/v1/models/{name}")).status == 204
    assert registry.asked[-1][1:3] == (ResourceKind.MODEL, "org/tiny")


CHANGES = (
    ("DELETE", "/api/v1/models/tiny"),
    ("DELETE", "/api/v1/agents/coder"),
    ("DELETE", "/api/v1/runners/titan"),
    ("PUT", "/api/v1/models/tiny"),
    ("PUT", "/api/v1/agents/coder"),
    ("POST", "/api/v1/apply"),
)


@pytest.mark.parametrize(("method", "path"), CHANGES)
async def test_page_of_another_port_of_this_machine_cannot_change_anything(method: str, path: str) -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        body = b"" if method == "DELETE" else b'{"documents":[{"kind":"model","name":"tiny"}]}'
        headers = {"Origin": "http://localhost:3000"}
        error = (await gateway.request(method, path, body, headers)).of(403)["error"]
    assert error["code"] == "permission_denied"
    assert registry.asked == []
