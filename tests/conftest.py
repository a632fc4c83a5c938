"""Two sizes of the suite: `make test` leaves the heavy tests out, `make test-all` (WEFT_TESTS=all) takes everything.

The environments of third-party clients load this file too: it imports nothing that they lack.
"""

import gc
import os
import signal
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest

YOUNG_OBJECTS = 20_000
"""As many are made, and not yet gone, between two runs of the garbage collector."""
IS_WHOLE = os.environ.get("WEFT_TESTS") == "all"


def pytest_configure(config: pytest.Config) -> None:
    """Take SIGINT, also where a shell has started the tests in its background; log tracebacks as plain text.

    Such a shell leaves SIGINT ignored in all that it starts, so in the programs that tests start and interrupt; `nohup`
    leaves SIGHUP ignored in them, which is no reason here for the tests to end at one.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if find_spec("structlog") is not None:
        log_plain_tracebacks()
    if find_spec("psutil") is not None:
        config.pluginmanager.register(import_module("kit.left_behind"), "kit.left_behind")


def log_plain_tracebacks() -> None:
    """Without rich, which prints the locals of every frame: a second per logged error, more than most tests take."""
    structlog = import_module("structlog")

    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector away from what collection makes: modules and tests, none of it garbage.

    Let it run less often then, too: at its usual pace it takes a tenth of the time of the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        gc.enable()


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
