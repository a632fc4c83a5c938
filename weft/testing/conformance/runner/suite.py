"""All checks of a runner in order, and how each went."""

import time
from collections.abc import AsyncIterator

from weft.kernel.errors import WeftError
from weft.testing.conformance.runner.control_checks import CONTROL_CHECKS
from weft.testing.conformance.runner.data_checks import DATA_CHECKS
from weft.testing.conformance.runner.subject import RunnerUnderTest
from weft.testing.conformance.runner.verdict import BrokenPromiseError, Check, Finding, NotCheckedError, Verdict

CHECKS: tuple[Check, ...] = (CONTROL_CHECKS[0], *DATA_CHECKS, *CONTROL_CHECKS[1:])
"""Those that unload the model come last."""


async def examine(runner: RunnerUnderTest, checks: tuple[Check, ...] = CHECKS) -> AsyncIterator[Finding]:
    """Make the checks one after the other. What a runner answers wrongly is a finding, never an exception."""
    await _get_ready(runner)
    for check in checks:
        began = time.monotonic()
        try:
            verdict, detail = Verdict.HONOURED, await check.run(runner)
        except NotCheckedError as why:
            verdict, detail = Verdict.NOT_CHECKED, str(why)
        except BrokenPromiseError as broken:
            verdict, detail = Verdict.BROKEN, str(broken)
        except WeftError as error:
            verdict, detail = Verdict.BROKEN, f"{error.reason.name}: {error.message}"
        except LookupError as error:
            verdict, detail = Verdict.BROKEN, str(error)
        seconds = round(time.monotonic() - began, 3)
        yield Finding(check=check.name, promise=check.promise, verdict=verdict, detail=detail, seconds=seconds)


async def _get_ready(runner: RunnerUnderTest) -> None:
    """Load the model, where it can be loaded: a sleeping one would fail every check for that alone."""
    await runner.load()
