"""Models added from the page: pulled by name, served by their source, attached with their server; and 1,000 of them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from kit.listing_server import ListingServer, listing_server
from kit.tiny_gguf import write_gguf
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import SCREENSHOTS, accessibility_faults, expect, opened, picture

from weft_testing.model_hub import HubRepository, ModelHub

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

WEIGHTS = bytes(range(256)) * 4_000
HOSTILE = "<img src=x onerror=alert(1)>"
MANY = 1_000
SLOW_SECONDS = 0.2
LONG_TASKS = """
    window.longTasks = [];
    const note = (list) => window.longTasks.push(...list.getEntries().map((entry) => Math.round(entry.duration)));
    new PerformanceObserver(note)
      .observe({ type: "longtask", buffered: true });
"""
"""Collects the durations in ms of tasks that block the page for 50 ms or longer."""


@dataclass(frozen=True, slots=True)
class Sources:
    """A mesh with one runner that adds models, a hub, and a server that lists models."""

    mesh: MeshProcess
    hub: ModelHub
    server: ListingServer


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    folder = tmp_path_factory.mktemp("sources")
    hub = ModelHub()
    for name in ("tiny", "served", "slow", "chosen"):
        header = write_gguf(folder / f"{name}.gguf").read_bytes() + name.encode()
        files = {f"{name}-Q4_1.gguf": header + WEIGHTS}
        hub.repositories[f"acme/{name}-GGUF"] = HubRepository(files=files, context_tokens=8_192)
    hub.repositories["acme/chosen-GGUF"].files["chosen-F32.gguf"] = header + WEIGHTS * 2
    cache = folder / "llama.cpp"
    cache.mkdir()
    (cache / "found-Q4_1.gguf").write_bytes(write_gguf(folder / "found.gguf").read_bytes() + WEIGHTS)
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "", "HF_HOME": str(folder / "hf"), "LLAMA_CACHE": str(cache)}
    with pytest.MonkeyPatch.context() as patch, hub.running(), listing_server("plain:8b", HOSTILE) as server:
        for name, value in environment.items():
            patch.setenv(name, value)
        discovery = {"addresses": [server.address]}
        config = write_config(folder, fake_runner("a"), discovery=discovery)
        with running_mesh(folder / "home", "--config", str(config)) as mesh:
            yield Sources(mesh, hub, server)


def _dialog(page: "Page", way: str) -> "Locator":
    page.get_by_role("button", name="Add a model").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label(way).check()
    return dialog


def _operation(page: "Page", title: str, state: str) -> "Locator":
    found = page.get_by_role("region", name=title, exact=True).filter(has=page.locator(".state", has_text=state)).first
    found.wait_for()
    return found


def test_pull_by_name_shows_bytes_and_can_be_cancelled(page: "Page", sources: Sources) -> None:
    opened(page, sources.mesh, "models", "Models")
    sources.hub.faults.chunk_seconds = SLOW_SECONDS
    dialog = _dialog(page, "Pull only")
    dialog.get_by_label("Source").fill("hf:acme/slow-GGUF")
    dialog.get_by_text("weft pull hf:acme/slow-GGUF").wait_for()
    picture(page, "models-pull")
    dialog.get_by_role("button", name="Pull", exact=True).click()
    pulling = _operation(page, "Pull hf:acme/slow-GGUF", "running")
    pulling.get_by_text("of 1000 KiB").wait_for()
    pulling.get_by_text("left").wait_for()
    picture(page, "models-pulling")
    pulling.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel it").click()
    _operation(page, "Pull hf:acme/slow-GGUF", "cancelled")
    sources.hub.faults.chunk_seconds = 0.0
    dialog = _dialog(page, "Pull only")
    dialog.get_by_label("Source").fill("hf:acme/tiny-GGUF:Q4_1")
    dialog.get_by_role("button", name="Pull", exact=True).click()
    pulled = _operation(page, "Pull hf:acme/tiny-GGUF:Q4_1", "succeeded")
    assert "1000 KiB" in pulled.inner_text()


@pytest.mark.parametrize(
    ("source", "words"),
    [("", "source"), ("nonsense source", "source"), ("hf:acme/nothing-GGUF", "acme/nothing-GGUF")],
)
def test_invalid_source_shows_the_server_error(page: "Page", sources: Sources, source: str, words: str) -> None:
    opened(page, sources.mesh, "models", "Models")
    dialog = _dialog(page, "Pull only")
    dialog.get_by_label("Source").fill(source)
    dialog.get_by_role("button", name="Pull", exact=True).click()
    page.locator(".problem", has_text=words).first.wait_for()


def test_model_is_served_from_its_source_opened_and_removed(page: "Page", sources: Sources) -> None:
    opened(page, sources.mesh, "models", "Models")
    dialog = _dialog(page, "Serve a model")
    dialog.get_by_label("Source").fill("hf:acme/served-GGUF")
    dialog.get_by_label("Name").fill("served")
    dialog.get_by_label("Context (tokens)").fill("512")
    dialog.get_by_text("weft load hf:acme/served-GGUF --name served --ctx 512").wait_for()
    dialog.get_by_role("button", name="Pull and serve").click()
    _operation(page, "Serve hf:acme/served-GGUF", "succeeded")
    page.get_by_role("table", name="Models").get_by_role("link", name="served", exact=True).click()
    page.locator(".title .state", has_text="ready").wait_for()
    page.get_by_role("main").get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_text("weft delete model served --force").wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Remove", exact=True).click()
    page.get_by_text("There is no model with this name.").wait_for()


def test_server_is_attached_and_detached_and_its_hostile_names_are_text(page: "Page", sources: Sources) -> None:
    opened(page, sources.mesh, "models", "Models")
    dialog = _dialog(page, "Attach a server")
    dialog.get_by_role("textbox", name="Address").fill(sources.server.address)
    dialog.get_by_label("Name").fill("box")
    dialog.get_by_text(f"weft models attach {sources.server.address} --name box").wait_for()
    dialog.get_by_role("button", name="Attach", exact=True).click()
    _operation(page, f"Serve http://{sources.server.address}", "succeeded")
    page.get_by_role("table", name="Models").get_by_role("link", name="plain:8b", exact=True).wait_for()
    page.get_by_label("Filter").fill("onerror")
    row = page.get_by_role("table", name="Models").locator("tbody tr").first
    row.wait_for()
    picture(page, "models-attached")
    row.click()
    page.get_by_text(HOSTILE).first.wait_for()
    assert page.locator("img").count() == 0
    page.get_by_role("main").get_by_role("link", name="Models").click()
    page.get_by_role("button", name="Detach").click()
    page.get_by_role("dialog").get_by_text("weft models detach box").wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Detach", exact=True).click()
    page.get_by_role("table", name="Models").get_by_role("link", name="plain:8b", exact=True).wait_for(state="detached")


def _catalog(page: "Page", mesh: MeshProcess, text: str) -> "Locator":
    opened(page, mesh, "models?view=catalog", "Models")
    page.get_by_role("searchbox", name="Search").fill(text)
    return page.get_by_role("region", name="Catalog")


def test_model_of_the_catalog_is_found_estimated_pulled_and_chatted_with(page: "Page", sources: Sources) -> None:
    catalog = _catalog(page, sources.mesh, "acme chosen")
    card = catalog.get_by_role("listitem").filter(has_text="acme/chosen-GGUF")
    card.get_by_text("8192 context").wait_for()
    picture(page, "models-catalog")
    card.get_by_label("Quantization of acme/chosen-GGUF").select_option("F32")
    card.get_by_role("button", name="Pull and serve acme/chosen-GGUF").click()
    dialog = page.get_by_role("dialog")
    wanted = dialog.get_by_role("radio", name="F32 2.0 MiB fits here")
    wanted.wait_for()
    assert wanted.is_checked()
    dialog.get_by_role("radio", name="Q4_1 1000 KiB fits here").check()
    picture(page, "models-catalog-choice")
    dialog.get_by_text("weft load hf:acme/chosen-GGUF:Q4_1").wait_for()
    dialog.get_by_role("button", name="Pull and serve").click()
    card.get_by_label("Quantization of acme/chosen-GGUF").select_option("Q4_1")
    card.get_by_role("link", name="Chat with chosen-q4_1").click()
    page.get_by_role("heading", name="Chat", level=1).wait_for()
    assert page.get_by_label("Model", exact=True).first.input_value() == "chosen-q4_1"


def test_catalog_lists_files_and_engines_of_the_machine_which_are_served_and_chatted_with(
    page: "Page", sources: Sources
) -> None:
    catalog = _catalog(page, sources.mesh, "")
    engine = catalog.get_by_role("listitem").filter(has_text="plain:8b")
    file = catalog.get_by_role("listitem").filter(has_text="found-q4_1")
    for card in (engine, file):
        card.get_by_text("on this machine").wait_for()
        card.get_by_role("button", name="Serve").wait_for()
    picture(page, "models-catalog-found")
    file.get_by_role("button", name="Serve").click()
    file.get_by_role("link", name="Chat with found-q4_1").wait_for()
    engine.get_by_role("button", name="Serve").click()
    engine.get_by_role("link", name="Chat with plain:8b").click()
    page.get_by_role("heading", name="Chat", level=1).wait_for()
    expect(page.get_by_label("Model", exact=True).first).to_have_value("plain:8b")


def test_catalog_without_the_hub_says_so_and_lists_short_names(page: "Page", sources: Sources) -> None:
    sources.hub.faults.statuses = [503] * 8
    try:
        catalog = _catalog(page, sources.mesh, "llama3.3")
        catalog.get_by_text("No models of the hub: search: the hub returned status 503").wait_for()
        card = catalog.get_by_role("listitem").filter(has_text="llama3.3")
        card.get_by_text("Q4_K_M").first.wait_for()
        picture(page, "models-catalog-offline")
    finally:
        sources.hub.faults.statuses = []


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 390)])
def test_catalog_has_no_accessibility_violations(browser: "Browser", sources: Sources, theme: str, width: int) -> None:
    def listed(page: "Page") -> None:
        page.get_by_role("listitem").filter(has_text="qwen3:0.6b").wait_for()
        picture(page, f"models-catalog-{theme}-{width}")

    url = f"{sources.mesh.url}/ui/models?view=catalog"
    assert not accessibility_faults(browser, url, theme=theme, width=width, after=listed)


def declare_many(url: str) -> None:
    documents: list[dict[str, Any]] = [
        {
            "kind": "model",
            "name": f"model-{number:04}",
            "poolName": f"pool-{number % 50}",
            "tier": "fast" if number % 2 else "heavy",
            "labels": {"team": f"team-{number % 7}"},
        }
        for number in range(MANY)
    ]
    with httpx2.Client(base_url=url, timeout=60.0) as client:
        answer = client.post("/api/v1/apply", json={"documents": documents})
    assert answer.is_success, answer.text


def test_a_thousand_models_are_listed_scrolled_and_filtered_with_few_rows_rendered(
    page: "Page", sources: Sources
) -> None:
    declare_many(sources.mesh.url)
    page.add_init_script(LONG_TASKS)
    opened(page, sources.mesh, "models", "Models")
    total = page.get_by_role("status").filter(has_text="of 1")
    total.wait_for()
    table = page.get_by_role("table", name="Models")
    rows = table.locator("tbody tr:not(.spacer)")
    rows.first.wait_for()
    drawn = [rows.count()]
    opening = page.evaluate("window.longTasks.splice(0)")
    box = page.get_by_role("region", name="Models")
    for _ in range(30):
        box.evaluate("(element) => element.scrollBy(0, 1500)")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        drawn.append(rows.count())
    table.get_by_text("model-0999").wait_for()
    scrolling = page.evaluate("window.longTasks.splice(0)")
    page.get_by_label("Filter").press_sequentially("team-3 fast")
    wanted = sum(number % 2 == 1 and number % 7 == 3 for number in range(MANY))
    page.get_by_role("status").filter(has_text=f"{wanted} of").wait_for()
    page.get_by_label("Filter").fill("model-0500")
    page.get_by_role("status").filter(has_text="1 of").wait_for()
    assert rows.count() == 1
    filtering = page.evaluate("window.longTasks.splice(0)")
    figures = {"opening": opening, "scrolling": scrolling, "filtering": filtering, "rowsDrawn": max(drawn)}
    (SCREENSHOTS / "models-1000.json").write_text(json.dumps(figures))
    page.get_by_label("Filter").fill("")
    table.get_by_text("model-0000").wait_for()
    picture(page, "models-1000")
    assert max(drawn) < 100
