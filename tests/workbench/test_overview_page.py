"""The overview in a real browser: figures as charts, the models and the latest failures."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from mesh_process import MeshProcess, running_mesh, write_config
from pages import accessibility_faults, expect, opened, picture
from requests_kit import busy, chat, served_mesh

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    with served_mesh(tmp_path_factory.mktemp("overview")) as mesh:
        yield mesh


def refuse(mesh: MeshProcess, request_id: str) -> None:
    """Sends a request that no context is large enough for."""
    with suppress(HTTPError):
        chat(mesh, "quick", request_id, messages=[{"role": "user", "content": "word " * 60_000}])


def test_charts_show_the_last_minutes_and_update_live(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "", "Overview")
    page.get_by_role("heading", name="Last 15 minutes").wait_for()
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


def test_charts_show_a_range_with_labeled_axes_and_percentile_lines(page: "Page", mesh: MeshProcess) -> None:
    chat(mesh, "quick")
    opened(page, mesh, "", "Overview")
    page.get_by_role("combobox", name="Range").select_option("1 h")
    page.wait_for_url("**/ui/?range=1h")
    figures = page.get_by_role("region", name="Last hour")
    chart = figures.locator("figure").filter(has_text="Time to first token")
    chart.get_by_role("img", name="Time to first token: p50 ").wait_for()
    chart.locator("g.blue path.line[d^=M]").wait_for(state="attached")
    times = chart.locator(".times span").all_inner_texts()
    assert len(times) == 4
    first, last = (60 * int(hour) + int(minute) for hour, minute in (times[at].split()[0].split(":") for at in (0, -1)))
    assert (last - first) % (12 * 60) in (59, 60)
    scale = figures.locator("figure").filter(has_text="Concurrent requests").locator(".scale span")
    assert all(number.isdecimal() for number in scale.all_inner_texts())


def test_charts_show_the_last_day(page: "Page", mesh: MeshProcess) -> None:
    chat(mesh, "quick")
    with urlopen(f"{mesh.url}/v1/admin/figures?day=true", timeout=10) as answer:
        day = json.load(answer)
    assert day["stepSeconds"] == 300
    # Before five minutes have ended, which they may have.
    page.route("**/v1/admin/figures?day=true", lambda route: route.fulfill(json=day | {"stepCount": 0}))
    opened(page, mesh, "", "Overview")
    page.get_by_role("combobox", name="Range").select_option("24 h")
    page.wait_for_url("**/ui/?range=24h")
    page.get_by_text("The first figures appear within five minutes.").wait_for()
    with urlopen(f"{mesh.url}/v1/admin/figures", timeout=10) as answer:
        hour = json.load(answer) | {"stepSeconds": 300}
    page.unroute_all()
    page.route("**/v1/admin/figures?day=true", lambda route: route.fulfill(json=hour))
    page.reload()
    figures = page.get_by_role("region", name="Last 24 hours")
    figures.get_by_role("img", name="Time to first token: p50 ").wait_for()
    figures.locator(".tile", has_text="First token").get_by_text("last 5 min").wait_for()
    picture(page, "overview-day")


def test_models_have_a_link_their_state_speed_and_memory(page: "Page", mesh: MeshProcess) -> None:
    with busy(mesh, 0):
        opened(page, mesh, "", "Overview")
        row = page.get_by_role("table", name="Models").get_by_role("row").filter(has_text="m-b")
        row.get_by_text("ready", exact=True).wait_for()
        # The fake answers 20 tokens/s; a runner reports it with its next heartbeats.
        expect(row.get_by_role("cell").nth(2)).to_have_text(re.compile(r"[\d.]+"))
        expect(row.get_by_role("cell").nth(3)).to_have_text(re.compile("[KM]iB"))
        memory = row.get_by_role("cell").nth(3).inner_text()
        opened(page, mesh, "models", "Models")
        page.get_by_role("row").filter(has_text="m-b").get_by_text(memory).wait_for()
    opened(page, mesh, "", "Overview")
    page.get_by_role("table", name="Models").get_by_title("of the latest answer").first.wait_for(timeout=60_000)


def test_hosts_show_their_processors_and_memory(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "", "Overview")
    row = page.get_by_role("table", name="Hosts").get_by_role("row").nth(1)
    row.get_by_role("img", name=re.compile(r"CPU of .+: ")).wait_for()
    row.get_by_text(re.compile(r"% of \d+ processors")).wait_for()
    row.get_by_text(re.compile(r"[\d.]+ [MG]iB of [\d.]+ GiB")).wait_for()
    row.get_by_role("link", name="b", exact=True).click()
    page.get_by_role("heading", level=1, name="b", exact=True).wait_for()


def test_recent_failures_are_listed_with_their_reason_and_linked(page: "Page", mesh: MeshProcess) -> None:
    for number in range(6):
        refuse(mesh, f"refused-{number}")
    opened(page, mesh, "", "Overview")
    failures = page.get_by_role("list", name="Recent failures").get_by_role("listitem")
    expect(failures).to_have_count(5)
    failures.first.get_by_text("context length exceeded").wait_for()
    failures.first.get_by_role("link", name="quick").click()
    page.get_by_role("heading", level=1, name="refused-5").wait_for()


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


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_overview_with_charts_has_no_accessibility_violations(
    browser: "Browser", mesh: MeshProcess, theme: str, width: int
) -> None:
    def ready(page: "Page") -> None:
        page.get_by_role("heading", name="Last 15 minutes").wait_for()
        for table in ("Models", "Hosts"):
            page.get_by_role("table", name=table).wait_for()
        page.get_by_role("list", name="Recent failures").wait_for()
        picture(page, f"overview-{theme}-{width}")

    refuse(mesh, f"refused-{theme}-{width}")
    assert not accessibility_faults(browser, f"{mesh.url}/ui/", theme=theme, width=width, after=ready)


def test_empty_mesh_shows_how_to_add_a_model(page: "Page", tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("empty")
    with running_mesh(folder / "home", "--config", str(write_config(folder))) as mesh:
        opened(page, mesh, "", "Overview")
        page.get_by_role("region", name="Catalog").get_by_role("button", name="Pull and serve qwen3:0.6b").wait_for()
        picture(page, "overview-empty")
