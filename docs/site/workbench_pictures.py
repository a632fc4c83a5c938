"""Takes the pictures of the workbench in docs, from a mesh of the demo model that answers real chats.

    python docs/site/workbench_pictures.py docs

Nothing in the pictures is written by hand. It needs a browser of the system (Debian: apt install chromium).
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

MODEL = "smollm2-135m"
QUESTIONS = (
    "Why is the sky blue?",
    "Name three rivers in France.",
    "What is a loom?",
    "Write a haiku about rain.",
    "How do bees find flowers?",
)
ROUNDS = 12
BESIDE = 6
"""Concurrent chats: more than the demo model has slots, so that some wait."""
PAUSE_SECONDS = 4.0
WIDTH, HEIGHT = 1280, 800
ACTION_MILLISECONDS = 60_000.0
OTHER_PAGES = ("requests", "tasks", "usage", "models", "memory", "runners", "operations", "settings")


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    """Returns the JSON answer of a call."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        return json.load(answer)


def make_traffic(url: str) -> None:
    """Sends chats for about a minute, so that the charts have something to show."""
    with ThreadPoolExecutor(BESIDE) as pool:
        for number in range(ROUNDS):
            for index in range(1 + number * BESIDE // ROUNDS):
                question = QUESTIONS[(number + index) % len(QUESTIONS)]
                body = {"model": MODEL, "max_tokens": 48, "messages": [{"role": "user", "content": question}]}
                pool.submit(call, f"{url}/v1/chat/completions", body)
            time.sleep(PAUSE_SECONDS)


def take(page: Page, url: str, folder: Path) -> None:
    """Takes each picture."""
    page.goto(f"{url}/ui/")
    page.get_by_text("Tokens per second").wait_for()
    time.sleep(2.0)
    page.screenshot(path=folder / "workbench-overview.png")
    page.goto(f"{url}/ui/chat?model={MODEL}")
    message = page.get_by_role("textbox", name="Message")
    message.fill(QUESTIONS[0])
    message.press("Enter")
    receipt = page.get_by_role("article").last.get_by_text("completed")
    receipt.wait_for()
    receipt.click()
    time.sleep(1.0)
    page.screenshot(path=folder / "workbench-chat.png")
    ended = call(f"{url}/v1/requests?state=completed")["items"]
    waited = max(ended, key=lambda each: float(each["receipt"].get("queueWaitSeconds", 0)))
    page.goto(f"{url}/ui/requests/{waited['requestId']}")
    page.get_by_role("heading", name="Timeline").wait_for()
    time.sleep(1.0)
    page.screenshot(path=folder / "workbench-request.png")
    for name in OTHER_PAGES:
        page.goto(f"{url}/ui/{name}")
        page.get_by_role("heading", level=1).first.wait_for()
        page.locator(".skeleton").first.wait_for(state="detached")
        time.sleep(1.0)
        page.screenshot(path=folder / f"workbench-{name}.png")


def main(folder: Path) -> None:
    """Runs the mesh, and takes the pictures."""
    weft = Path(sys.executable).parent / "weft"
    browser_program = shutil.which("chromium")
    if browser_program is None:
        sys.exit("there is no chromium; on Debian: apt install chromium")
    with tempfile.TemporaryDirectory() as root:
        home = ["--home", str(Path(root) / "home")]
        subprocess.run([weft, "up", "-d", "--port", "8099", *home], check=True, cwd=root)  # noqa: S603
        try:
            url = "http://127.0.0.1:8099"
            make_traffic(url)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=browser_program, args=["--no-sandbox"])
                page = browser.new_page(
                    viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", locale="en-GB", timezone_id="UTC"
                )
                page.set_default_timeout(ACTION_MILLISECONDS)
                take(page, url, folder)
                browser.close()
        finally:
            subprocess.run([weft, "stop", *home], check=True, cwd=root)  # noqa: S603


if __name__ == "__main__":
    main(Path(sys.argv[1]))
