"""What tests of the workbench's chat do: change the fakes behind a mesh, send a message, and find its answer."""

from typing import TYPE_CHECKING, Any

from mesh_process import MeshProcess
from pages import finished

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def behave(mesh: MeshProcess, runner: str, **switches: Any) -> None:
    """Changes the fake behind a runner."""

    async def change() -> None:
        async with await mesh.backend(runner) as backend:
            await backend.set_behaviour(**switches)

    finished(change())


def until_idle(mesh: MeshProcess, runner: str) -> Any:
    """Waits until no slot of the fake is busy; its state."""

    async def wait() -> Any:
        async with await mesh.backend(runner) as backend:
            return await backend.wait_for_state(lambda state: state.busy_slots == 0 and state.active_requests == 0)

    return finished(wait())


def asked(page: "Page", text: str) -> "Locator":
    """Sends a message; the answer to it."""
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")
    page.locator(".said", has_text=text).last.wait_for()
    return page.get_by_role("article").last
