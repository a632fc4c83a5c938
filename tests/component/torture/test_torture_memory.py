"""The memory of a process, as runs with faults record it."""

import mmap
import os
from pathlib import Path

from tools.torture.growth import written_bytes

SIZE = 32 * 1024 * 1024


def test_mapped_model_file_is_no_memory_of_its_process_and_what_it_writes_is(tmp_path: Path) -> None:
    """A run reported growth when the last other process on the machine that mapped the same file had ended."""
    (tmp_path / "model").write_bytes(b"1" * SIZE)
    with (tmp_path / "model").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as model:
        before = written_bytes(os.getpid())
        assert model.find(b"2") == -1, "all its pages are resident"
        assert written_bytes(os.getpid()) - before < SIZE / 2
        written = bytearray(b"1" * SIZE)
        assert written_bytes(os.getpid()) - before > SIZE * 0.9
        del written
