"""The mesh of one command: whether one runs on the home already, and what is said where none can be started."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen

import pytest
from kit.failures import fails

from weft.client._home import DEFAULT_HOME
from weft.kernel.errors.reasons import Reason
from weft_app.cli.background import MAX_READ_BYTES, is_mesh_running, session_mesh, written_lines
from weft_app.compose.home import RUNNING, STARTING, WeftHome

FACTS = {"url": "http://127.0.0.1:9", "grpc": "127.0.0.1:9"}


@pytest.fixture
def home(tmp_path: Path) -> WeftHome:
    home = WeftHome(tmp_path / "home")
    home.create()
    return home


def test_empty_home_has_no_mesh(tmp_path: Path) -> None:
    assert not is_mesh_running(WeftHome(tmp_path / "none"))


def test_announced_and_locked_mesh_is_running_and_a_killed_one_is_not(home: WeftHome) -> None:
    with home.claim():
        home.announce(FACTS)
        assert is_mesh_running(home)
        left = home.up_file.read_bytes()
    home.up_file.write_bytes(left)
    assert not is_mesh_running(home)


def test_starting_mesh_is_awaited(home: WeftHome) -> None:
    with ThreadPoolExecutor(1) as pool, home.claim():
        found = pool.submit(is_mesh_running, home)
        home.announce(FACTS)
        assert found.result(30)


def test_mesh_with_loading_models_is_awaited(home: WeftHome) -> None:
    with ThreadPoolExecutor(1) as pool, home.claim():
        home.announce({**FACTS, "state": STARTING})
        found = pool.submit(is_mesh_running, home)
        with pytest.raises(TimeoutError):
            found.result(0.2)
        home.announce({**FACTS, "state": RUNNING})
        assert found.result(30)


def test_mesh_that_exits_during_startup_does_not_count(home: WeftHome) -> None:
    with ThreadPoolExecutor(1) as pool:
        with home.claim():
            found = pool.submit(is_mesh_running, home)
        assert not found.result(30)


def test_remote_mesh_from_the_environment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WEFT_REGISTRY", "127.0.0.1:9")
    assert is_mesh_running(WeftHome(DEFAULT_HOME.expanduser().absolute()))
    assert not is_mesh_running(WeftHome(tmp_path / ".weft"))


def test_reason_of_a_crash_is_read_after_much_output_and_without_a_line_break(tmp_path: Path) -> None:
    output = tmp_path / "up.out"
    output.write_text("line\n" * MAX_READ_BYTES + "MemoryError")
    with Popen(["true"]) as ended:
        pass
    lines = list(written_lines(ended, output, math.inf))
    assert lines == ["line"] * MAX_READ_BYTES + ["MemoryError"]


@pytest.mark.slow("imports all of a mesh")
def test_invalid_config_error_names_the_position(home: WeftHome, tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("runners: [{name: box, models: []}]\n")
    with fails(Reason.SERVICE_UNAVAILABLE, "runners.0.models: ") as refused, session_mesh(home, file):
        pass
    assert refused.value.message.startswith(f"no mesh could be started on {home.root}: ")
    assert not home.is_claimed()
