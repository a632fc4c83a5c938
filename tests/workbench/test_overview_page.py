"""The overview in a real browser: figures of the last hour as charts, and the models."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from mesh_process import MeshProcess, running_mesh, write_config
from pages import accessibility_faults, opened, picture
from requests_kit import busy, chat, served_mesh

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    with served_mesh(tmp_path_factory.mktemp("overview")) as mesh:
        yield mesh


def test_charts_show_the_last_hour_and_update_live(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "", "Overview")
    page.get_by_role("heading", name="Last hour").wait_for()
    for number in range(4):
        chat(mesh, "quick", f"quick-{number}")
    tile = page.locator(".tile", has_text="Requests")
    tile.get_by_text("4", exact=True).wait_for()
    page.locator(".tile", has_text="Tokens out").get_by_text("96", exact=True).wait_for()
    page.get_by_role("img", name="Time to first token: p50 ").wait_for()
    page.get_by_role("img", name="Time per token: p50 ").wait_for()
    with busy(mesh):
        page.locator(".tile", has_text="Waiting").get_by_text("3", exact=True).wait_for()
        page.get_by_role("img", name="Concurrent requests: running 1, waiting 3").wait_for()
        picture(page, "overview")


def test_charts_can_be_filtered_by_model(page: "Page", mesh: MeshProcess) -> None:
    chat(mesh, "quick")
    opened(page, mesh, "", "Overview")
    page.get_by_role("combobox", name="Model").select_option("m-a")
    page.wait_for_url("**/ui/?model=m-a")
    page.get_by_role("img", name="Tokens per second: out ").wait_for()


def test_hovering_a_chart_shows_the_values_at_that_time(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "", "Overview")
    chart = page.get_by_role("img", name="Concurrent requests")
    chart.hover()
    page.locator(".cursor").first.wait_for(state="attached")


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_overview_with_charts_has_no_accessibility_violations(
    browser: "Browser", mesh: MeshProcess, theme: str, width: int
) -> None:
    def ready(page: "Page") -> None:
        page.get_by_role("heading", name="Last hour").wait_for()
        picture(page, f"overview-{theme}-{width}")

    assert not accessibility_faults(browser, f"{mesh.url}/ui/", theme=theme, width=width, after=ready)


def test_empty_mesh_shows_how_to_add_a_model(page: "Page", tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("empty")
    with running_mesh(folder / "home", "--config", str(write_config(folder))) as mesh:
        opened(page, mesh, "", "Overview")
        page.get_by_role("region", name="First steps").get_by_text("weft load hf:").wait_for()
        picture(page, "overview-empty")
