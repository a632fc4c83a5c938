"""The page of runners in a real browser, and the first steps of a mesh without a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest
from join_process import running_join
from kit.listing_server import listing_server
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import accessibility_faults, expect, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def relayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh that other machines of this machine may join."""
    folder = tmp_path_factory.mktemp("relayed")
    budget = {"declared": [{"name": "budget", "memory_mb": 3000}]}
    config = write_config(folder, fake_runner("a"), relay={"listen": "127.0.0.1:0"}, accelerators=budget)
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh without a model, on a machine where a server runs that lists one."""
    folder = tmp_path_factory.mktemp("empty")
    with listing_server() as nothing, listing_server("found:8b") as found:
        address = found.address
        runner = {"name": "lists-nothing", "url": f"http://{nothing.address}"}
        config = write_config(folder, runner, discovery={"addresses": [address], "max_files": 0})
        with running_mesh(folder / "home", "--config", str(config)) as mesh:
            yield mesh


def test_runner_page_shows_models_health_and_engine_log(page: "Page", relayed: MeshProcess) -> None:
    opened(page, relayed, "runners", "Runners")
    page.get_by_role("cell", name="directly").wait_for()
    picture(page, "runners")
    page.get_by_role("main").get_by_role("link", name="a", exact=True).click()
    page.get_by_role("heading", level=1, name="a").wait_for()
    page.get_by_role("log", name="Engine log of m-a").get_by_text("listening").wait_for()
    page.get_by_text("engines", exact=True).wait_for()
    page.get_by_role("main").get_by_role("link", name="m-a").wait_for()
    picture(page, "runner")


def test_engine_log_lines_appear_live(page: "Page", relayed: MeshProcess) -> None:
    opened(page, relayed, "runners/a", "a")
    log = page.get_by_role("log")
    log.get_by_text("listening").wait_for()
    before = log.inner_text()
    httpx2.post(f"{relayed.url}/v1/admin/models/m-a/unload").raise_for_status()
    page.locator("td .state", has_text="hibernating").wait_for()
    httpx2.post(f"{relayed.url}/v1/admin/models/m-a/load").raise_for_status()
    page.locator("td .state", has_text="ready").wait_for()
    page.wait_for_function("before => document.querySelector('.log').innerText.length > before", arg=len(before))


def test_another_machine_joins_with_the_shown_command(page: "Page", relayed: MeshProcess, tmp_path: Path) -> None:
    opened(page, relayed, "runners", "Runners")
    page.get_by_role("button", name="Join a machine").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox", name="For").fill("Ann's laptop")
    dialog.get_by_text("weft runner token create --description").wait_for()
    dialog.get_by_role("button", name="Create join command").click()
    command = dialog.get_by_role("group", name="Command for the other machine").inner_text()
    assert command.startswith("weft runner join http://127.0.0.1:")
    dialog.get_by_text("Waiting for a machine to join").wait_for()
    picture(page, "runners-join")
    url, _, token = command.removeprefix("weft runner join ").partition(" --token ")
    runner = fake_runner("laptop")
    runner["models"][0] |= {"name": "m-laptop", "pool": "laptops"}
    config = write_config(tmp_path, runner)
    with running_join(tmp_path / "laptop", url, token, "--config", str(config), "--publish", "m-laptop"):
        dialog.get_by_text("has joined from").wait_for()
        picture(page, "runners-joined")
        dialog.get_by_role("link", name="laptop").click()
        page.get_by_role("heading", level=1, name="laptop").wait_for()
        page.get_by_text("through the relay").wait_for()
        page.get_by_role("log").get_by_text("listening on <local>").wait_for()
    page.locator(".title .state", has_text="inactive").wait_for()
    page.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_text("weft delete runner laptop").wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    page.get_by_role("heading", level=1, name="Runners").wait_for()
    tokens = page.get_by_role("table", name="Join tokens")
    tokens.get_by_role("cell", name="Ann's laptop").wait_for()
    tokens.get_by_role("button", name="Revoke").first.click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    tokens.wait_for(state="detached")


def test_page_shows_a_fix_if_no_machine_can_join(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "runners", "Runners")
    page.get_by_role("button", name="Join a machine").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("weft mesh restart -- --host 0.0.0.0").wait_for()
    expect(dialog.get_by_role("textbox")).to_have_count(0)
    picture(page, "runners-no-relay")


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_first_steps_have_no_accessibility_violations(
    browser: "Browser", empty: MeshProcess, theme: str, width: int
) -> None:
    def looked(page: "Page") -> None:
        page.get_by_text("found:8b").wait_for()

    assert not accessibility_faults(browser, f"{empty.url}/ui/", theme=theme, width=width, after=looked)


def test_mesh_without_a_model_shows_setup_steps_that_work(page: "Page", empty: MeshProcess) -> None:
    opened(page, empty, "", "Overview")
    first = page.get_by_role("region", name="Catalog")
    first.get_by_text("found:8b").wait_for()
    picture(page, "first-run")
    first.get_by_role("button", name="Add by source").click()
    page.get_by_role("dialog").get_by_text("weft load SOURCE").wait_for()
    page.keyboard.press("Escape")
    first.get_by_role("button", name="Attach a server").click()
    page.get_by_role("dialog").get_by_text("weft models attach URL").wait_for()
    page.keyboard.press("Escape")
    first.get_by_role("button", name="Serve Ollama 0.12.3").click()
    page.get_by_role("cell", name="found:8b").wait_for()
    first.wait_for(state="detached")


@pytest.mark.parametrize("path", ["runners", "runners/a"])
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_runner_pages_have_no_accessibility_violations(
    browser: "Browser", relayed: MeshProcess, path: str, theme: str, width: int
) -> None:
    assert not accessibility_faults(browser, f"{relayed.url}/ui/{path}", theme=theme, width=width)
