"""All checks of a runner in order, and how each went."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from weft.api.registry.v1 import model_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_testing.conformance.runner.data_checks import ASLEEP, CONTROL_CHECKS, DATA_CHECKS
from weft_testing.conformance.runner.requests import BrokenPromiseError, Check, Finding, NotCheckedError, Verdict
from weft_testing.conformance.runner.subject import RunnerUnderTest

CHECKS: tuple[Check, ...] = (CONTROL_CHECKS[0], *DATA_CHECKS, *CONTROL_CHECKS[1:])
"""Those that unload the model come last."""
CHECK_SECONDS = 600.0
"""Longest time of one check: a runner that never answers is found out too."""
PUT_BACK_SECONDS = 5.0
"""Longest wait for the model to be as it was found; what was begun goes on without us."""


async def examine(runner: RunnerUnderTest, checks: tuple[Check, ...] = CHECKS) -> AsyncGenerator[Finding]:
    """Make the checks one after the other. What a runner answers wrongly is a finding, never an exception.

    The model is woken first, because a sleeping one would fail every check for that alone, and is put back in the end:
    asleep where it was found asleep, else awake. Raises WeftError when it cannot be woken.
    """
    was_asleep, unloading = await _phase(runner) in ASLEEP, False
    try:
        await runner.wake()
        for check in checks:
            began, unloading = time.monotonic(), check.unloads
            verdict, detail = await _verdict(runner, check)
            unloading = False
            seconds = round(time.monotonic() - began, 3)
            yield Finding(check=check.name, promise=check.promise, verdict=verdict, detail=detail, seconds=seconds)
    finally:
        await _put_back(runner, asleep=was_asleep, unloading=unloading)


async def _put_back(runner: RunnerUnderTest, *, asleep: bool, unloading: bool) -> None:
    """`unloading`: a check that unloads was broken off, and an unload that was asked for would undo a wake."""
    with contextlib.suppress(WeftError, TimeoutError):
        async with asyncio.timeout(PUT_BACK_SECONDS):
            if asleep or unloading:
                await runner.unload()
            if not asleep:
                await runner.wake()


async def _phase(runner: RunnerUnderTest) -> int:
    try:
        return (await runner.state()).phase
    except LookupError:
        # The first check tells.
        return 0


async def _verdict(runner: RunnerUnderTest, check: Check) -> tuple[Verdict, str]:
    try:
        if check.chats and model_pb2.MODEL_OPERATION_CHAT not in runner.operations:
            raise NotCheckedError("the model does not chat")  # noqa: TRY301 - one place tells verdicts
        async with asyncio.timeout(CHECK_SECONDS):
            return Verdict.HONOURED, await check.run(runner)
    except NotCheckedError as why:
        return Verdict.NOT_CHECKED, str(why)
    except (BrokenPromiseError, LookupError) as broken:
        return Verdict.BROKEN, str(broken)
    except TimeoutError:
        return Verdict.BROKEN, f"it did not come to an end within {CHECK_SECONDS:g} s"
    except WeftError as error:
        if error.reason is Reason.NO_SLOT_AVAILABLE and (others := await _others(runner)):
            return Verdict.NOT_CHECKED, f"it is busy with {others} requests of others"
        return Verdict.BROKEN, f"{error.reason.name}: {error.message}"


async def _others(runner: RunnerUnderTest) -> int:
    """Requests of others that it works on now; 0 when it does not say."""
    try:
        return len(await runner.slot_holders() - runner.own_requests)
    except WeftError:
        return 0
