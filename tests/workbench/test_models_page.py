"""The page of models in a real browser: what it lists, and loads, unloads and wakes done from it."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from keyed_mesh import new_key
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import accessibility_faults, finished, opened, picture
from sleepy_server import SleepyServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

HOSTILE = "<img src=x onerror=alert(1)>"
BUDGET = {"declared": [{"name": "budget", "memory_mb": 3000}]}
MODEL_MB = 2000


@dataclass(frozen=True, slots=True)
class Models:
    """A mesh of models in many states; a test uses those that are named after it."""

    mesh: MeshProcess
    sleepy: SleepyServer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("models")
    sleepy = SleepyServer(folder / "sleepy")
    slow = _named("slow", load_seconds=1.5)
    slow["models"][0]["start_asleep"] = True
    bad = _named("bad")
    bad["command"] = [sys.executable, "-c", f"print({HOSTILE!r}, flush=True); raise SystemExit(3)"]
    bad["models"][0]["start_asleep"] = True
    sections = (
        fake_runner("a"),
        fake_runner("b"),
        _named("busy"),
        _named("queued", slots=1),
        slow,
        bad,
        _memory_runner(),
        sleepy.runner("nap", "sleepy"),
    )
    try:
        config = write_config(folder, *sections, accelerators=BUDGET)
        with running_mesh(folder / "home", "--config", str(config)) as mesh:
            yield Models(mesh, sleepy)
    finally:
        sleepy.end()


def _named(model: str, **switches: Any) -> dict[str, Any]:
    """A runner `runs-<model>` with one model of that name, in no pool."""
    section = fake_runner(f"runs-{model}", **switches)
    section["models"][0] |= {"name": model, "pool": None}
    return section


def _memory_runner() -> dict[str, Any]:
    """Two models of which the declared device holds one."""
    section = fake_runner("box", pool="")
    section["models"] = [
        {"name": name, "path": __file__, "slots": 2, "memory_mb": MODEL_MB, "start_asleep": name != "first"}
        for name in ("first", "second")
    ]
    section["models"][0] |= {"tier": "fast", "labels": {"team": "alpha"}, "owner": "key:ann"}
    return section


def _action(page: "Page", name: str) -> None:
    page.get_by_role("main").get_by_role("button", name=name, exact=True).click()


def _state(page: "Page", words: str) -> None:
    """Waits until the state beside the model's name is such."""
    page.locator(".title .state", has_text=words).wait_for()


def _operation(page: "Page", title: str, state: str) -> "Locator":
    """The newest operation of that title, once it is in that state."""
    found = page.get_by_role("region", name=title, exact=True).filter(has=page.locator(".state", has_text=state)).first
    found.wait_for()
    return found


def _rows(page: "Page") -> "Locator":
    return page.get_by_role("table", name="Models").locator("tbody tr:not(.spacer)")


def test_every_model_is_listed_with_state_slots_memory_and_capabilities(page: "Page", models: Models) -> None:
    opened(page, models.mesh, "models", "Models")
    row = _rows(page).filter(has=page.get_by_role("link", name="first", exact=True))
    row.wait_for()
    for words in ("0 / 2", "2.0 GiB", "2048", "text, images, audio, tools, thinking", "box", "tier=fast, team=alpha"):
        assert words in row.inner_text()
    sleeping = _rows(page).filter(has=page.get_by_role("link", name="second", exact=True))
    assert "hibernating" in sleeping.inner_text()
    assert "~ 2.0 GiB" in sleeping.inner_text()
    picture(page, "models")


def test_list_counts_waiting_requests_live(page: "Page", models: Models) -> None:
    mesh = models.mesh
    finished(_behave(mesh, "runs-queued", prefill_held=True))
    body = {"model": "queued", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    opened(page, mesh, "models", "Models")
    row = _rows(page).filter(has=page.get_by_role("link", name="queued", exact=True))
    with ThreadPoolExecutor(3) as pool, httpx2.Client(base_url=mesh.url, timeout=60.0) as client:
        asked = [pool.submit(client.post, "/v1/chat/completions", json=body) for _ in range(3)]
        try:
            row.get_by_role("cell", name="1 / 1").wait_for()
            row.get_by_role("cell", name="2", exact=True).wait_for()
            picture(page, "models-queue")
        finally:
            finished(_behave(mesh, "runs-queued", prefill_held=False))
        assert [each.result().status_code for each in asked] == [200] * 3
    row.get_by_role("cell", name="0 / 1").wait_for()
    row.get_by_role("cell", name="0", exact=True).wait_for()


def test_list_filters_by_text_and_state_and_stores_them_in_the_url(page: "Page", models: Models) -> None:
    opened(page, models.mesh, "models", "Models")
    page.get_by_label("Filter").fill("team=alpha")
    page.get_by_role("status").filter(has_text="1 of").wait_for()
    assert _rows(page).count() == 1
    page.get_by_label("Filter").fill("box")
    page.get_by_label("State").select_option("hibernating")
    page.get_by_role("link", name="second", exact=True).wait_for()
    assert _rows(page).count() == 1
    page.reload()
    page.get_by_role("link", name="second", exact=True).wait_for()
    assert _rows(page).count() == 1
    page.get_by_label("Filter").fill("no such model")
    page.get_by_text("No model matches the filter.").wait_for()


def test_row_opens_by_keyboard(page: "Page", models: Models) -> None:
    opened(page, models.mesh, "models", "Models")
    row = _rows(page).filter(has=page.get_by_role("link", name="m-a", exact=True))
    row.focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="m-a").wait_for()
    page.get_by_role("link", name="Models").last.click()
    page.get_by_role("heading", level=1, name="Models").wait_for()


def test_load_progress_is_shown_until_the_model_is_ready(page: "Page", models: Models) -> None:
    opened(page, models.mesh, "models/slow", "slow")
    for _ in range(2):
        _state(page, "hibernating")
        _action(page, "Wake")
        running = _operation(page, "Load slow", "running")
        running.get_by_role("progressbar").wait_for()
        picture(page, "models-loading")
        _state(page, "ready")
        _operation(page, "Load slow", "succeeded")
        _action(page, "Unload")
        page.get_by_role("dialog").get_by_text("weft unload slow").wait_for()
        page.get_by_role("dialog").get_by_role("button", name="Unload", exact=True).click()
    _state(page, "hibernating")


def test_model_loads_with_options_and_the_dialog_shows_the_command(page: "Page", models: Models) -> None:
    opened(page, models.mesh, "models/m-b", "m-b")
    _state(page, "ready")
    _action(page, "Load options")
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Context (tokens)").fill("512")
    dialog.get_by_label("Keep alive").fill("30m")
    dialog.get_by_label("Pin").check()
    dialog.get_by_text("Engine options").click()
    dialog.get_by_label("flash_attention").select_option("on")
    dialog.get_by_label("slots").fill("2")
    dialog.get_by_text(
        "weft load m-b --ctx 512 --keep-alive 30m --pin --set flash_attention=on --set slots=2"
    ).wait_for()
    picture(page, "models-load")
    dialog.get_by_role("button", name="Load", exact=True).click()
    _operation(page, "Load m-b", "succeeded")
    page.get_by_text("512 tokens").wait_for()
    page.get_by_text("0 of 2 busy").wait_for()
    page.get_by_text("yes: never evicted").wait_for()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("Context (tokens)", "3", "contextTokens: must be at least 16"),
        ("Context (tokens)", "many", "contextTokens"),
        ("Keep alive", "soon", "keepAlive"),
        ("Memory budget (MiB)", "0", "memoryBudgetMb"),
    ],
)
def test_rejected_load_option_shows_the_server_error(
    page: "Page", models: Models, field: str, value: str, words: str
) -> None:
    opened(page, models.mesh, "models/m-a", "m-a")
    _action(page, "Load options")
    dialog = page.get_by_role("dialog")
    dialog.get_by_label(field).fill(value)
    dialog.get_by_role("button", name="Load", exact=True).click()
    dialog.get_by_role("alert").filter(has_text=words).wait_for()
    picture(page, "models-refused")
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    _state(page, "ready")


def test_option_unsupported_by_the_engine_is_rejected_in_the_dialog_by_name(page: "Page", models: Models) -> None:
    opened(page, models.mesh, "models/m-a", "m-a")
    _action(page, "Load options")
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("Engine options").click()
    dialog.get_by_label("slots").fill("5000")
    dialog.get_by_role("button", name="Load", exact=True).click()
    dialog.get_by_text("slots: must be from 1 to 1024").wait_for()
    page.keyboard.press("Escape")
    _state(page, "ready")


def test_unloading_a_busy_model_lets_its_request_finish_first(page: "Page", models: Models) -> None:
    mesh = models.mesh
    opened(page, mesh, "models/busy", "busy")
    _state(page, "ready")
    finished(_behave(mesh, "runs-busy", prefill_held=True))
    body = {"model": "busy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    with httpx2.Client(base_url=mesh.url, timeout=60.0) as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            page.get_by_text("1 of 4 busy").wait_for()
            _action(page, "Unload")
            page.get_by_role("dialog").get_by_text("1 running request will finish first").wait_for()
            page.get_by_role("dialog").get_by_role("button", name="Unload", exact=True).click()
            _operation(page, "Unload busy", "running")
            _state(page, "stopping")
            picture(page, "models-unloading")
            finished(_behave(mesh, "runs-busy", prefill_held=False))
            text = answer.read().decode()
        assert "[DONE]" in text
    _operation(page, "Unload busy", "succeeded")
    _state(page, "hibernating")


async def _behave(mesh: MeshProcess, runner: str, **switches: Any) -> None:
    async with await mesh.backend(runner) as backend:
        await backend.set_behaviour(**switches)


def test_failed_load_shows_its_reason_and_hostile_engine_output_is_text(page: "Page", models: Models) -> None:
    opened(page, models.mesh, "models/bad", "bad")
    _action(page, "Wake")
    failed = _operation(page, "Load bad", "failed")
    assert "the engine died while it loaded (exit code 3)" in failed.inner_text()
    why = page.get_by_role("region", name="Why it is not loaded")
    why.get_by_text("the engine died while it loaded (exit code 3)").first.wait_for()
    assert page.locator("img").count() == 0
    picture(page, "models-failed")


def test_model_that_does_not_fit_shows_the_missing_memory_and_its_holders(page: "Page", models: Models) -> None:
    mesh = models.mesh
    with httpx2.Client(base_url=mesh.url, timeout=30.0) as client:
        client.post("/v1/admin/models/first/load", json={"pin": True}).raise_for_status()
    opened(page, mesh, "models/second", "second")
    why = page.get_by_role("region", name="Why it is not loaded")
    why.get_by_text("are missing").wait_for()
    why.get_by_text("first on box holds 2.0 GiB, pinned").wait_for()
    _action(page, "Wake")
    waiting = _operation(page, "Load second", "running")
    waiting.get_by_text("waiting for memory").wait_for()
    waiting.get_by_text("first").wait_for()
    picture(page, "models-memory")
    waiting.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_text("weft mesh operation cancel op-").wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Cancel it").click()
    _operation(page, "Load second", "cancelled")


def test_sleeping_model_can_be_woken_and_watched_from_the_page(page: "Page", models: Models) -> None:
    opened(page, models.mesh, "models/sleepy", "sleepy")
    _state(page, "hibernating")
    page.get_by_text("the server does not answer").first.wait_for()
    models.sleepy.hold(held=True)
    _action(page, "Wake")
    _operation(page, "Load sleepy", "running")
    _state(page, "loading")
    picture(page, "models-waking")
    models.sleepy.hold(held=False)
    _state(page, "ready")
    _operation(page, "Load sleepy", "succeeded")
    page.get_by_role("table", name="Events").get_by_text("woke", exact=True).wait_for()
    assert models.sleepy.wakes == 1


def test_cached_prefixes_are_flushed_by_tenant(page: "Page", models: Models) -> None:
    opened(page, models.mesh, "models/m-a", "m-a")
    _action(page, "Flush cache")
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Tenant").fill("acme")
    dialog.get_by_text("weft models flush --model m-a --tenant acme").wait_for()
    dialog.get_by_role("button", name="Flush", exact=True).click()
    _operation(page, "Flush m-a", "succeeded")


def test_unknown_model_name_is_reported_and_a_pool_name_lists_its_members(page: "Page", models: Models) -> None:
    opened(page, models.mesh, "models/nothing", "nothing")
    page.get_by_text("There is no model with this name.").wait_for()
    opened(page, models.mesh, "models/pool", "pool")
    page.get_by_role("table", name="Replicas").get_by_role("link", name="m-b").click()
    page.get_by_role("heading", level=1, name="m-b").wait_for()


@pytest.mark.parametrize("path", ["models", "models/first", "models/second"])
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_model_pages_have_no_accessibility_violations(
    browser: "Browser", models: Models, path: str, theme: str, width: int
) -> None:
    assert not accessibility_faults(browser, f"{models.mesh.url}/ui/{path}", theme=theme, width=width)


def test_model_pages_fit_a_phone_screen(page: "Page", models: Models) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for path, heading in (("models", "Models"), ("models/first", "first")):
        opened(page, models.mesh, path, heading)
        page.get_by_text("0 / 2" if path == "models" else "0 of 2 busy").first.wait_for()
        picture(page, f"{path.replace('/', '-')}-390")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh that asks for keys."""
    folder = tmp_path_factory.mktemp("keyed-models")
    config = write_config(folder, fake_runner("a"), auth={"required": True})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@pytest.mark.parametrize("scope", ["models:view", "models/m-*:view"])
def test_read_only_key_sees_models_without_actions(page: "Page", keyed: MeshProcess, scope: str) -> None:
    page.goto(f"{keyed.url}/ui/models")
    page.get_by_label("API key").fill(new_key(keyed, "--scope", scope))
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("table", name="Models").get_by_role("link", name="m-a").click()
    page.locator(".title .state", has_text="ready").wait_for()
    page.get_by_role("heading", name="Definition").wait_for()
    buttons = page.get_by_role("main").get_by_role("button").all_text_contents()
    assert [text for text in buttons if text != "Copy"] == []
    assert page.get_by_role("heading", name="Events").count() == 0
    assert page.locator(".problem").count() == 0
    picture(page, "models-view-only")
