"""The frame of the workbench in a real browser: it opens, names its pages, keeps its policy, and is accessible."""

from typing import TYPE_CHECKING

import pytest
from mesh_process import MeshProcess
from pages import accessibility_faults, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]


def test_root_page_shows_the_models_of_the_mesh(page: "Page", mesh: MeshProcess) -> None:
    page.goto(mesh.url)
    page.get_by_role("heading", level=1, name="Overview").wait_for()
    page.get_by_role("cell", name="m-a").wait_for()
    assert page.title() == "Overview · weft"
    picture(page, "overview-first")


def test_axe_detects_violations_in_a_broken_page(browser: "Browser") -> None:
    """The negative control of test_pages_have_no_accessibility_violations."""
    wrong = "data:text/html,<h1>x</h1><img src='a.png'><p style='color:%23ddd;background:%23fff'>pale"
    assert accessibility_faults(browser, wrong)


def test_unknown_path_is_reported_with_a_link_back(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "no-such-page", "Not found")
    page.get_by_role("main").get_by_role("link", name="Overview").click()
    page.get_by_role("heading", level=1, name="Overview").wait_for()
