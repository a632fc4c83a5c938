"""LOG_FORMAT: the form of log lines, whatever they are written to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def logged(folder: Path, form: str | None) -> str:
    """What a process writes into its log file: a line, and a failure with a secret in a local variable."""
    program = f"""
import structlog
from pathlib import Path
from weft.kernel.telemetry import BoundedLogFile, configure_logging
configure_logging("test", file=BoundedLogFile(Path({str(folder / "log")!r}), 100_000), form={form!r})
def fail():
    secret = "hunter" + "2"
    raise ValueError("so")
try:
    fail()
except ValueError:
    structlog.get_logger("x").exception("it failed", model="qwen")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    return (folder / "log").read_text()


@pytest.mark.parametrize("form", [None, "json"])
def test_a_file_gets_json_lines_unless_something_else_is_said(tmp_path: Path, form: str | None) -> None:
    (line,) = logged(tmp_path, form).splitlines()
    assert json.loads(line)["model"] == "qwen"


def test_text_is_for_people_without_colours_and_without_local_variables(tmp_path: Path) -> None:
    text = logged(tmp_path, "text")
    assert "it failed" in text
    assert "model=qwen" in text
    assert "\x1b[" not in text
    assert "ValueError: so" in text
    assert "hunter2" not in text
