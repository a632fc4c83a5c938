"""The frame of the workbench in a real browser: it opens, names its pages, keeps its policy, and is accessible."""

from typing import TYPE_CHECKING

import pytest
from mesh_process import MeshProcess
from pages import accessibility_faults, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]


def test_a_browser_at_the_root_is_shown_the_models_of_the_mesh(page: "Page", mesh: MeshProcess) -> None:
    page.goto(mesh.url)
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    page.get_by_role("cell", name="m-a").wait_for()
    assert page.title() == "Overview · weft"
    picture(page, "overview-first")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_overview_has_no_accessibility_faults(browser: "Browser", mesh: MeshProcess, theme: str) -> None:
    assert not accessibility_faults(browser, f"{mesh.url}/ui/", theme=theme)


def test_axe_finds_what_is_wrong_in_a_page_that_is_wrong(browser: "Browser") -> None:
    """The negative control of the check above."""
    wrong = "data:text/html,<h1>x</h1><img src='a.png'><p style='color:%23ddd;background:%23fff'>pale"
    assert accessibility_faults(browser, wrong)


def test_a_path_without_a_page_says_so_and_leads_back(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "no-such-page", "Not found")
    page.get_by_role("main").get_by_role("link", name="Overview").click()
    page.get_by_role("heading", level=1, name="Overview").wait_for()
