"""The page behind a proxy that publishes the mesh under a path of its host."""

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from chat_steps import asked
from mesh_process import MeshProcess
from pages import expect
from path_proxy import publishing

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def proxy(mesh: MeshProcess) -> Iterator[str]:
    with publishing(mesh.url, "/weft/", "/ui/other/") as url:
        yield url


@pytest.mark.parametrize(
    ("path", "heading"),
    [
        ("", "Overview"),
        ("ui", "Overview"),
        ("ui/", "Overview"),
        ("ui/models/m-a", "m-a"),
        ("ui/settings/tenants/", "Settings"),
    ],
)
def test_page_under_a_path_asks_for_nothing_outside_it(page: "Page", proxy: str, path: str, heading: str) -> None:
    """A page whose files are /ui/... of the proxy, which has none, stays empty."""
    answers: list[tuple[int, str]] = []
    page.on("response", lambda response: answers.append((response.status, urlsplit(response.url).path)))
    page.goto(f"{proxy}/weft/{path}")
    page.get_by_role("heading", level=1, name=heading).first.wait_for()
    page.locator(".connection.live").wait_for()
    assert [found for found in answers if found[0] >= 400 or not found[1].startswith("/weft/")] == []
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Requests").click()
    page.get_by_role("heading", level=1, name="Requests").wait_for()
    assert page.url == f"{proxy}/weft/ui/requests"
    for link in page.locator("link[rel=icon], link[rel=manifest]").all():
        answer = page.request.get(link.evaluate("(link) => link.href"))
        assert (answer.status, "html" in answer.headers["content-type"]) == (200, False)


def test_chat_under_a_path_survives_a_reload_and_shows_the_url_for_programs(page: "Page", proxy: str) -> None:
    page.goto(f"{proxy}/weft/ui/chat?model=pool")
    page.get_by_text(f"{proxy}/weft/v1", exact=True).wait_for()
    expect(asked(page, "Under a path").locator(".receipt")).to_contain_text("completed")
    page.reload()
    expect(page.get_by_role("article").last.locator(".receipt")).to_contain_text("completed")
    page.get_by_role("link", name="Under a path").wait_for()


def test_mesh_under_another_path_of_the_host_has_its_own_conversations(page: "Page", proxy: str) -> None:
    page.goto(f"{proxy}/weft/ui/chat?model=pool")
    asked(page, "To one mesh")
    page.get_by_role("link", name="To one mesh").wait_for()
    page.goto(f"{proxy}/ui/other/ui/chat")
    page.get_by_text(f"{proxy}/ui/other/v1", exact=True).wait_for()
    assert page.get_by_role("link", name="To one mesh").count() == 0
