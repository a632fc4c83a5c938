"""LOG_FORMAT: the form of log lines, whatever they are written to."""

import json
from collections.abc import Mapping

import pytest
from kit.forked_programs import Program, run_forked

SHARED = "import structlog, weft.kernel.telemetry.structured_logs"
PROGRAM = """
import sys
import structlog
from pathlib import Path
from weft.kernel.telemetry.structured_logs import BoundedLogFile, configure_logging
form = sys.argv[2] if len(sys.argv) > 2 else None
configure_logging("test", file=BoundedLogFile(Path(sys.argv[1]), 100_000), form=form)
def fail():
    secret = "hunter" + "2"
    raise ValueError("so")
try:
    fail()
except ValueError:
    structlog.get_logger("x").exception("it failed", model="qwen")
"""
"""Logs a failure with a secret in a local variable."""


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Returns the log file of a process by the form that it was given; "": none."""
    folder = tmp_path_factory.mktemp("logs")
    forms = ("", "json", "text")
    programs = [Program(PROGRAM, [str(folder / f"log-{form}"), *filter(None, [form])]) for form in forms]
    for ended in run_forked(programs, folder, shared=SHARED):
        assert ended.code == 0, ended.stderr
    return {form: (folder / f"log-{form}").read_text() for form in forms}


@pytest.mark.parametrize("form", ["", "json"])
def test_file_gets_json_lines_by_default(logged: Mapping[str, str], form: str) -> None:
    (line,) = logged[form].splitlines()
    assert json.loads(line)["model"] == "qwen"
    assert "ValueError" in line
    assert "hunter2" not in line, "local variables are prompts and keys"


def test_text_format_has_no_colors_and_no_local_variables(logged: Mapping[str, str]) -> None:
    text = logged["text"]
    assert "it failed" in text
    assert "model=qwen" in text
    assert "\x1b[" not in text
    assert "ValueError: so" in text
    assert "hunter2" not in text
