"""The settings of the workbench: documents applied after their difference was shown, keys, the mesh."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx2
import pytest
from keyed_mesh import new_key
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import accessibility_faults, expect, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh that asks for keys."""
    folder = tmp_path_factory.mktemp("keyed")
    config = write_config(folder, fake_runner("a"), auth={"required": True})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


def sign_in(page: "Page", mesh: MeshProcess, key: str, path: str) -> None:
    page.goto(f"{mesh.url}/ui/{path}")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()


def declared(mesh: MeshProcess, path: str) -> dict[str, object]:
    found: dict[str, object] = httpx2.get(f"{mesh.url}/api/v1/{path}").json()
    return found


def planned(page: "Page") -> "Locator":
    """The dialog with the difference, once it is there."""
    page.get_by_role("button", name="Show changes").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("heading", level=2).wait_for()
    return dialog


def test_agent_is_created_by_a_form_and_applied_after_showing_its_diff(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "settings", "Settings")
    page.get_by_role("button", name="New agent").click()
    page.get_by_label("Name").fill("coder")
    page.get_by_label("Model", exact=True).fill("m-a")
    page.get_by_label("System prompt").fill(f"Be terse.\n{HOSTILE}")
    page.get_by_label("Temperature").fill("0.2")
    dialog = planned(page)
    dialog.get_by_text("agent/coder created").wait_for()
    dialog.get_by_text('"temperature": 0.2').wait_for()
    picture(page, "settings-diff")
    assert httpx2.get(f"{mesh.url}/api/v1/agents/coder").status_code == 404, "a dry run changes nothing"
    dialog.get_by_role("button", name="Apply").click()
    page.get_by_role("table", name="Agents").get_by_role("link", name="coder").click()
    page.get_by_role("heading", level=1, name="coder").wait_for()
    assert page.get_by_label("System prompt").input_value() == f"Be terse.\n{HOSTILE}"
    page.get_by_label("System prompt").fill("Be long.")
    dialog = planned(page)
    assert dialog.locator(".gone").count() == 1
    assert "Be long." in dialog.locator(".added").inner_text()
    dialog.get_by_role("button", name="Apply").click()
    page.get_by_role("table", name="Agents").wait_for()
    assert declared(mesh, "agents/coder")["systemPrompt"] == "Be long."
    assert page.locator("img").count() == 0


def test_document_is_edited_as_json_and_validation_errors_are_shown(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "settings/routes", "Settings")
    page.get_by_role("button", name="New route").click()
    page.get_by_label("Name").fill("way")
    page.get_by_label("Candidates").fill("m-a\nm-b")
    page.get_by_role("button", name="Edit as JSON").click()
    text = page.get_by_label("JSON")
    assert json.loads(text.input_value()) == {"kind": "route", "name": "way", "candidates": ["m-a", "m-b"]}
    text.fill("{")
    page.get_by_role("button", name="Show changes").click()
    page.get_by_text("This is not JSON").wait_for()
    text.fill(json.dumps({"kind": "route", "name": "way", "candidates": ["nothing"]}))
    page.get_by_role("button", name="Show changes").click()
    page.locator(".problem", has_text="nothing").wait_for()
    text.fill(json.dumps({"kind": "route", "name": "way", "candidates": ["m-b"], "budgetSeconds": 60}))
    page.get_by_role("button", name="Edit as a form").click()
    assert page.get_by_label("Budget (s)").input_value() == "60"
    planned(page).get_by_role("button", name="Apply").click()
    page.get_by_role("table", name="Routes").get_by_role("link", name="way").wait_for()


def test_tenant_limits_are_edited_as_lines_and_an_invalid_line_is_reported(page: "Page", mesh: MeshProcess) -> None:
    minute = "window=minute requests=20 tokens=40000"
    opened(page, mesh, "settings/tenants", "Settings")
    page.get_by_role("button", name="New tenant").click()
    page.get_by_label("Name").fill("interns")
    page.get_by_label("Weight").fill("0.5")
    page.get_by_label("Limits", exact=True).fill("window=minute requests")
    page.get_by_role("button", name="Show changes").click()
    page.locator(".problem", has_text='"requests" is no field with its value').wait_for()
    page.get_by_label("Limits", exact=True).fill(f"{minute}\nwindow=fortnight tokens=5")
    page.get_by_role("button", name="Show changes").click()
    page.locator(".problem", has_text="limits[1].window: must be one of second, minute").wait_for()
    page.get_by_label("Limits", exact=True).fill(f"{minute}\nwindow=day tokens=200000 per=key")
    planned(page).get_by_role("button", name="Apply").click()
    row = page.get_by_role("table", name="Tenants").get_by_role("row", name="interns")
    row.get_by_text("20 requests and 40000 tokens a minute, 200000 tokens a day per key").wait_for()
    document = declared(mesh, "tenants/interns")
    assert document["weight"] == 0.5
    assert document["limits"] == [
        {"window": "minute", "requests": 20, "tokens": 40000},
        {"window": "day", "tokens": 200000, "per": "key"},
    ]
    row.get_by_role("link", name="interns").click()
    assert page.get_by_label("Limits", exact=True).input_value().splitlines()[0] == minute
    page.get_by_role("button", name="Edit as JSON").click()
    assert json.loads(page.get_by_label("JSON").input_value())["limits"] == document["limits"]


def test_preset_of_an_alias_is_declared_in_the_form_and_shown_in_the_list(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "settings/aliases", "Settings")
    page.get_by_role("button", name="New alias").click()
    page.get_by_label("Name", exact=True).fill("calm")
    page.get_by_label("Target").fill("m-a")
    page.get_by_label("Default reasoning effort").fill("low")
    page.get_by_label("Forced temperature").fill("0.25")
    page.get_by_label("Removed parameters").fill("top_k\nseed")
    planned(page).get_by_role("button", name="Apply").click()
    row = page.get_by_role("table", name="Aliases").get_by_role("row", name="calm")
    row.get_by_text('reasoning_effort defaults to "low", temperature = 0.25, no top_k, no seed').wait_for()
    document = declared(mesh, "aliases/calm")
    assert document["defaultParams"] == {"reasoning_effort": "low"}
    assert (document["forcedParams"], document["removedParams"]) == ({"temperature": 0.25}, ["top_k", "seed"])
    row.get_by_role("link", name="calm").click()
    assert page.get_by_label("Forced temperature").input_value() == "0.25"
    httpx2.delete(f"{mesh.url}/api/v1/aliases/calm").raise_for_status()


def test_concurrent_change_is_reported_and_a_document_is_deleted(page: "Page", mesh: MeshProcess) -> None:
    alias = {"kind": "alias", "name": "gpt", "pattern": "gpt-*", "target": "m-a"}
    httpx2.put(f"{mesh.url}/api/v1/aliases/gpt", json=alias).raise_for_status()
    opened(page, mesh, "settings/aliases/gpt", "gpt")
    page.get_by_label("Description").fill("mine")
    httpx2.put(f"{mesh.url}/api/v1/aliases/gpt", json=alias | {"target": "m-b"}).raise_for_status()
    page.get_by_text("It has changed since it was opened").wait_for()
    page.get_by_role("button", name="Reload").click()
    assert page.get_by_label("Target").input_value() == "m-b"
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_text("weft delete alias gpt").wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.get_by_text("There are no aliases.").wait_for()


def test_mesh_settings_are_changed_after_showing_their_diff(page: "Page", mesh: MeshProcess) -> None:
    before = declared(mesh, "config")["allowCloudFallback"]
    opened(page, mesh, "settings/mesh", "Settings")
    page.get_by_label("Routes may fall back").click()
    dialog = planned(page)
    assert dialog.locator(".added, .gone").count() == 2
    dialog.get_by_role("button", name="Apply").click()
    page.get_by_text("settings of the mesh changed").wait_for()
    assert declared(mesh, "config")["allowCloudFallback"] is not before


def test_optional_keys_are_listed_with_how_to_require_them(page: "Page", mesh: MeshProcess) -> None:
    """The page said that callers need a key once there is one, and listed none."""
    new_key(mesh, "--role", "admin", "--description", "The first")
    opened(page, mesh, "settings/keys", "Settings")
    page.get_by_text("Keys are optional at this address").wait_for()
    page.get_by_text("required: true").wait_for()
    page.get_by_text("weft keys create --role admin").wait_for()
    page.get_by_role("table", name="Keys").get_by_text("The first").wait_for()
    expect(page.get_by_role("button", name="New key")).to_have_count(0)
    assert page.evaluate("fetch('/v1/models').then((answer) => answer.status)") == 200


def test_key_is_created_shown_once_rotated_and_revoked(page: "Page", keyed: MeshProcess) -> None:
    sign_in(page, keyed, new_key(keyed, "--role", "admin"), "settings/keys")
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Tenant").fill("team-a")
    dialog.get_by_label("Role").select_option("viewer")
    dialog.get_by_text("weft keys create --tenant team-a --scope '*:view'").wait_for()
    dialog.get_by_role("button", name="Create").click()
    secret = dialog.get_by_label("Key", exact=True).inner_text()
    picture(page, "settings-key")
    headers = {"Authorization": f"Bearer {secret}"}
    assert httpx2.get(f"{keyed.url}/api/v1/caller", headers=headers).json()["tenant"] == "team-a"
    dialog.get_by_role("button", name="Done").click()
    row = page.get_by_role("table", name="Keys").locator("tr", has_text="team-a")
    row.wait_for()
    assert secret not in page.content(), "it is shown once"
    row.get_by_role("button", name="Rotate").click()
    page.get_by_role("dialog").get_by_role("button", name="Rotate", exact=True).click()
    rotated = page.get_by_role("dialog").get_by_label("Key", exact=True).inner_text()
    assert rotated != secret
    page.get_by_role("dialog").get_by_role("button", name="Done").click()
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke", exact=True).click()
    row.get_by_text("revoked").wait_for()
    for text in (secret, rotated):
        refused = httpx2.get(f"{keyed.url}/v1/models", headers={"Authorization": f"Bearer {text}"})
        assert refused.status_code == 401


def test_wrong_key_cannot_open_settings(page: "Page", keyed: MeshProcess) -> None:
    sign_in(page, keyed, f"weft_abcdefghijk1_{'0' * 64}", "settings/keys")
    page.get_by_role("alert").wait_for()
    page.get_by_role("heading", level=1, name="Sign in").wait_for()
    assert page.get_by_role("table").count() == 0


def test_read_only_key_is_offered_no_changes(page: "Page", keyed: MeshProcess) -> None:
    sign_in(page, keyed, new_key(keyed, "--scope", "models:view"), "settings")
    page.get_by_role("navigation", name="Settings").wait_for()
    tabs = page.get_by_role("navigation", name="Settings").get_by_role("link").all_text_contents()
    assert tabs == ["Agents", "Routes", "Aliases"]
    page.get_by_text("There are no agents.").wait_for()
    assert page.get_by_role("button", name="New agent").count() == 0


def _until_shown(page: "Page") -> None:
    page.locator("main form, main table").first.wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", ["settings/agents/new", "settings/mesh"])
def test_settings_pages_have_no_accessibility_violations(
    browser: "Browser", mesh: MeshProcess, path: str, theme: str
) -> None:
    assert not accessibility_faults(browser, f"{mesh.url}/ui/{path}", theme=theme, after=_until_shown)
