"""The page of trials in a real browser: the list, the report, blind judging, and the switch to the candidate."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import accessibility_faults, expect, opened, picture
from requests_kit import call, chat

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

NEW, OLD, NAME = "m-a", "m-b", "m-a-vs-m-b"
TRIAL = {
    "kind": "trial", "name": NAME, "candidate": NEW, "against": OLD, "tenant": "default", "sharePercent": 100,
    "maxPairs": 3, "alias": "best",
}  # fmt: skip
PAIRS = 3
QUESTIONS = [f"Is **{number}** even?" for number in range(PAIRS)]


def report_of(mesh: MeshProcess) -> Any:
    return call(mesh, "GET", f"/v1/trials/{NAME}")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A trial of two models whose pairs are all answered."""
    folder = tmp_path_factory.mktemp("trials")
    new = fake_runner("a", pool="new", text="The **new** answer.", reasoning_text="Hm.")
    old = fake_runner("b", pool="old", text="The **old** answer.")
    config = write_config(folder, new, old)
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        call(mesh, "PUT", "/api/v1/tenants/default", {"kind": "tenant", "name": "default", "capture": True})
        call(mesh, "PUT", "/api/v1/aliases/best", {"kind": "alias", "name": "best", "target": OLD})
        call(mesh, "PUT", f"/api/v1/trials/{NAME}", TRIAL)
        for question in QUESTIONS:
            system = {"role": "system", "content": "Be brief."}
            chat(mesh, "best", messages=[system, {"role": "user", "content": question}])
        while report_of(mesh)["summary"]["answered"] < PAIRS:
            pass
        yield mesh


def test_list_opens_a_report_with_the_checks_of_both_sides(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "trials", "Trials")
    row = page.get_by_role("table", name="Trials").get_by_role("row").filter(has_text=NAME)
    expect(row).to_contain_text("100 %")
    expect(row).to_contain_text("3 of 3")
    expect(row).to_contain_text("stopped")
    picture(page, "trials")
    row.get_by_role("link").click()
    page.get_by_role("heading", level=1, name=NAME).wait_for()
    speeds = page.get_by_role("table", name="Checks").get_by_role("row").filter(has_text="Tokens/s")
    expect(speeds.get_by_text("-", exact=True)).to_have_count(0)
    expect(page.get_by_role("table", name="Pairs").get_by_role("row").filter(has_text="answered")).to_have_count(PAIRS)
    picture(page, "trial")


def test_pair_is_judged_blind_by_a_key_and_revealed_and_the_next_one_follows(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, f"trials/{NAME}", NAME)
    page.get_by_role("button", name=f"Judge {PAIRS} pairs").click()
    answer, main = page.get_by_role("region", name="Answer A"), page.get_by_role("main")
    wrote = []
    for left, key in ((2, "a"), (1, "b"), (0, "s")):
        expect(page.get_by_text(f"{left + 1} unjudged")).to_be_visible()
        expect(page.get_by_role("region", name="Prompt")).to_contain_text(QUESTIONS[left])
        expect(main.get_by_text("Thinking")).to_have_count(1)
        expect(answer.locator("strong")).to_have_count(1)
        expect(main.locator(".verdict").get_by_text("is by")).to_have_count(0)
        a, b = (OLD, NEW) if answer.locator("strong").inner_text() == "old" else (NEW, OLD)
        picture(page, "trial-pair")
        page.keyboard.press(key)
        verdict = {"a": f"You preferred {a}.", "b": f"You preferred {b}.", "s": "You found them equally good."}[key]
        main.get_by_text(f"A is by {a}, B by {b}. {verdict}").wait_for()
        wrote.append({"a": a, "b": b, "s": ""}[key])
    main.get_by_text("All answered pairs are judged.").wait_for()
    page.keyboard.press("a")
    page.get_by_role("link", name=NAME).click()
    page.get_by_role("table", name="Pairs").wait_for()
    summary = report_of(mesh)["summary"]
    assert (summary["candidatePreferred"], summary["againstPreferred"]) == (wrote.count(NEW), wrote.count(OLD))
    assert summary["same"] == 1


def test_switch_shows_its_command_and_points_the_alias_to_the_candidate(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, f"trials/{NAME}", NAME)
    for target, verb in ((NEW, "Switch"), (OLD, "Revert")):
        page.get_by_role("button", name=f"{verb} to {target}").click()
        dialog = page.get_by_role("dialog", name=f"{verb} to {target}")
        dialog.get_by_text(f"weft models trial {verb.lower()} {NAME}").wait_for()
        picture(page, f"trial-{verb.lower()}")
        dialog.get_by_role("button", name=verb).click()
        dialog.wait_for(state="detached")
        assert call(mesh, "GET", "/api/v1/aliases/best")["target"] == target


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 360)])
@pytest.mark.parametrize("path", ["trials", f"trials/{NAME}", "pair"])
def test_trial_pages_have_no_accessibility_violations(
    browser: "Browser", mesh: MeshProcess, path: str, theme: str, width: int
) -> None:
    is_pair = path == "pair"
    if is_pair:
        path = f"trials/{NAME}?pair={report_of(mesh)['pairs'][0]['task']}"

    def ready(page: "Page") -> None:
        page.locator(".split" if is_pair else "td").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    assert not accessibility_faults(browser, f"{mesh.url}/ui/{path}", theme=theme, width=width, after=ready)
