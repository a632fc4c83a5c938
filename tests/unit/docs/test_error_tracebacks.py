"""No error text of the product contains a Python traceback, and no code makes one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("gateway", "registry_svc", "router_svc", "runner_svc", "weft", "weft_app", "weft_extensions")
_TRACEBACK = re.compile(
    r"""Traceback \(most recent|File \\?"|traceback\.(?:format|Trace|Stack)|\bformat_(?:exc|exception|tb)\b"""
)
REMOVES_TRACEBACKS = "runner_svc/policy/engine_failures.py"
"""The module that recognizes the tracebacks of engines."""


def test_error_texts_contain_no_traceback() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in modules if _TRACEBACK.search(path.read_text("utf-8"))}
    assert len(modules) > 500
    assert found == {REMOVES_TRACEBACKS}


@pytest.mark.parametrize(
    "code",
    ["traceback.format_exc()", "format_exception(error)", "'Traceback (most recent call last):'", r'"  File \""'],
)
def test_code_that_makes_a_traceback_is_detected(code: str) -> None:
    """The control."""
    assert _TRACEBACK.search(code)
