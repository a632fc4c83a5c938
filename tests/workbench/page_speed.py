"""Speed of the workbench with 1,000 models and 10,000 requests, for bench/RESULTS.md. It is run by hand:

.venv/bin/python -m pytest -q -s -m workbench tests/workbench/page_speed.py
"""

import asyncio
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from mesh_process import POOL, fake_runner, running_mesh, write_config
from pages import finished
from test_models_added import LONG_TASKS, MANY, declare_many

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(900)]

REQUESTS, CONNECTIONS, ROUNDS = 10_000, 16, 5
PAINT_GOAL_MILLISECONDS, FRAME_GOAL_MILLISECONDS = 500, 100
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
SCROLL = """async (table) => {
  const frame = () => new Promise(requestAnimationFrame);
  const box = table.closest("[role=region]"), gaps = [];
  let last = await frame();
  for (let step = 0; step < 60; step += 1) {
    box.scrollBy(0, 700);
    const now = await frame();
    gaps.push(now - last);
    last = now;
  }
  return gaps.sort((left, right) => left - right);
}"""


async def _ask_many(url: str) -> None:
    body = {"model": POOL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    numbers = iter(range(REQUESTS))

    async def ask(http: aiohttp.ClientSession) -> None:
        for _ in numbers:
            async with http.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()

    async with aiohttp.ClientSession(url) as http:
        await asyncio.gather(*(ask(http) for _ in range(CONNECTIONS)))


def _measured(browser: "Browser", url: str, table: str) -> dict[str, float]:
    """The first paint of a new tab, when its rows are there, and how it scrolls, in milliseconds."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    try:
        page = context.new_page()
        page.add_init_script(LONG_TASKS)
        page.goto(url)
        figures: dict[str, Any] = {}
        if table:
            rows = page.get_by_role("table", name=table, exact=True)
            rows.locator("tbody tr:not(.spacer)").nth(5).wait_for()
            figures["rows"] = page.evaluate("performance.now()")
            figures["longest task of opening"] = max(page.evaluate("window.longTasks.splice(0)"), default=0)
            gaps = rows.evaluate(SCROLL)
            figures |= {"frame p50": gaps[len(gaps) // 2], "frame p95": gaps[int(len(gaps) * 0.95)]}
        else:
            page.get_by_role("heading", level=1).first.wait_for()
        return {"first paint": page.evaluate(PAINT), **figures}
    finally:
        context.close()


def test_pages_paint_and_scroll_within_their_goals(browser: "Browser", tmp_path: "Path") -> None:
    config = write_config(tmp_path, fake_runner("a", slots=CONNECTIONS, answer_tokens=1))
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        declare_many(mesh.url)
        finished(_ask_many(mesh.url))
        print(f"\n{MANY:,} models, {REQUESTS:,} requests, median (largest) of {ROUNDS} in ms")  # noqa: T201 - figures
        missed = []
        for path, table in (("", ""), ("models", "Models"), ("requests", "Requests")):
            rounds = [_measured(browser, f"{mesh.url}/ui/{path}", table) for _ in range(ROUNDS)]
            figures = {name: sorted(each[name] for each in rounds) for name in rounds[0]}
            told = ", ".join(f"{name} {median(found):.0f} ({found[-1]:.0f})" for name, found in figures.items())
            print(f"| /ui/{path} | {told} |")  # noqa: T201 - figures
            for name, goal in (("first paint", PAINT_GOAL_MILLISECONDS), ("frame p95", FRAME_GOAL_MILLISECONDS)):
                if median(figures.get(name, [0])) > goal:
                    missed.append(f"{name} of /ui/{path}")
        assert not missed, missed
