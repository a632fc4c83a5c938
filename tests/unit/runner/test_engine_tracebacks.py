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
def test_a_traceback_is_reduced_to_its_exception_also_without_its_beginning(cut: int) -> None:
    lines = ["loading", *TRACEBACK, "RuntimeError: no server"][cut:]
    kept = without_tracebacks(lines)
    assert kept[-1] == "RuntimeError: no server"
    assert len(kept) <= 2


def test_of_chained_exceptions_each_is_kept_and_lines_around_them_are_as_well() -> None:
    why = "During handling of the above exception, another exception occurred:"
    lines = ["a", *TRACEBACK, "KeyError: 1", "", why, "", *TRACEBACK, "OSError: 2", "  after"]
    assert without_tracebacks(lines) == ["a", "KeyError: 1", "OSError: 2", "  after"]


def test_the_words_of_a_logger_before_each_line_are_no_part_of_it() -> None:
    lines = [f"(Core pid=7) ERROR {line}" for line in (*TRACEBACK, "ValueError: no memory")]
    assert without_tracebacks([*lines, "exiting"]) == ["ValueError: no memory", "exiting"]
