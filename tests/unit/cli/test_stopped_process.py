"""`weft stop` signals the process that holds the lock of a home, and no other one whose id is in it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import lock_file
from weft_app.cli.stop import send
from weft_app.compose.home import WeftHome

HOLDS = "import sys; opened = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which files a process has opened")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[WeftHome]:
    home = WeftHome(tmp_path)
    home.create()
    with home.lock_file.open("w") as lock:
        lock_file(lock)
        yield home


def _process(file: Path) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", HOLDS, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_process_that_holds_the_lock_is_ended(home: WeftHome) -> None:
    with _process(home.lock_file) as process:
        send(process.pid, signal.SIGTERM, home)
        assert process.wait(10) == -signal.SIGTERM


@LINUX
@pytest.mark.parametrize("is_link", [False, True], ids=["another file", "the lock is a link to its file"])
def test_another_process_is_not_signalled(home: WeftHome, tmp_path: Path, is_link: bool) -> None:
    other = tmp_path / "other"
    if is_link:
        home.lock_file.rename(other)
        home.lock_file.symlink_to(other)
    else:
        other.touch()
    with _process(other) as process:
        with pytest.raises(WeftError, match="does not run the mesh") as refused:
            send(process.pid, signal.SIGTERM, home)
        assert process.poll() is None
        process.communicate(timeout=10)
    assert refused.value.reason is Reason.PERMISSION_DENIED


@LINUX
def test_own_group_of_processes_is_not_signalled(home: WeftHome) -> None:
    with pytest.raises(WeftError, match="does not run the mesh"):
        send(0, signal.SIGTERM, home)


def test_process_that_has_ended_needs_no_signal(tmp_path: Path) -> None:
    send(0, signal.SIGTERM, WeftHome(tmp_path))
