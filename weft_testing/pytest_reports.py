"""A pytest plugin that makes test reports without running the garbage collector.

For suites that inherit from `weft_testing.conformance`: `pytest -p weft_testing.pytest_reports`.
"""

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Makes the report of a test without running the garbage collector.

    For a failed test, pytest parses the source of each file in the traceback. CPython before 3.11.8 has a single
    recursion depth per interpreter for that. If the collector runs meanwhile and finds a task whose exception was never
    retrieved, asyncio logs it, formatting that traceback parses too, and the outer parser raises SystemError ("AST
    constructor recursion depth mismatch"): pytest ends with INTERNALERROR instead of reporting a failed test.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if was_enabled:
            gc.enable()
