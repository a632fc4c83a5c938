"""Profiles over HTTP: read, put, saved, and switched to, with a dry run and by rights."""

from typing import Any

from gateway_script import RunningGateway, serving
from kit.keys import Keys
from registry_script import ScriptedRegistry, document

DAY = {
    "kind": "profile",
    "name": "day",
    "load": [{"model": "tiny", "settings": {"contextTokens": 8192, "parameters": {}, "pin": True}}],
    "unloadOthers": True,
    "agents": [{"name": "coder", "model": "tiny", "systemPrompt": "Be terse."}],
    "models": [{"name": "far", "provider": {"url": "https://api.example.com/v1", "apiKeyRef": "secret/far"}}],
}
HOLDERS = {
    "everything00": ("models:edit", "operations:create", "secrets:create"),
    "editor000000": ("models:edit", "secrets:create"),
    "nosecrets000": ("models:edit", "operations:create"),
    "onename00000": ("models/day:edit", "operations:create"),
    "viewer000000": ("models:view",),
}
KEYS = Keys(HOLDERS)


def with_day(**fields: object) -> ScriptedRegistry:
    own = DAY | fields
    return ScriptedRegistry(documents=[document(**own)])  # type: ignore[arg-type]


async def ask(gateway: RunningGateway, method: str, path: str, body: object = None, key: str = "") -> tuple[int, Any]:
    answer = await gateway.request(method, f"/api/v1/profiles{path}", body, key=key)
    return answer.status, answer.json


async def test_profile_round_trips_through_put_and_get() -> None:
    async with serving(registry=with_day()) as gateway:
        status, found = await ask(gateway, "GET", "/day")
        assert status == 200
        assert {name: found[name] for name in DAY if name != "models"} == {
            name: value for name, value in DAY.items() if name != "models"
        } | {"agents": found["agents"]}
        assert found["agents"][0]["systemPrompt"] == "Be terse."
        assert found["models"][0]["provider"]["apiKeyRef"] == "secret/far"
        status, answer = await ask(gateway, "PUT", "/day", found)
        assert (status, answer["results"][0]["after"]["load"]) == (200, DAY["load"])
        status, page = await ask(gateway, "GET", "")
        assert (page["kind"], [each["name"] for each in page["items"]]) == ("ProfileList", ["day"])


async def test_switch_returns_its_actions_and_started_operations() -> None:
    registry = with_day()
    async with serving(registry=registry) as gateway:
        status, rehearsed = await ask(gateway, "POST", "/day/switch?dryRun=1")
        assert (status, rehearsed["dryRun"]) == (200, True)
        assert rehearsed["steps"] == [{"step": "load", "model": "tiny"}]
        status, done = await ask(gateway, "POST", "/day/switch")
        assert (status, done["kind"], done["name"], done["previous"]) == (200, "SwitchAnswer", "day", "night")
        assert done["steps"] == [{"step": "load", "model": "tiny", "operation": "operations/op-1"}]
    switches = [call[1] for call in registry.asked if call[0] == "switch profile"]
    assert [each.dry_run for each in switches] == [True, False]  # type: ignore[attr-defined]


async def test_current_state_can_be_saved_as_a_profile() -> None:
    registry = ScriptedRegistry()
    async with serving(registry=registry) as gateway:
        status, answer = await ask(gateway, "POST", "/day/save", {"description": "Work", "leaveOthers": True})
        assert (status, answer["results"][0]["after"]["description"]) == (201, "Work")
        status, _ = await ask(gateway, "POST", "/day/save?dryRun=1", {})
        assert status == 200
    first, second = (call[1] for call in registry.asked if call[0] == "save profile")
    assert (first.description, first.leave_others, first.dry_run) == ("Work", True, False)  # type: ignore[attr-defined]
    assert second.dry_run  # type: ignore[attr-defined]


async def test_profile_scopes_apply_to_all_names_and_a_switch_needs_the_scopes_of_its_actions() -> None:
    async with serving(registry=with_day(), keys=KEYS) as gateway:
        for key, statuses in (
            # Reading, putting, saving, switching, deleting.
            ("everything00", [200, 200, 201, 200, 204]),
            ("editor000000", [200, 200, 201, 403, 204]),
            ("nosecrets000", [200, 403, 201, 403, 204]),
            ("onename00000", [403, 403, 403, 403, 403]),
            ("viewer000000", [200, 403, 403, 403, 403]),
        ):
            asked: tuple[tuple[str, str, object], ...] = (
                ("GET", "/day", None),
                ("PUT", "/day", DAY),
                ("POST", "/night/save", {}),
                ("POST", "/day/switch", None),
                ("DELETE", "/day", None),
            )
            assert [(await ask(gateway, method, path, body, key))[0] for method, path, body in asked] == statuses


async def test_declaration_only_profile_needs_no_operation_scope() -> None:
    quiet = with_day(load=[], unloadOthers=False, models=[])
    async with serving(registry=quiet, keys=KEYS) as gateway:
        assert (await ask(gateway, "POST", "/day/switch", key="editor000000"))[0] == 200


async def test_invalid_profile_is_rejected_and_error_names_the_field() -> None:
    async with serving() as gateway:
        for fields, param in (
            ({"load": [{"settings": {}}]}, "load[0].model"),
            ({"agents": [{"name": "a b", "model": "tiny"}]}, "agents[0].name"),
            ({"profiles": []}, "profiles"),
            ({"unload": ["tiny", "tiny"]}, "unload[1]"),
        ):
            status, answer = await ask(gateway, "PUT", "/day", DAY | fields)
            assert (status, answer["error"]["param"]) == (400, param)
