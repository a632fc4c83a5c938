"""The frame of the workbench in a real browser: keys and rights, a mesh that goes away, the keyboard, narrow screens.

Tests of every page take their pages from the page's own table.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest
from every_page import NEEDS, PAGES, TABLE, WITH_MODELS
from keyed_mesh import new_key, revoke
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import accessibility_faults, opened, picture

from weft_testing.free_port import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

WRONG_KEY = f"weft_abcdefghijk1_{'0' * 64}"
VIOLATIONS = """
globalThis.violations = [];
document.addEventListener(
  "securitypolicyviolation", (event) => violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh that asks for keys."""
    folder = tmp_path_factory.mktemp("keyed")
    config = write_config(folder, fake_runner("a"), auth={"required": True})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


def sign_in(page: "Page", mesh: MeshProcess, key: str, path: str = "") -> None:
    page.goto(f"{mesh.url}/ui/{path}")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()


def menu_of(page: "Page") -> list[str]:
    found: list[str] = page.get_by_role("navigation", name="Pages").get_by_role("link").all_text_contents()
    return found


def until_live(page: "Page") -> None:
    page.get_by_role("banner").get_by_text("live", exact=True).wait_for()


def focused(page: "Page") -> str:
    return str(page.evaluate("(document.activeElement.textContent || document.activeElement.tagName).trim()"))


def test_page_table_parser_finds_every_row() -> None:
    """The tests of every page would pass over a row that is written otherwise."""
    assert len(PAGES) == TABLE.count("load: () => import(") > 2


def test_wrong_key_shows_an_error_and_is_not_retried(page: "Page", keyed: MeshProcess) -> None:
    refused: list[str] = []
    page.on("response", lambda response: refused.append(response.url) if response.status == 401 else None)
    sign_in(page, keyed, WRONG_KEY)
    page.get_by_role("alert").wait_for()
    picture(page, "sign-in-refused")
    assert page.evaluate("sessionStorage.length") == 0
    page.get_by_label("API key").fill(new_key(keyed))
    page.get_by_role("button", name="Sign in").click()
    until_live(page)
    assert [urlsplit(url).path for url in refused] == ["/api/v1/caller"]


def test_key_with_few_scopes_sees_only_permitted_content(page: "Page", keyed: MeshProcess) -> None:
    sign_in(page, keyed, new_key(keyed, "--scope", "models:view"))
    page.get_by_role("heading", level=1).wait_for()
    page.get_by_role("button", name="Sign out").wait_for()
    assert menu_of(page) == [PAGES[path] for path, needs in NEEDS.items() if needs == "models:view"]
    page.goto(f"{keyed.url}/ui/tasks")
    page.get_by_text("Your key lacks inference:view").wait_for()
    picture(page, "few-rights")


def test_page_requires_a_new_key_after_its_key_is_revoked(page: "Page", keyed: MeshProcess) -> None:
    refused: list[str] = []
    key = new_key(keyed)
    sign_in(page, keyed, key)
    until_live(page)
    page.on("response", lambda response: refused.append(response.url) if response.status == 401 else None)
    revoke(keyed, key)
    page.get_by_role("heading", level=1, name="Sign in").wait_for()
    page.get_by_role("alert").wait_for()
    assert page.evaluate("sessionStorage.length") == 0
    page.get_by_label("API key").fill(new_key(keyed))
    page.get_by_role("button", name="Sign in").click()
    until_live(page)
    assert len(refused) <= 2, refused


def test_sign_out_clears_all_mesh_data_from_the_tab(page: "Page", keyed: MeshProcess) -> None:
    sign_in(page, keyed, new_key(keyed), WITH_MODELS)
    page.get_by_role("main").get_by_text("m-a").first.wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", level=1, name="Sign in").wait_for()
    assert page.evaluate("sessionStorage.length") == 0
    assert not menu_of(page)
    assert "m-a" not in page.content()
    page.go_back()
    page.goto(f"{keyed.url}/ui/")
    page.get_by_role("heading", level=1, name="Sign in").wait_for()


def test_key_is_only_in_session_storage_and_never_in_a_url(page: "Page", keyed: MeshProcess) -> None:
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url + str(request.headers.get("referer", ""))))
    key = new_key(keyed)
    sign_in(page, keyed, key)
    until_live(page)
    for path in PAGES:
        page.goto(f"{keyed.url}/ui/{path}")
        page.get_by_role("heading", level=1).first.wait_for()
    secret = key.split("_")[-1]
    assert page.evaluate("Object.values(sessionStorage).join()").count(secret) == 1
    assert secret not in page.evaluate("Object.values(localStorage).join() + document.cookie + location.href")
    assert not [address for address in addresses if secret in address]
    assert secret not in page.content()
    assert not page.context.cookies()
    other = page.context.new_page()
    other.goto(f"{keyed.url}/ui/")
    other.get_by_role("heading", level=1, name="Sign in").wait_for()


@contextmanager
def mesh_at(folder: Path, port: int, *names: str) -> Iterator[MeshProcess]:
    """A mesh whose home and port stay the same, with one model for each name."""
    config = write_config(folder, *(fake_runner(name, pool=f"pool-{name}") for name in names), port=port)
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


def test_page_follows_a_killed_and_restarted_mesh_without_a_reload(page: "Page", tmp_path: Path) -> None:
    port = free_port()
    with mesh_at(tmp_path, port, "alpha") as mesh:
        page.goto(f"{mesh.url}/ui/{WITH_MODELS}")
        page.get_by_role("main").get_by_text("m-alpha").first.wait_for()
        until_live(page)
        page.evaluate("globalThis.sameDocument = true")
        mesh.process.send_signal(SIGKILL)
        page.get_by_role("banner").get_by_text("away", exact=True).wait_for()
        assert page.get_by_role("main").get_by_text("m-alpha").first.is_visible()
        picture(page, "away")
    with mesh_at(tmp_path, port, "beta"):
        until_live(page)
        page.get_by_role("main").get_by_text("m-beta").first.wait_for()
        assert page.evaluate("globalThis.sameDocument") is True


def test_page_opened_while_the_mesh_is_down_loads_after_it_restarts(page: "Page", tmp_path: Path) -> None:
    port = free_port()
    with mesh_at(tmp_path, port, "alpha") as mesh:
        page.route("**/api/**", lambda route: route.abort())
        page.goto(f"{mesh.url}/ui/{WITH_MODELS}")
        page.get_by_role("alert").get_by_text("The gateway does not answer. Trying again").wait_for()
        page.unroute_all()
        page.get_by_role("main").get_by_text("m-alpha").first.wait_for()


def test_old_tab_is_reloaded_once_if_a_module_of_its_version_is_missing(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh)
    loads: list[str] = []
    page.on("load", lambda page: loads.append(page.url))
    # The gateway has another version by now: it answers as for every path of one that it does not have.
    page.route(
        "**/pages/usage.js",
        lambda route: route.fulfill(response=page.request.get(f"{mesh.url}/ui/0123456789abcdef/app/pages/usage.js")),
    )
    page.get_by_role("link", name="Usage").click()
    with page.expect_event("load"):
        page.get_by_text("This page could not be loaded.").wait_for()
    page.get_by_text("This page could not be loaded.").wait_for()
    picture(page, "outdated")
    with page.expect_request(lambda request: request.method == "HEAD"):
        pass
    page.unroute_all()
    page.get_by_role("button", name="Reload").click()
    page.get_by_role("heading", level=1, name="Usage").wait_for()
    assert len(loads) == 2


@pytest.mark.parametrize("module", ["chat.js", "chat_list.js"])
def test_page_that_failed_to_load_is_loaded_when_the_mesh_is_back(page: "Page", mesh: MeshProcess, module: str) -> None:
    opened(page, mesh)
    page.route(f"**/pages/{module}", lambda route: route.abort())
    page.route("**/ui/", lambda route: route.abort())
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("alert").get_by_text("This page could not be loaded.").wait_for()
    page.unroute_all()
    page.get_by_role("textbox", name="Message").wait_for()


@pytest.mark.parametrize("late", ["**/pages/usage.js", "**/ui/"])
def test_page_that_failed_to_load_reloads_nothing_once_it_is_left(page: "Page", mesh: MeshProcess, late: str) -> None:
    page.clock.install()
    opened(page, mesh, "chat", "Chat")
    page.evaluate("globalThis.sameDocument = true")
    held: list[Route] = []
    page.route("**/pages/usage.js", lambda route: route.abort())
    page.route(late, lambda route: held.append(route))  # noqa: PLW0108
    with page.expect_request(late):
        page.get_by_role("link", name="Usage").click()
        if late == "**/ui/":
            page.get_by_role("alert").get_by_text("This page could not be loaded.").wait_for()
            page.clock.fast_forward(2000)
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("textbox", name="Message").fill("a draft")
    for route in held:
        if late == "**/ui/":
            route.continue_()
        else:
            route.abort()
    page.unroute_all()
    for _ in range(2):
        page.evaluate("fetch('/ui/', {method: 'HEAD'})")
        page.clock.fast_forward(60_000)
    assert page.evaluate("globalThis.sameDocument") is True
    assert page.get_by_role("textbox", name="Message").input_value() == "a draft"


def test_page_that_fails_again_is_loaded_again_half_a_minute_later(page: "Page", mesh: MeshProcess) -> None:
    page.clock.install()
    opened(page, mesh)
    page.route("**/pages/usage.js", lambda route: route.abort())
    page.get_by_role("link", name="Usage").click()
    page.get_by_role("alert").get_by_text("This page could not be loaded.").wait_for()
    with page.expect_event("load"):
        page.clock.fast_forward(2000)
    page.get_by_role("alert").get_by_text("This page could not be loaded.").wait_for()
    with page.expect_response(lambda response: response.request.method == "HEAD"):
        page.clock.fast_forward(2000)
    page.evaluate("fetch('/ui/', {method: 'HEAD'})")
    page.unroute_all()
    with page.expect_event("load"):
        page.clock.fast_forward(31_000)
    page.get_by_role("heading", level=1, name="Usage").wait_for()
    assert not page.get_by_text("This page could not be loaded.").count()


def test_tab_reconnecting_to_an_updated_gateway_suggests_a_reload(page: "Page", mesh: MeshProcess) -> None:
    page.route("**/ui/", lambda route: route.fulfill(status=200, headers={"etag": '"0123456789abcdef"'}))
    page.route("**/api/v1/watch?**", lambda route: route.abort())
    page.goto(f"{mesh.url}/ui/usage")
    page.get_by_role("link", name="Overview").click()
    page.get_by_role("banner").get_by_text("away", exact=True).wait_for()
    page.unroute("**/api/v1/watch?**")
    page.get_by_text("The gateway has a newer version of this page.").wait_for()
    page.unroute_all()
    page.get_by_role("button", name="Reload").click()
    until_live(page)
    assert not page.get_by_text("newer version of this page").count()


def test_forbidden_kind_does_not_stop_watching_the_others(page: "Page", mesh: MeshProcess) -> None:
    refused: list[str] = []

    def answer(route: "Route") -> None:
        kinds = parse_qs(urlsplit(route.request.url).query)["kinds"][0].split(",")
        place = next((place for place, kind in enumerate(kinds) if kind != "model"), None)
        if place is None:
            route.continue_()
            return
        refused.append(kinds[place])
        param = f"kinds[{place}]"
        message = f"{param}: {kinds[place]}: the key lacks a scope"
        route.fulfill(status=403, json={"error": {"message": message, "param": param, "code": "permission_denied"}})

    page.route("**/api/v1/watch?**", answer)
    with page.expect_response(lambda response: response.status == 403):
        page.goto(f"{mesh.url}/ui/{WITH_MODELS}")
    page.get_by_role("main").get_by_text("m-a").first.wait_for()
    until_live(page)
    assert refused
    assert len(refused) == len(set(refused))


def test_failing_page_leaves_the_menu_and_other_pages_usable(page: "Page", mesh: MeshProcess) -> None:
    page.route("**/v1/admin/usage?**", lambda route: route.fulfill(json={"items": [None]}))
    page.goto(f"{mesh.url}/ui/usage")
    page.get_by_role("alert").get_by_text("This page failed").wait_for()
    page.get_by_role("link", name="Tasks").click()
    page.get_by_role("button", name="New task").wait_for()


def test_everything_is_reachable_by_keyboard_and_focus_moves_as_expected(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh)
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to content"
    picture(page, "keyboard")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.goto(f"{mesh.url}/ui/")
    page.get_by_role("heading", level=1).wait_for()
    links = list[str]()
    while "Tasks" not in links:
        page.keyboard.press("Tab")
        links.append(focused(page))
        assert len(links) < 30, links
    assert links[:2] == ["Skip to content", "weft"]
    assert links[2:] == menu_of(page)[: len(links) - 2]
    page.keyboard.press("Enter")
    page.get_by_role("heading", level=1, name="Tasks").wait_for()
    assert page.evaluate("document.activeElement.id") == "main"
    reached = ""
    for _ in range(12):
        page.keyboard.press("Tab")
        reached = focused(page)
        if reached == "New task":
            break
    assert reached == "New task"
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="New task").wait_for()
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert focused(page) == "New task"


def test_undecodable_url_shows_not_found(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "%E0%A4%A", "Not found")


def test_menu_opens_on_a_narrow_screen_and_closes_after_a_choice(browser: "Browser", mesh: MeshProcess) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    opened(page, mesh)
    navigation = page.get_by_role("navigation", name="Pages")
    assert not navigation.is_visible()
    page.get_by_role("button", name="Menu").click()
    picture(page, "narrow-menu")
    navigation.get_by_role("link", name="Usage").click()
    page.get_by_role("heading", level=1, name="Usage").wait_for()
    navigation.wait_for(state="hidden")
    context.close()


@pytest.mark.parametrize("path", PAGES)
def test_every_page_fits_a_narrow_screen_obeys_the_csp_and_contacts_no_other_origin(
    browser: "Browser", mesh: MeshProcess, path: str
) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    context.add_init_script(VIOLATIONS)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    page.goto(f"{mesh.url}/ui/{path}")
    page.get_by_role("heading", level=1).first.wait_for()
    page.locator(".skeleton").first.wait_for(state="detached")
    page.locator(".connection.live").wait_for()
    picture(page, f"narrow-{path or 'overview'}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("violations") == []
    origins = {urlsplit(url)._replace(path="", query="", fragment="").geturl() for url in asked if ":" in url}
    assert {origin for origin in origins if not origin.startswith(("data:", "blob:"))} == {mesh.url}
    context.close()


def test_csp_violations_are_detected(browser: "Browser", mesh: MeshProcess) -> None:
    """The negative control of the listener."""
    context = browser.new_context()
    context.add_init_script(VIOLATIONS)
    page = context.new_page()
    page.goto(f"{mesh.url}/ui/")
    page.get_by_role("heading", level=1).first.wait_for()
    page.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://example.org/x.png'}))")
    page.wait_for_function("() => violations.length > 0")
    assert page.evaluate("violations[0]").startswith("img-src")
    context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("path", PAGES)
def test_pages_have_no_accessibility_violations(
    browser: "Browser", mesh: MeshProcess, path: str, width: int, theme: str
) -> None:
    assert not accessibility_faults(browser, f"{mesh.url}/ui/{path}", theme=theme, width=width)
