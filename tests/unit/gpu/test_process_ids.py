"""Processes of this machine by id and start time: real ones, started and ended here."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit.waiting import wait_until

from weft.client._lease_renewal import ProcessTree
from weft.gpu.process import is_alive, process_id_of, tree_of
from weft.gpu.snapshot import ProcessId

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@contextmanager
def _python(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `code`; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_process_identity_includes_its_start_time() -> None:
    mine = process_id_of(os.getpid())
    assert mine is not None
    assert is_alive(mine)
    assert not is_alive(ProcessId(mine.pid, mine.start_ticks + 1)), "the number, but another process"


def test_zombie_process_is_gone() -> None:
    with _python("input()") as process:
        found = process_id_of(process.pid)
        assert found is not None
        os.kill(process.pid, 9)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(found)
        assert Path(f"/proc/{process.pid}").exists(), "it is still a zombie"


def test_process_is_alive_after_its_first_thread_ended_while_another_runs() -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"  # exit, not exit_group: of this thread alone (x86-64)
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the number of the system call is that of x86-64")
    with _python(code) as process:
        found = process_id_of(process.pid)
        assert found is not None
        wait_until(lambda: ") Z " in Path(f"/proc/{process.pid}/stat").read_text())
        assert is_alive(found)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(found)


def test_process_name_may_contain_any_characters() -> None:
    with _python("import ctypes; ctypes.CDLL(None).prctl(15, b') Z 1 (x'); print('named', flush=True); input()") as one:
        assert _line(one) == "named"
        found = process_id_of(one.pid)
        mine = process_id_of(os.getpid())
        assert found is not None
        assert mine is not None
        assert found.start_ticks >= mine.start_ticks


_FAMILY = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL)\n"
    "print(child.pid, flush=True)\n"
    "sys.stdin.readline()\n"
)


def test_process_tree_is_the_process_and_its_descendants() -> None:
    with _python(_FAMILY) as process:
        child_pid = int(_line(process))
        root, child = process_id_of(process.pid), process_id_of(child_pid)
        assert root is not None
        assert child is not None
        try:
            assert tree_of(root) == tuple(sorted([root, child]))
            assert tree_of(ProcessId(root.pid, root.start_ticks + 1)) == ()
        finally:
            os.kill(child_pid, 9)


def test_orphaned_processes_are_tracked_until_they_end() -> None:
    with _python(_FAMILY) as process:
        child_pid = int(_line(process))
        root, child = process_id_of(process.pid), process_id_of(child_pid)
        assert root is not None
        assert child is not None
        tree = ProcessTree()
        assert tree.living() == ()
        tree.begin(root)
        assert tree.living() == (root, child)
        process.kill()
        process.wait()
        assert tree.living() == (child,)
        assert ProcessTree(root).living() == (), "who did not look before does not find it"
        os.kill(child_pid, 9)
        wait_until(lambda: tree.living() == ())
