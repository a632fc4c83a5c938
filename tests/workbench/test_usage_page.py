"""The page of usage in a real browser: what was used by tenant, key, model and time, as a chart, rows and CSV."""

import csv
import io
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
from mesh_process import MeshProcess, fake_runner, run_weft, running_mesh, write_config
from pages import accessibility_faults, expect, finished, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

CHATS = {("ann", "m-a"): 3, ("ann", "other"): 1, ("bob", "m-a"): 2}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh that two tenants have used."""
    folder = tmp_path_factory.mktemp("usage")
    config = write_config(folder, fake_runner("a", answer_tokens=8), fake_runner("b", pool="other", answer_tokens=8))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        for (tenant, model), number in CHATS.items():
            for _ in range(number):
                chat(mesh, tenant, model)
        yield mesh


def chat(mesh: MeshProcess, tenant: str, model: str) -> Any:
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hi"}]}).encode()
    headers = {"Content-Type": "application/json", "X-Tenant-ID": tenant}
    with urlopen(Request(f"{mesh.url}/v1/chat/completions", data=body, headers=headers)) as answer:
        return json.load(answer)


def cells(page: "Page") -> list[list[str]]:
    rows = page.get_by_role("table", name="Usage").get_by_role("row").all()
    return [row.get_by_role("cell").all_text_contents() for row in rows[1:]]


def test_usage_of_all_tenants_is_shown_by_tenant_and_model_with_a_total(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "usage", "Usage")
    page.get_by_role("cell", name="total").wait_for()
    found = [row[:4] for row in cells(page)]
    rows = [["ann", "m-a", "3", "3"], ["ann", "m-b", "1", "1"], ["bob", "m-a", "2", "2"]]
    assert found == [*rows, ["total", "", "6", "6"]]
    page.get_by_role("img", name="requests by day: 6 in total").wait_for()
    picture(page, "usage")


def test_rows_group_by_the_selected_fields_and_the_url_stores_the_choice(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "usage", "Usage")
    page.get_by_role("cell", name="total").wait_for()
    page.get_by_label("tenant", exact=True).uncheck()
    page.get_by_label("day", exact=True).check()
    page.get_by_label("hour", exact=True).check()
    assert not page.get_by_label("day", exact=True).is_checked()
    page.get_by_role("columnheader", name="hour (UTC)").wait_for()
    page.get_by_label("Last").select_option("24h")
    page.get_by_role("img", name="requests by hour: 6 in total").wait_for()
    page.get_by_label("Show").select_option("out")
    page.get_by_role("img", name="tokens out by hour: 48 in total").wait_for()
    page.reload()
    page.get_by_role("img", name="tokens out by hour: 48 in total").wait_for()
    assert page.get_by_label("hour", exact=True).is_checked()


def test_day_is_typed_or_chosen_and_a_wrong_one_is_reported(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "usage", "Usage")
    until = page.get_by_role("textbox", name="Until")
    until.fill("25.11.2026")
    until.press("Enter")
    page.get_by_text("Not a day: write it as YYYY-MM-DD.").wait_for()
    expect(until).to_have_value("25.11.2026")
    until.fill("2026-11-25")
    until.press("Enter")
    page.wait_for_url("**until=2026-11-25**")
    expect(page.get_by_text("Not a day")).to_have_count(0)
    page.get_by_role("button", name="Until: calendar").press("Enter")
    page.locator(".date .picker").fill("2026-11-26")
    expect(until).to_have_value("2026-11-26")


def test_list_of_a_select_is_used_by_keyboard(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "usage", "Usage")
    page.get_by_role("combobox", name="Show").focus()
    page.keyboard.press("Space")
    page.keyboard.press("End")
    picture(page, "select-open")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("measure="))


def test_usage_filters_by_tenant_and_model(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "usage", "Usage")
    page.get_by_label("Tenant", exact=True).fill("ann")
    page.get_by_label("Tenant", exact=True).press("Enter")
    page.get_by_role("img", name="requests by day: 4 in total").wait_for()
    page.get_by_label("Model", exact=True).fill("m-b")
    page.get_by_label("Model", exact=True).press("Enter")
    page.get_by_role("img", name="requests by day: 1 in total").wait_for()


def test_typed_input_survives_the_first_response(page: "Page", mesh: MeshProcess) -> None:
    """A page that was drawn anew, as by its first answer, emptied the field."""
    held: list[Route] = []

    def hold(route: "Route") -> None:
        held.append(route)

    page.route("**/v1/admin/usage?**", hold)
    opened(page, mesh, "usage", "Usage")
    page.get_by_label("Tenant", exact=True).fill("ann")
    for each in held:
        each.continue_()
    page.get_by_role("cell", name="total").wait_for()
    assert page.get_by_label("Tenant", exact=True).input_value() == "ann"


def test_cost_and_savings_are_shown_with_the_model_that_is_compared_with(page: "Page", mesh: MeshProcess) -> None:
    """The mesh has no provider, so its answer is completed."""

    def add_money(route: "Route") -> None:
        found = route.fetch().json()
        for row in found["items"]:
            row |= {"priceNanodollars": 4_200_000, "priced": 1, "savedNanodollars": 12_300_000_000}
        found |= {"savedNanodollars": 36_900_000_000, "comparedWith": "cloud"}
        route.fulfill(json=found)

    page.route("**/v1/admin/usage?**", add_money)
    opened(page, mesh, "usage", "Usage")
    page.get_by_role("cell", name="total").wait_for()
    assert [row[-2:] for row in cells(page)] == [*3 * [["$0.0042", "$12.30"]], ["-", "$36.90"]]
    page.get_by_text("would have cost at cloud.").wait_for()


def test_model_without_a_price_cannot_be_compared_with(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "usage", "Usage")
    page.get_by_label("Compare with").fill("m-a")
    page.get_by_label("Compare with").press("Enter")
    page.get_by_role("alert").get_by_text("must be a remote model of the mesh with a known price").wait_for()
    page.wait_for_url("**compareWith=m-a**")


def test_saved_csv_matches_weft_usage(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "usage?by=tenant,model,day", "Usage")
    page.get_by_role("cell", name="total").wait_for()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as CSV").click()
    code, out, error = finished(
        run_weft("mesh", "usage", "--by", "tenant,model,day", "--since", "7d", "-o", "csv", home=mesh.home)
    )
    assert code == 0, error
    assert saved.value.suggested_filename == "usage-tenant-model-day.csv"
    mine = list(csv.DictReader(io.StringIO(saved.value.path().read_text())))
    assert mine == list(csv.DictReader(io.StringIO(out)))
    assert {row["tenant"] for row in mine} == {"ann", "bob"}


def test_invalid_time_shows_the_server_error(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "usage?since=yesterday", "Usage")
    page.get_by_role("alert").get_by_text("must be a length of time such as 90m").wait_for()


def test_mesh_without_usage_is_reported(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "usage?model=never-used", "Usage")
    page.get_by_text("No usage in this time.").wait_for()
    assert page.get_by_role("button", name="Save as CSV").is_disabled()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_usage_page_has_no_accessibility_violations(
    browser: "Browser", mesh: MeshProcess, theme: str, width: int
) -> None:
    def with_open_list(page: "Page") -> None:
        page.get_by_role("textbox", name="Until").fill("soon")
        page.get_by_role("combobox", name="Show").focus()
        page.keyboard.press("Space")
        picture(page, f"usage-{theme}-{width}")

    found = accessibility_faults(browser, f"{mesh.url}/ui/usage", theme=theme, width=width, after=with_open_list)
    assert not found
