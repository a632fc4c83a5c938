"""Checks a runtime's claims about an engine, by requests through the runner and by the time of its processes."""

import asyncio
import socket
from dataclasses import dataclass

import psutil

from weft.api.runner.v1.runner_service_pb2 import CLAIM_STATE_BROKEN, CLAIM_STATE_KEPT, EngineClaim
from weft.kernel.values.names import new_id
from weft_testing.conformance.findings import BrokenPromiseError, NotCheckedError
from weft_testing.conformance.runner_requests import (
    NOTICE_SECONDS,
    Generation,
    chat,
    endless,
    long_prompt,
)
from weft_testing.conformance.runner_under_test import RunnerUnderTest

STOPS = frozenset({"immediately", "at the next token"})
"""Values of the claim `cancellation` of programs that stop working when the caller leaves."""
SAMPLE_SECONDS = 1.0
MIN_WORK = 0.1
"""Minimum difference between a working and an idle program, in processors, for its work to be visible."""
CACHED_SHARE_OF_CONTEXT = 0.3


@dataclass(frozen=True, slots=True)
class _Seen:
    """The observation of a claim."""

    is_kept: bool
    words: str


async def engine_claims(runner: RunnerUnderTest) -> str:
    """Compares the claims about the engine with its behavior."""
    claims = await runner.engine_claims()
    if not claims:
        return "nothing is claimed of its engine"
    kept, broken = [], []
    for claim in claims:
        seen = await _look(runner, claim)
        if seen is None:
            continue
        if seen.is_kept:
            kept.append(claim.name)
        else:
            broken.append(f"{claim.name}: claimed {claim.claim} ({claim.source}), but {seen.words}")
    if broken:
        raise BrokenPromiseError("; ".join(broken))
    unseen = [claim.name for claim in claims if claim.name not in kept]
    return f"kept: {', '.join(kept) or 'none'}; not checked: {', '.join(unseen) or 'none'}"


async def _look(runner: RunnerUnderTest, claim: EngineClaim) -> _Seen | None:
    """Returns the observation of a claim; None: it cannot be observed."""
    match claim.name, claim.claim:
        case "usage_in_streams", "yes":
            return await _usage(runner)
        case "cached_tokens", "yes":
            return await _cached_tokens(runner)
        case "cancellation", words if words in STOPS:
            return await _cancellation(runner)
        case _ if claim.state in (CLAIM_STATE_KEPT, CLAIM_STATE_BROKEN):
            return _Seen(claim.state == CLAIM_STATE_KEPT, claim.seen)
        case _:
            return None


async def _usage(runner: RunnerUnderTest) -> _Seen:
    usage = (await runner.run(chat("Hi")))[-1][-1].finished.receipt.usage
    return _Seen(usage.prompt_tokens > 0 and usage.completion_tokens > 0, "a stream ended without token counts")


async def _cached_tokens(runner: RunnerUnderTest) -> _Seen:
    prompt = await long_prompt(runner, CACHED_SHARE_OF_CONTEXT)
    for _ in range(2):
        usage = (await runner.run(prompt))[-1][-1].finished.receipt.usage
    words = f"of {usage.prompt_tokens} prompt tokens that it had seen before, none were counted as cached"
    return _Seen(usage.cached_prompt_tokens > 0, words)


async def _cancellation(runner: RunnerUnderTest) -> _Seen | None:
    """Observes whether its processes become idle after a caller has left; None: their work is not visible."""
    family = await _processes(runner)
    if family is None:
        return None
    idle = await _processor_share(family)
    running = Generation(runner, endless(), new_id("req"))
    try:
        await running.first_content()
        busy = await _processor_share(family)
        has_ended = running.task.done()
    except NotCheckedError:
        return None
    finally:
        await running.leave()
    if has_ended or busy - idle < MIN_WORK:
        return None
    await asyncio.sleep(NOTICE_SECONDS)
    after = await _processor_share(family)
    words = f"{NOTICE_SECONDS:g} s after a caller had left, it used {after:.0%} of a processor, idle {idle:.0%}"
    return _Seen(after - idle < (busy - idle) / 2, words)


async def _processes(runner: RunnerUnderTest) -> list[psutil.Process] | None:
    leader = (await runner.describe()).process_id
    if runner.runner.host != socket.gethostname() or not leader:
        return None
    try:
        process = psutil.Process(leader)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return None


async def _processor_share(family: list[psutil.Process]) -> float:
    """Returns how many processors these processes use, over SAMPLE_SECONDS."""
    loop = asyncio.get_running_loop()
    before, began = _processor_seconds(family), loop.time()
    await asyncio.sleep(SAMPLE_SECONDS)
    return (_processor_seconds(family) - before) / (loop.time() - began)


def _processor_seconds(family: list[psutil.Process]) -> float:
    seconds = 0.0
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        seconds += times.user + times.system
    return seconds
