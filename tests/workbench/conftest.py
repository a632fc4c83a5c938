"""The browser and the mesh of the workbench's tests.

Tests use Playwright's blocking API, as a person clicks: nothing of asyncio runs in their thread. The browser is the one
of the system (Debian: apt install chromium), or else the one that the clients' tests install.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / ".workbench" / "screenshots"
SYSTEM_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ACTION_MILLISECONDS = 15_000.0
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1 , EXCLUDE localhost",
)  # fmt: skip
"""What is told to others than the mesh fails at once."""


@pytest.fixture(scope="session")
def browser_program() -> tuple[str, dict[str, str]]:
    """The browser and its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.upper().endswith("_PROXY")}
    found = next(filter(None, map(shutil.which, SYSTEM_BROWSERS)), None)
    if found is not None:
        return found, environment
    sys.path.append(str(ROOT / "tests" / "clients"))
    from client_environments import BROWSER, EnvironmentFactory  # noqa: PLC0415

    environments = EnvironmentFactory()
    try:
        installed = environments.get(BROWSER).browser
    finally:
        environments.close()
    return installed["WEFT_BROWSER"], environment | {"LD_LIBRARY_PATH": installed["WEFT_BROWSER_LIBRARIES"]}


@pytest.fixture(scope="module")
def browser(browser_program: tuple[str, dict[str, str]]) -> Iterator["Browser"]:
    from playwright.sync_api import expect, sync_playwright  # noqa: PLC0415

    program, environment = browser_program
    # Its own limit, 5 s, is the time between two reports of a runner, which bring some of what is expected.
    expect.set_options(timeout=ACTION_MILLISECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS), env={**environment})
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "Browser") -> Iterator["Page"]:
    """A tab of its own. Whatever the page reports to the console as an error fails the test.

    Answers of the mesh that a test provokes are shown there as well: those of the API are no fault of the page.
    """
    context = browser.new_context(locale="en-GB", timezone_id="UTC", viewport={"width": 1280, "height": 800})
    context.set_default_timeout(ACTION_MILLISECONDS)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"{error}\n{error.stack}"))
    page.on(
        "console",
        lambda message: (
            faults.append(message.text)
            if message.type == "error" and not message.text.startswith("Failed to load resource")
            else None
        ),
    )
    yield page
    # A request of the page that a test's route answers may still be under way.
    if not page.is_closed():
        page.unroute_all(behavior="ignoreErrors")
    context.close()
    assert not faults, faults


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh of two models on fake backends, without keys."""
    folder = tmp_path_factory.mktemp("workbench")
    config = write_config(folder, fake_runner("a"), fake_runner("b", pool="other"))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh
