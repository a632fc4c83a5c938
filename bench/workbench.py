"""How soon the workbench can be used: `python -m bench.workbench [TURNS]`. Prints a table; asserts nothing.

A page of 1,000 models on `weft up`, in a real browser of this machine: what it loads, when it is painted first, and
when its first row is drawn. Each turn opens it twice, in a browser that has none of it and in one that has it. It needs
what `make test-workbench` installs.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.machine import describe_machine
from bench.start import PROGRAM

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parent.parent
TURNS = 15
MODELS = 1_000
PAGE = "/ui/models"
MAX_PAINT_MS = 500.0
MAX_KB = 60.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
)
FIRST_ROW = """
globalThis.firstRow = 0;
new MutationObserver((changes, observer) => {
  if (!document.querySelector("tbody tr")) return;
  observer.disconnect();
  requestAnimationFrame(() => (globalThis.firstRow = performance.now()));
}).observe(document, { childList: true, subtree: true });
"""
"""Notes when the first row of a table is about to be painted, from the beginning of the navigation."""
FIGURES = """() => {
  const files = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
  const own = files.filter((file) => new URL(file.name).pathname.startsWith("/ui/"));
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  return {
    row: globalThis.firstRow, paint: paint ? paint.startTime : null, files: own.length,
    kilobytes: own.reduce((sum, file) => sum + file.encodedBodySize, 0) / 1000,
    sent: own.reduce((sum, file) => sum + file.transferSize, 0) / 1000,
  };
}"""


def main(turns: int) -> None:
    """Measure and print."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    machine = describe_machine(ROOT)
    cold: list[dict[str, float]] = []
    warm: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, _mesh(Path(folder)) as url, sync_playwright() as playwright:
        program = next(filter(None, map(shutil.which, BROWSERS)))
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        for turn in range(turns + 1):
            context = browser.new_context()
            context.add_init_script(FIRST_ROW)
            first, again = _opened(context.new_page(), url), _opened(context.new_page(), url)
            context.close()
            if turn:  # the first one compresses the files of the page
                cold.append(first)
                warm.append(again)
        version = browser.version
        browser.close()
    kilobytes, files = cold[0]["kilobytes"], cold[0]["files"]
    rows = [
        ("files of the page, compressed", f"{kilobytes:.1f} kB in {files:.0f} files", f"at most {MAX_KB:g} kB"),
        ("of them sent again at the next visit", f"{median(each['sent'] for each in warm):.1f} kB", "-"),
        ("first paint, nothing kept", _spread(cold, "paint"), f"at most {MAX_PAINT_MS:g} ms"),
        ("first paint, files kept", _spread(warm, "paint"), f"at most {MAX_PAINT_MS:g} ms"),
        (f"first row of {MODELS} models, nothing kept", _spread(cold, "row"), "-"),
        ("first row, files kept", _spread(warm, "row"), "-"),
    ]
    lines = [
        "# The workbench before its first use",
        "",
        f"- commit: {machine.commit}",
        f"- machine: {machine.cpu}, {machine.cores} cores; {machine.kernel}; {machine.python}; Chromium {version}",
        f"- measured at {machine.date}; load average before the run: {machine.load_average:.2f}",
        f"- `{PAGE}`, {turns} turns: median (lowest to highest); browser and mesh share the machine",
        "",
        "| what | measured | goal |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _opened(page: "Page", url: str) -> dict[str, float]:
    page.goto(url + PAGE)
    page.wait_for_function("() => firstRow > 0 && performance.getEntriesByName('first-contentful-paint').length")
    found: dict[str, float] = page.evaluate(FIGURES)
    return found


def _spread(found: list[dict[str, float]], name: str) -> str:
    values = sorted(each[name] for each in found)
    return f"{median(values):.0f} ms ({values[0]:.0f} to {values[-1]:.0f})"


@contextmanager
def _mesh(home: Path) -> Iterator[str]:
    """A mesh that knows `MODELS` models: its address."""
    arguments = ("--home", str(home))
    subprocess.run(
        [*PROGRAM, "up", "-d", "--no-demo", "--port", "0", *arguments], check=True, stdout=subprocess.DEVNULL
    )
    try:
        documents = home / "models.yaml"
        names = (f"model-{number:04}" for number in range(MODELS))
        documents.write_text("".join(f"---\n{json.dumps({'kind': 'model', 'name': name})}\n" for name in names))
        subprocess.run([*PROGRAM, "apply", "-f", str(documents), *arguments], check=True, stdout=subprocess.DEVNULL)
        yield str(json.loads((home / "run" / "up.json").read_text())["url"])
    finally:
        subprocess.run([*PROGRAM, "stop", *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else TURNS)
