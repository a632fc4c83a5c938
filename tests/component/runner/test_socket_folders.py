"""Socket folders of runners that were killed are removed by the next start, and those of living ones never."""

import errno
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.failures import fails

from runner_svc.supervise import socket_folder
from runner_svc.supervise.socket_folder import LOCK, SocketFolder, remove_stale
from weft.kernel.errors.reasons import Reason

PREFIX = "weft-test-socket-"
HOLD = f"""
import time
from runner_svc.supervise.socket_folder import SocketFolder
print(SocketFolder({PREFIX!r}).path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    tempfile.tempdir = None


def _holder() -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        return process, Path(output.readline().strip())


def test_folder_of_a_killed_runner_is_removed_and_that_of_a_live_one_remains() -> None:
    killed, stale = _holder()
    living, used = _holder()
    try:
        (stale / "socket").touch()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        own = SocketFolder(PREFIX)
        assert not stale.exists()
        assert used.is_dir()
        assert own.path.is_dir()
        assert remove_stale(PREFIX) == [], "its own lock is held too"
        own.remove()
        own.remove()
        assert not own.path.exists()
    finally:
        living.kill()
        living.wait()


def test_folder_not_known_to_be_stale_is_left_untouched(tmp_path: Path) -> None:
    unlocked = tmp_path / f"{PREFIX}new"
    unlocked.mkdir()
    link = tmp_path / f"{PREFIX}link"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / LOCK).touch()
    link.symlink_to(tmp_path / "elsewhere")
    other = tmp_path / "weft-other"
    other.mkdir()
    (other / LOCK).touch()
    assert remove_stale(PREFIX) == []
    assert unlocked.is_dir()
    assert (tmp_path / "elsewhere").is_dir()
    assert other.is_dir()
    (unlocked / LOCK).touch()
    assert remove_stale(PREFIX) == [unlocked], "the control"


def test_folder_that_cannot_be_locked_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk every load left a folder, which none removed later: it has no lock."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(socket_folder, "lock_file", refuse)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    with fails(Reason.CONNECT_FAILED) as failed:
        SocketFolder(PREFIX)
    assert "No space left" in failed.value.message
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == opened


def test_folder_is_accessible_only_to_its_user() -> None:
    folder = SocketFolder(PREFIX)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
