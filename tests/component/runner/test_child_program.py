"""Programs of installations and pulls: their output reaches the reader complete, and the reader's errors the caller."""

import asyncio
import errno
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from runner_svc.supervise.child_program import run_program

LONG = 30_000


async def _run(code: str, read: Callable[[str], object], folder: Path) -> str:
    return await run_program([sys.executable, "-S", "-c", code], read, variables={}, folder=folder)


async def test_last_line_without_a_newline_was_not_read(tmp_path: Path) -> None:
    lines: list[str] = []
    code = "import sys; print('a'); sys.stdout.write('the cause'); sys.exit(1)"
    assert await _run(code, lines.append, tmp_path) == "exit code 1"
    assert lines == ["a", "the cause"]


async def test_full_disk_while_the_output_is_logged_was_a_success(tmp_path: Path) -> None:
    """The program ends early too, instead of installing for minutes."""
    lines: list[str] = []

    def read(line: str) -> None:
        lines.append(line)
        raise OSError(errno.ENOSPC, "No space left on device")

    async with asyncio.timeout(20.0):
        with pytest.raises(OSError, match="No space left"):
            await _run("import time; print('1\\n2', flush=True); time.sleep(60)", read, tmp_path)
    assert lines == ["1"]


async def test_long_json_message_of_a_pull_was_cut(tmp_path: Path) -> None:
    lines: list[str] = []
    assert await _run(f"print('x' * {LONG})", lines.append, tmp_path) == ""
    assert [len(line) for line in lines] == [LONG]


async def test_installed_packages_saw_the_keys_of_the_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setenv("WEFT_API_KEY", "key")
    monkeypatch.setenv("HF_TOKEN", "hub")
    code = "import os; print(*map(os.environ.get, ('WEFT_API_KEY', 'HF_TOKEN')))"
    assert await _run(code, lines.append, tmp_path) == ""
    assert lines == ["None hub"]
