"""What every test process needs: the tiers of the suite, property profiles, signals, and log output.

The environments of third-party clients load this file too: it imports nothing that they lack.
"""

import gc
import signal
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest

YOUNG_OBJECTS = 20_000
"""As many are made, and not yet gone, between two runs of the garbage collector."""
LATER_TIERS = ("slow", "nightly")
"""Markers of the tests that `make test` leaves to `make test-slow` and `make test-nightly`; each takes a reason."""
EXAMPLES = {"quick": 20, "nightly": 500}
"""Examples per property by Hypothesis profile. `--hypothesis-profile=nightly` selects the other one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the switch of `make test`."""
    parser.addoption("--time-limit", action="store_true", help="fail a test that takes over a second")


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
    if config.getoption("--time-limit"):
        config.pluginmanager.register(import_module("kit.time_limit"), "kit.time_limit")


def register_profiles() -> None:
    """Registers the Hypothesis profiles, without a deadline: 200 ms per example would measure the machine."""
    settings = import_module("hypothesis").settings
    for profile, examples in EXAMPLES.items():
        # The parent is the profile in use, so that what Hypothesis sets where CI is set stays.
        settings.register_profile(profile, settings(), deadline=None, max_examples=examples)
    settings.load_profile("quick")


# Before the plugin of Hypothesis reads its command line.
if find_spec("hypothesis") is not None:
    register_profiles()


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses a test of a later tier that gives no reason."""
    for item in items:
        for marker in (found for tier in LATER_TIERS for found in item.iter_markers(tier)):
            if not (marker.args and isinstance(marker.args[0], str) and marker.args[0]):
                raise pytest.UsageError(f'{item.nodeid}: say why, as in @pytest.mark.{marker.name}("starts a mesh")')
