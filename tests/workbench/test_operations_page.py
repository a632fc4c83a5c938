"""The page of operations in a real browser: what is under way, what has ended, and the audit log."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import accessibility_faults, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]


def _named(model: str, **switches: Any) -> dict[str, Any]:
    section = fake_runner(f"runs-{model}", **switches)
    section["models"][0] |= {"name": model, "pool": None, "start_asleep": True}
    return section


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """Models of which one loads at once, and one within a minute."""
    folder = tmp_path_factory.mktemp("operations")
    config = write_config(folder, _named("quick"), _named("slow", load_seconds=60.0))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


def begin(mesh: MeshProcess, model: str, what: str = "load") -> str:
    """The id of an operation that another caller begins."""
    headers = {"Content-Type": "application/json", "X-Tenant-ID": "ann"}
    path = f"{mesh.url}/v1/admin/models/{model}/{what}"
    with urlopen(Request(path, data=b"{}", headers=headers)) as answer:
        name: str = json.load(answer)["name"]
    return name.removeprefix("operations/")


def test_operation_of_another_caller_appears_is_cancelled_and_moves_to_ended(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "operations", "Operations")
    page.get_by_text("of 0 that ended").wait_for()
    page.get_by_text("No operation has ended yet").wait_for()
    operation = begin(mesh, "slow")
    underway = page.get_by_role("region", name="Running").get_by_role("region", name="Load slow")
    underway.wait_for()
    underway.get_by_role("progressbar").wait_for()
    picture(page, "operations_under_way")
    underway.get_by_role("button", name="Cancel").click()
    dialog = page.get_by_role("dialog", name="Cancel: Load slow")
    assert f"weft mesh operation cancel {operation}" in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel it").click()
    row = page.get_by_role("table", name="Operations").get_by_role("row").filter(has_text="Load slow")
    row.wait_for(timeout=60_000)
    assert "cancelled" in row.inner_text()
    assert underway.count() == 0
    row.get_by_role("link").click()
    page.get_by_role("heading", level=1, name=operation).wait_for()
    assert "http:ann" in page.get_by_role("main").inner_text()


def test_ended_operations_filter_by_state_and_store_it_in_the_url(page: "Page", mesh: MeshProcess) -> None:
    begin(mesh, "quick")
    opened(page, mesh, "operations", "Operations")
    done = page.get_by_role("table", name="Operations").get_by_role("row").filter(has_text="Load quick")
    done.first.wait_for()
    page.get_by_label("State").select_option("succeeded")
    assert "state=succeeded" in page.url
    page.reload()
    done.first.wait_for()
    assert page.get_by_role("table", name="Operations").get_by_text("cancelled").count() == 0
    picture(page, "operations")


def test_audit_log_is_newest_first_and_updates_live(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "operations/audit", "Operations")
    page.get_by_text("weft mesh audit verify").wait_for()
    operation = begin(mesh, "quick", "unload")
    log = page.get_by_role("table", name="Audit log")
    entries = log.get_by_role("row").filter(has_text=operation)
    entries.filter(has_text="operation.succeeded").wait_for()
    assert "operation.succeeded" in log.get_by_role("row").nth(1).inner_text()
    accepted = entries.filter(has_text="operation.accepted").inner_text()
    assert "http:ann" in accepted
    assert "unload model (model: quick)" in accepted
    assert "sha256" not in accepted
    numbers = [int(text) for text in log.locator("tbody td:first-child").all_text_contents()]
    assert numbers == sorted(set(numbers), reverse=True)
    picture(page, "audit")
    entries.first.get_by_role("link", name=operation).click()
    page.get_by_role("heading", level=1, name=operation).wait_for()


def test_unknown_operation_is_reported(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "operations/op-none", "op-none")
    page.get_by_text("It is neither running nor among the newest").wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", ["operations", "operations/audit"])
def test_operations_page_has_no_accessibility_violations(
    browser: "Browser", mesh: MeshProcess, theme: str, path: str
) -> None:
    begin(mesh, "quick")

    def ready(page: "Page") -> None:
        page.get_by_role("table").wait_for()

    for width in (1280, 390):
        assert accessibility_faults(browser, f"{mesh.url}/ui/{path}", theme=theme, width=width, after=ready) == []
