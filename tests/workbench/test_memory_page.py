"""The page of memory in a real browser: devices as bars, who waits, and the release of a program's lease."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mesh_process import WEFT, MeshProcess, fake_runner, running_mesh, user_environment, write_config
from pages import accessibility_faults, opened, picture

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

BUDGET = {"declared": [{"name": "budget", "memory_mb": 3000}]}
GIB = 1024**3
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A declared device of 3,000 MB, on which one model is loaded."""
    folder = tmp_path_factory.mktemp("memory")
    runner = fake_runner("box", pool="")
    runner["models"] = [{"name": "first", "path": __file__, "slots": 2, "memory_mb": 600}]
    config = write_config(folder, runner, accelerators=BUDGET)
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@contextmanager
def program(mesh: MeshProcess, folder: Path, purpose: str, memory: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A program that asks for memory and holds it until it is ended."""
    wanted = ["--memory", memory, "--purpose", purpose, "--wait", "2h"]
    with (folder / f"{len(purpose)}.log").open("wb") as output:
        process = subprocess.Popen(
            [*WEFT, "mesh", "lease", "acquire", "--home", str(mesh.home), *wanted, "--", "sleep", "600"],
            env=user_environment(),
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def test_device_shows_holders_and_waiters_and_a_program_lease_can_be_released(
    page: "Page", mesh: MeshProcess, tmp_path: Path
) -> None:
    opened(page, mesh, "memory", "Memory")
    leases = page.get_by_role("table")
    leases.get_by_role("link", name="first", exact=True).wait_for()
    with program(mesh, tmp_path, HOSTILE, "1200MiB") as training:
        row = leases.get_by_role("row").filter(has_text=HOSTILE)
        row.wait_for()
        assert page.get_by_role("img", name=f"{HOSTILE} 1.2 GiB").count() == 1
        assert leases.get_by_role("button", name="Release").count() == 1
        with program(mesh, tmp_path, "evaluation", "2000MiB"):
            waiting = page.get_by_role("list", name="Waiting for memory").get_by_role("listitem")
            waiting.filter(has_text="evaluation").wait_for()
            assert "2.0 GiB for" in waiting.inner_text()
            picture(page, "memory_waiting")
            row.get_by_role("button", name="Release").click()
            dialog = page.get_by_role("dialog", name=f"Release: {HOSTILE}")
            assert "weft mesh lease release lease-" in dialog.inner_text()
            dialog.get_by_role("button", name="Release").click()
            waiting.wait_for(state="detached", timeout=60_000)
            leases.get_by_role("row").filter(has_text="evaluation").wait_for(timeout=60_000)
            assert training.wait(60) != 0


def lease(purpose: str, device: int, size: int, **facts: Any) -> dict[str, Any]:
    return {
        "leaseId": f"lease-{purpose}", "fencingNumber": 1, "holderKind": "runner", "holder": "titan",
        "purpose": purpose, "bytesByDevice": {str(device): size}, "state": "held", "priority": "normal",
        "pinned": False, "activeRequests": 0, "createdAt": "2026-11-22T08:00:00Z", "seenBytes": size, **facts,
    }  # fmt: skip


def device(index: int, **facts: Any) -> dict[str, Any]:
    return {
        "index": index, "id": f"GPU-{index}", "name": "NVIDIA H100 80GB HBM3", "totalBytes": 80 * GIB,
        "bookedBytes": 0, "freeBytes": 79 * GIB, "marginBytes": GIB // 2, **facts,
    }  # fmt: skip


def two_hosts() -> list[dict[str, Any]]:
    """A host of two devices in use, and one whose driver does not answer."""
    held = [
        lease("qwen-32b", 0, 41 * GIB, activeRequests=3),
        lease("embedder", 0, 6 * GIB, pinned=True),
        lease("nightly training", 1, 30 * GIB, holderKind="program", holder="train-7"),
        lease("llama-8b", 1, 18 * GIB, state="releasing"),
    ]
    busy = {"bookedBytes": 47 * GIB, "usedBytes": 52 * GIB, "foreignBytes": 6 * GIB, "freeBytes": 27 * GIB}
    other = {"bookedBytes": 48 * GIB, "usedBytes": 44 * GIB, "foreignBytes": 0, "freeBytes": 32 * GIB}
    devices = [
        device(0, **busy, utilization=0.83, powerMilliwatts=512_000),
        device(1, **other, utilization=0.12, powerMilliwatts=140_000),
    ]
    waits = [
        {
            "holderKind": "runner", "holder": "titan", "purpose": "mixtral-8x7b", "bytes": 48 * GIB, "priority": "high",
            "detail": "needs 48.0 GiB on titan, 32.0 GiB free, held by nightly training (program)",
            "remainingWaitSeconds": 250, "deviceIndexes": [1],
        }
    ]  # fmt: skip
    titan = {"host": "titan", "source": "nvml", "devices": devices, "leases": held, "waitingCount": 9, "waits": waits}
    box = {"host": "box", "source": "unknown", "devices": [device(0)], "leases": [], "waitingCount": 0, "waits": []}
    return [titan, box]


def shown(page: "Page", hosts: list[dict[str, Any]]) -> None:
    """Answers the page's watch with these hosts; it is read again after its end, with the same."""
    changes: list[dict[str, Any]] = [
        {"kind": "memory", "change": "put", "name": host["host"], "object": host} for host in hosts
    ]
    changes += [{"kind": kind, "change": "synced"} for kind in ("memory", "model")]
    body = "".join(f"data: {json.dumps(change)}\n\n" for change in changes)

    def answer(route: "Route") -> None:
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/api/v1/watch?*", answer)


def test_bars_show_reserved_and_used_memory(page: "Page", mesh: MeshProcess) -> None:
    shown(page, two_hosts())
    opened(page, mesh, "memory", "Memory")
    titan = page.get_by_role("region", name="titan", exact=True)
    titan.wait_for()
    bar = "NVIDIA H100 80GB HBM3, reserved: qwen-32b 41.0 GiB, embedder 6.0 GiB, kept free 512 MiB"
    assert titan.get_by_role("img", name=bar, exact=True).count() == 1
    assert titan.get_by_role("img", name="in use: by leases 46.0 GiB, without a lease 6.0 GiB").count() == 1
    text = titan.inner_text()
    for words in ("27.0 GiB free of 80.0 GiB · 83 % busy · 512 W", "Processes without a lease use 6.0 GiB"):
        assert words in text
    assert "48.0 GiB for titan · on device 1 · high priority · times out in 4 min 10 s" in text
    assert "and 8 more" in text
    assert "last known sizes" in page.get_by_role("region", name="box", exact=True).inner_text()
    assert titan.get_by_role("button", name="Release").count() == 1
    picture(page, "memory")
    page.set_viewport_size({"width": 390, "height": 800})
    picture(page, "memory_narrow")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 1280, "height": 800})
    picture(page, "memory_dark")


def test_mesh_without_accelerators_shows_what_to_do(page: "Page", mesh: MeshProcess) -> None:
    shown(page, [])
    opened(page, mesh, "memory", "Memory")
    page.get_by_text("No runner has reported an accelerator").wait_for()


def test_memory_page_has_no_accessibility_violations(browser: "Browser", mesh: MeshProcess, tmp_path: Path) -> None:
    url = f"{mesh.url}/ui/memory"

    def ready(page: "Page") -> None:
        page.get_by_role("table").get_by_role("row").filter(has_text="training").wait_for()

    with program(mesh, tmp_path, "training", "300MiB"):
        for theme in ("light", "dark"):
            for width in (1280, 390):
                assert accessibility_faults(browser, url, theme=theme, width=width, after=ready) == []


def test_saved_prompts_are_shown_with_their_limits(page: "Page", mesh: MeshProcess) -> None:
    cache = {"keptPromptCount": 2, "keptBytes": 3 * GIB, "keptLimitBytes": 4 * GIB, "storedPromptCount": 5}
    cache |= {"storedBytes": GIB, "storedLimitBytes": 2 * GIB}
    members = [{"model": "qwen", "runner": "titan", "cache": cache}, {"model": "asleep", "runner": "titan"}]
    answer = json.dumps({"items": [{"replicas": {"members": members}}]})
    page.route("**/v1/admin/models", lambda route: route.fulfill(body=answer, content_type="application/json"))
    opened(page, mesh, "memory", "Memory")
    rows = page.get_by_role("table", name="Saved prompts").get_by_role("row")
    rows.last.wait_for()
    assert rows.count() == 2, "the header and one model"
    text = rows.last.inner_text()
    for words in ("2: 3.0 GiB of 4.0 GiB", "5: 1.0 GiB of 2.0 GiB, shared by the runner's models"):
        assert words in text
