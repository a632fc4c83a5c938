"""The databases of an earlier release are opened and served: what it showed of them is what is shown today."""

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from filled_mesh import ABSENT, kept_config, restore, shown
from mesh_process import running_mesh

RELEASES = sorted((Path(__file__).parents[1] / "corpus" / "databases").iterdir())
_UNMOVED = ("audit", "verdict", "responses", "batches", "inputs", "contents")
"""What holds its times within texts and messages, which are restored as they were."""


@pytest.mark.nightly("a second release")
@pytest.mark.parametrize("release", RELEASES, ids=lambda folder: folder.name)
def test_mesh_shows_everything_from_databases_of_an_earlier_release(release: Path, tmp_path: Path) -> None:
    kept = json.loads((release / "shown.json").read_text())
    passed = int(time.time()) - kept["seconds"]
    home = tmp_path / "home"
    restore(release, home, passed)
    with running_mesh(home, "--config", str(kept_config(tmp_path))) as mesh:
        found = shown(mesh)
        assert found.keys() == kept["shown"].keys()
        for name, expected in kept["shown"].items():
            moved = expected if name in _UNMOVED else later(expected, passed)
            assert settled(found[name]) == settled(moved), name


def settled(value: Any) -> Any:
    """Without what says why a task waits, which is known some moments after a start, and the digest of our script."""
    if isinstance(value, dict):
        unsettled = {"waiting_for", "digest"} if value.get("upstream") == "mesh_process.py" else {"waiting_for"}
        return {key: settled(part) for key, part in value.items() if key not in unsettled}
    return [settled(part) for part in value] if isinstance(value, list) else value


def later(value: Any, seconds: int, name: str = "") -> Any:
    """The same with all times later by `seconds`."""
    if isinstance(value, dict):
        return {key: later(part, seconds, key) for key, part in value.items()}
    if isinstance(value, list):
        return [later(part, seconds) for part in value]
    if not (name.endswith(("_at", "At", "Time")) or name == "created") or value is None:
        return value
    if isinstance(value, int):
        return value + seconds
    moment = datetime.fromisoformat(value) + timedelta(seconds=seconds)
    fraction = value.partition(".")[2]
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S") + (f".{fraction}" if fraction else "Z")


def test_sample_databases_contain_every_kind() -> None:
    for release in RELEASES:
        held = json.loads((release / "shown.json").read_text())["shown"]
        assert all(held.values())
        assert {task["state"] for task in held["tasks"]} == {"pending", "completed", "failed", "cancelled"}
        assert {model["name"] for model in held["models"]} >= {ABSENT, "m-asleep", "m-card", "m-program"}
