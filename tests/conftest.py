"""Two sizes of the suite: `make test` leaves the heavy tests out, `make test-all` (WEFT_TESTS=all) takes everything.

The environments of third-party clients load this file too: it imports nothing that they lack.
"""

import os
import signal

import pytest

IS_WHOLE = os.environ.get("WEFT_TESTS") == "all"


def pytest_configure() -> None:
    """Take SIGINT, also where a shell has started the tests in its background.

    Such a shell leaves SIGINT ignored in all that it starts, and in the programs that tests start and interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Which size is run."""
    return "weft: all tests" if IS_WHOLE else "weft: without heavy tests (WEFT_TESTS=all takes them too)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the heavy tests unless all are wanted."""
    if IS_WHOLE:
        return
    heavy = [item for item in items if item.get_closest_marker("heavy")]
    if heavy:
        config.hook.pytest_deselected(items=heavy)
        items[:] = [item for item in items if not item.get_closest_marker("heavy")]
