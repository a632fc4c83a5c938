"""What tests of the workbench do with any page: open it, take its picture, check it with axe-core."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mesh_process import MeshProcess

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

WORKBENCH = Path(__file__).parents[2] / ".workbench"
SCREENSHOTS = WORKBENCH / "screenshots"
AXE = WORKBENCH / "node_modules" / "axe-core" / "axe.min.js"
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice")

T = TypeVar("T")


def expect(found: "Locator | Page") -> Any:
    """Playwright's assertions about what is found. It is imported where it is used: `make test` has no browser."""
    from playwright.sync_api import expect as assertions  # noqa: PLC0415

    return assertions(found)


def opened(page: "Page", mesh: MeshProcess, path: str = "", heading: str = "") -> "Page":
    """The page of that path below /ui/, once its heading is there."""
    page.goto(f"{mesh.url}/ui/{path}")
    page.get_by_role("heading", level=1, name=heading or None).first.wait_for()
    return page


def picture(page: "Page", name: str) -> Path:
    """A screenshot among the artefacts of the tests."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}.png"
    page.screenshot(path=path)
    return path


def accessibility_faults(
    browser: "Browser",
    url: str,
    *,
    theme: str = "light",
    width: int = 1280,
    after: "Callable[[Page], None] | None" = None,
) -> list[str]:
    """What axe-core finds at a page that is ready once it has a heading, and `after` is done there."""
    # The page's policy would keep axe-core out.
    context = browser.new_context(
        bypass_csp=True, color_scheme="dark" if theme == "dark" else "light", viewport={"width": width, "height": 800}
    )
    try:
        page = context.new_page()
        page.goto(url)
        page.get_by_role("heading", level=1).first.wait_for()
        if after is not None:
            after(page)
        page.add_script_tag(path=AXE)
        options = json.dumps({"runOnly": {"type": "tag", "values": RULES}})
        found = page.evaluate(f"axe.run(document, {options})")
    finally:
        context.close()
    faults = found["violations"]
    return [f"{fault['id']}: {fault['help']}: {node['html'][:200]}" for fault in faults for node in fault["nodes"]]


def finished(work: Coroutine[Any, Any, T]) -> T:
    """The result of asynchronous work, such as a change of a fake backend: Playwright has the loop of this thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
