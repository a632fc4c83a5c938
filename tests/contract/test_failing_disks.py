"""Disks that are full, read-only, failing, slow, or cut off, under everything that weft writes."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from weft_testing.failing_disk import FailingDisk
from weft_testing.shared_library import compiler

HERE = Path(__file__).parent
MEMORY = Path("/dev/shm")
pytestmark = [
    pytest.mark.slow("each disk call of a program fails once"),
    pytest.mark.skipif(compiler() is None, reason="there is no C compiler"),
    pytest.mark.timeout(600),
]


def _run(tmp_path: Path, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program on a disk that it controls."""
    environment = {**os.environ, **FailingDisk(tmp_path).environment(), "PYTHONPATH": str(HERE)}
    # In memory, as the syncs of a real disk take most of the time, and prove nothing here.
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as work:
        command = [sys.executable, str(HERE / program), work, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _counts(ran: "subprocess.CompletedProcess[str]") -> dict[str, int]:
    """What a program has tried, by service."""
    assert ran.returncode == 0, _errors(ran)
    return {found[1]: int(found[2]) for found in re.finditer(r"^(\w+) (\d+)$", ran.stdout, re.MULTILINE)}


def _errors(ran: "subprocess.CompletedProcess[str]") -> str:
    return "\n".join(line for line in ran.stderr.splitlines() if "[error " not in line and "[warning " not in line)


@pytest.mark.parametrize(
    ("error", "calls", "is_torn"),
    [
        ("EIO", "one", "torn"),
        ("EIO", "all", "whole"),
        ("ENOSPC", "all", "whole"),
        ("EROFS", "all", "whole"),
    ],
)
def test_failed_disk_call_of_a_database_loses_no_acknowledged_write(
    tmp_path: Path, error: str, calls: str, is_torn: str
) -> None:
    counts = _counts(_run(tmp_path, "disk_databases.py", error, calls, is_torn))
    assert counts.keys() == {"router", "registry"}
    assert min(counts.values()) > 20, counts


def test_database_copied_or_cut_off_after_any_call_opens_with_everything_acknowledged(tmp_path: Path) -> None:
    counts = _counts(_run(tmp_path, "disk_images.py"))
    assert counts.keys() == {"router", "registry"}
    assert min(counts.values()) > 100, counts


def test_commits_that_do_not_wait_for_the_disk_are_detected(tmp_path: Path) -> None:
    """The control."""
    ran = _run(tmp_path, "disk_images.py", "unsynced")
    assert ran.returncode == 1
    assert "a power cut after call" in _errors(ran)


def test_file_is_an_old_or_a_new_version_after_any_failed_call_kill_or_power_cut(tmp_path: Path) -> None:
    ran = _run(tmp_path, "disk_files.py")
    assert ran.returncode == 0, _errors(ran)


def test_careless_writers_are_detected(tmp_path: Path) -> None:
    """The control."""
    found = _errors(_run(tmp_path, "disk_files.py", "careless"))
    assert "written over, crash_after_each_call: AssertionError: it is torn" in found
    assert "renamed unsynced, crash_after_each_call:" in found
