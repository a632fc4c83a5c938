"""Output of an engine that ended with a Python traceback, as errors quote it."""

import pytest

from runner_svc.policy.engine_failures import without_tracebacks

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/opt/engine/launcher.py", line 147, in main',
    "    server = Server(params)",
    "             ^^^^^^^^^^^^^^",
)


@pytest.mark.parametrize("cut", range(len(TRACEBACK) - 1))
def test_traceback_is_reduced_to_its_exception_even_without_its_start(cut: int) -> None:
    lines = ["loading", *TRACEBACK, "RuntimeError: no server"][cut:]
    kept = without_tracebacks(lines)
    assert kept[-1] == "RuntimeError: no server"
    assert len(kept) <= 2


def test_each_chained_exception_and_surrounding_lines_are_kept() -> None:
    why = "During handling of the above exception, another exception occurred:"
    lines = ["a", *TRACEBACK, "KeyError: 1", "", why, "", *TRACEBACK, "OSError: 2", "  after"]
    assert without_tracebacks(lines) == ["a", "KeyError: 1", "OSError: 2", "  after"]


def test_logger_prefix_of_each_line_is_removed() -> None:
    lines = [f"(Core pid=7) ERROR {line}" for line in (*TRACEBACK, "ValueError: no memory")]
    assert without_tracebacks([*lines, "exiting"]) == ["ValueError: no memory", "exiting"]
