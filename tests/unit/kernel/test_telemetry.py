"""Trace context and log files."""

import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from weft.kernel.telemetry.structured_logs import (
    FOLLOW_SECONDS,
    BoundedLogFile,
    new_traceparent,
    trace_id_of,
    traceparent_of,
    valid_traceparent,
)

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_caller_traceparent_is_forwarded() -> None:
    assert traceparent_of({"traceparent": GOOD}) == GOOD


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "nonsense",
        GOOD[:-1],
        GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        "00-x-y-01",
        # Regression: these were forwarded, and gRPC cannot send them.
        f"01{GOOD[2:]}-caf\xe9",
        f"01{GOOD[2:]}-a\tb",
    ],
)
def test_invalid_traceparent_is_replaced_by_a_new_one(broken: str) -> None:
    replaced = traceparent_of({"traceparent": broken})
    assert replaced != broken
    assert valid_traceparent(replaced) == replaced


def test_new_trace_ids_differ() -> None:
    assert trace_id_of(new_traceparent()) != trace_id_of(new_traceparent())


def test_full_log_file_is_rotated_without_splitting_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    log = BoundedLogFile(path, max_bytes=100)
    for number in range(30):
        log.write(f"line {number:04}\n")
    log.close()
    kept = path.read_text() + path.with_name("x.log.1").read_text()
    assert path.stat().st_size <= 110
    assert all(line.startswith("line ") and len(line) == 9 for line in kept.splitlines())


def test_full_disk_loses_only_log_lines_and_reports_their_number(tmp_path: Path) -> None:
    """The limit on the size of files stands for the disk: a write comes to its end in mid-line and fails after that."""
    program = f"""
import resource
from pathlib import Path
from weft.kernel.telemetry.structured_logs import BoundedLogFile
log = BoundedLogFile(Path({str(tmp_path / "log")!r}), 100_000)
log.write("before\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
for _ in range(3):
    log.write("lost\\n")
assert log.dropped == 3
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.write("after\\n")
assert log.dropped == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["before", "los", '{"event": "log lines were dropped", "count": 3}', "after"]


def test_moved_or_removed_log_file_is_recreated(tmp_path: Path) -> None:
    """logrotate moves it; later lines went to the moved file, or to a removed one that nobody can read."""
    path = tmp_path / "logs" / "x.log"
    path.parent.mkdir()
    times = count(step=FOLLOW_SECONDS)
    log = BoundedLogFile(path, max_bytes=1000, monotonic=lambda: next(times))
    log.write("one\n")
    path.rename(path.with_name("x.log.old"))
    log.write("two\n")
    assert (path.with_name("x.log.old").read_text(), path.read_text()) == ("one\n", "two\n")
    path.unlink()
    log.write("three\n")
    assert path.read_text() == "three\n"
    shutil.rmtree(path.parent)
    log.write("four\n")
    log.close()
    assert path.read_text() == "four\n"


def test_log_file_is_looked_up_once_per_second_and_before_a_rotation(tmp_path: Path) -> None:
    path, old = tmp_path / "x.log", tmp_path / "x.log.old"
    log = BoundedLogFile(path, max_bytes=10, monotonic=lambda: 0.5)
    log.write("one\n")
    path.rename(old)
    log.write("two and more\n")
    assert not path.exists()
    log.write("three\n")
    log.close()
    assert (old.read_text(), path.read_text()) == ("one\ntwo and more\n", "three\n")
    assert not path.with_name("x.log.1").exists()


def test_truncated_log_file_is_written_from_its_start(tmp_path: Path) -> None:
    """As logrotate does with copytruncate."""
    path = tmp_path / "x.log"
    log = BoundedLogFile(path, max_bytes=100)
    for _ in range(20):
        log.write("a line of 19 chars.\n")
        path.write_text("")
    log.write("last\n")
    log.close()
    assert path.read_text() == "last\n"
    assert not path.with_name("x.log.1").exists()


def test_log_continues_in_the_moved_file_if_no_new_one_can_be_created(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    log = BoundedLogFile(path, max_bytes=1000)
    path.rename(path.with_name("x.log.old"))
    path.mkdir()
    log.write("one\n")
    log.close()
    assert path.with_name("x.log.old").read_text() == "one\n"
