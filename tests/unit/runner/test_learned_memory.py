"""Measured memory of loads, in a file that may be lost, damaged or large without harm."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from runner_svc.memory import learned_memory as learned_module
from runner_svc.memory.learned_memory import (
    MAX_BYTES,
    MAX_ENTRIES,
    MAX_FILE_BYTES,
    MAX_MEASUREMENTS,
    FileIdentity,
    LearnedMemory,
    learned_file,
)
from runner_svc.policy.memory_estimate import MemorySettings

FILE = FileIdentity(path="/models/m.gguf", bytes=1000, modified_ns=1)
SETTINGS = MemorySettings(context_tokens=2048, slots=4)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return learned_file(tmp_path / "state", "local")


def test_measurement_survives_a_restart(state: Path) -> None:
    LearnedMemory(state).learn(FILE, SETTINGS, 500)
    assert tuple(LearnedMemory(state).measurements(FILE, SETTINGS)) == (500,)


def test_measurement_of_a_file_below_a_name_that_is_not_text_is_kept(state: Path) -> None:
    """A link led to it; the estimate raised, and no load of the model began."""
    odd = replace(FILE, path=os.fsdecode(b"/models/caf\xe9/m.gguf"))
    both = replace(odd, companions=(odd,))
    LearnedMemory(state).learn(both, SETTINGS, 500)
    assert tuple(LearnedMemory(state).measurements(both, SETTINGS)) == (500,)


@pytest.mark.parametrize(
    "other",
    [replace(FILE, path="/models/n.gguf"), replace(FILE, bytes=1001), replace(FILE, modified_ns=2)],
)
def test_measurement_does_not_apply_to_another_file(state: Path, other: FileIdentity) -> None:
    memory = LearnedMemory(state)
    memory.learn(FILE, SETTINGS, 500)
    assert not memory.measurements(other, SETTINGS)


@pytest.mark.parametrize("name", MemorySettings.__slots__)
def test_measurements_are_kept_per_settings(state: Path, name: str) -> None:
    memory = LearnedMemory(state)
    memory.learn(FILE, SETTINGS, 500)
    value = getattr(SETTINGS, name)
    other = "f32" if isinstance(value, str) else not value if isinstance(value, bool) else value + 1
    changes: dict[str, Any] = {name: other}
    assert not memory.measurements(FILE, replace(SETTINGS, **changes))
    assert memory.measurements(FILE, SETTINGS)


def test_only_the_last_measurements_are_kept(state: Path) -> None:
    memory = LearnedMemory(state)
    for size in range(1, MAX_MEASUREMENTS + 3):
        memory.learn(FILE, SETTINGS, size)
    assert tuple(memory.measurements(FILE, SETTINGS)) == (3, 4, 5, 6)


@pytest.mark.parametrize("size", [0, -1, MAX_BYTES + 1])
def test_implausible_measurement_is_ignored(state: Path, size: int) -> None:
    memory = LearnedMemory(state)
    memory.learn(FILE, SETTINGS, size)
    assert not memory.measurements(FILE, SETTINGS)
    assert not state.exists()


def test_least_recently_loaded_file_is_evicted(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_module, "MAX_ENTRIES", 3)
    memory = LearnedMemory(state)
    files = [replace(FILE, path=f"/models/{number}.gguf") for number in range(4)]
    for one in (*files[:3], files[0], files[3]):
        memory.learn(one, SETTINGS, 100)
    again = LearnedMemory(state)
    assert [bool(again.measurements(one, SETTINGS)) for one in files] == [True, False, True, True]


def test_largest_written_file_can_be_read(state: Path) -> None:
    memory = LearnedMemory(state)
    files = [replace(FILE, path=f"/{number:04d}" + "\u00e4" * 5000) for number in range(MAX_ENTRIES)]
    for one in files:
        memory.learn(one, SETTINGS, MAX_BYTES)
    for _ in range(MAX_MEASUREMENTS):
        memory.learn(files[-1], SETTINGS, MAX_BYTES)
    assert state.stat().st_size < MAX_FILE_BYTES // 4
    again = LearnedMemory(state)
    assert [len(again.measurements(one, SETTINGS)) for one in files] == [1] * (MAX_ENTRIES - 1) + [MAX_MEASUREMENTS]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"KEY": []}',
        b'{"KEY": [-5]}',
        b'{"KEY": [1e300]}',
        b'{"": [5]}',
        msgspec.json.encode({f"{number:064}": [5] for number in range(257)}),
        b"[" * 500_000,
        b" " * (MAX_FILE_BYTES + 1),
    ],
)
def test_corrupt_file_is_reset_with_a_warning(state: Path, content: bytes) -> None:
    state.parent.mkdir()
    state.write_bytes(content.replace(b"KEY", b"0" * 64))
    memory = LearnedMemory(state)
    with capture_logs() as logs:
        assert not memory.measurements(FILE, SETTINGS)
    assert [entry["log_level"] for entry in logs] == ["warning"]
    memory.learn(FILE, SETTINGS, 500)
    assert tuple(LearnedMemory(state).measurements(FILE, SETTINGS)) == (500,)


def test_missing_file_is_not_logged(state: Path) -> None:
    with capture_logs() as logs:
        assert not LearnedMemory(state).measurements(FILE, SETTINGS)
    assert not logs


def test_unwritable_file_does_not_fail_a_load(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    memory = LearnedMemory(learned_file(tmp_path / "state", "local"))
    with capture_logs() as logs:
        memory.learn(FILE, SETTINGS, 500)
    assert "warning" in {entry["log_level"] for entry in logs}
    assert tuple(memory.measurements(FILE, SETTINGS)) == (500,), "this life knows it all the same"


def test_interrupted_write_keeps_the_old_file(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = LearnedMemory(state)
    memory.learn(FILE, SETTINGS, 500)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        memory.learn(FILE, SETTINGS, 900)
    assert tuple(LearnedMemory(state).measurements(FILE, SETTINGS)) == (500,)
    assert [path.name for path in state.parent.iterdir()] == [state.name], "no part of a file is left"


def test_concurrently_learning_threads_lose_no_measurement(state: Path) -> None:
    memory = LearnedMemory(state)
    files = [replace(FILE, path=f"/models/{number}.gguf") for number in range(16)]
    threads = [threading.Thread(target=memory.learn, args=(one, SETTINGS, 100)) for one in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = LearnedMemory(state)
    assert all(tuple(again.measurements(one, SETTINGS)) == (100,) for one in files)
