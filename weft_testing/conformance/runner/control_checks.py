"""Checks of the control plane: description, logs, loading, unloading, and what is left of a process."""

import asyncio
import socket

import psutil

from weft.api.registry.v1 import model_pb2, runner_pb2
from weft.dispatch.tickets import Action
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_testing.conformance.runner.requests import chat, refusal, text_of, until
from weft_testing.conformance.runner.subject import RunnerUnderTest
from weft_testing.conformance.runner.verdict import BrokenPromiseError, Check, NotCheckedError, require

LOG_LINES = 20
LOAD_HEAD_START_SECONDS = 0.05
UNLOAD_SECONDS = 60.0
FORGED_KEY = b"f" * 32
GONE_SECONDS = 2.0
"""Nothing of an engine may be left so long after its end."""

ASLEEP = frozenset({runner_pb2.InstanceState.PHASE_HIBERNATING, runner_pb2.InstanceState.PHASE_IDLE})


async def description(runner: RunnerUnderTest) -> str:
    """Who it is and how its model does."""
    described = await runner.describe_runner()
    told = described.runner
    require(told.name == runner.runner.name, f"it calls itself {told.name}, the mesh calls it {runner.runner.name}")
    require(told.incarnation == runner.runner.incarnation, "its incarnation is not the one that the mesh knows")
    state = await runner.state()
    require(state.phase != runner_pb2.InstanceState.PHASE_UNSPECIFIED, "its model has no phase")
    require(await runner.serving(), "its health service says that it does not serve")
    return f"{told.runtime} on {told.host}, model {runner.model}"


async def logs(runner: RunnerUnderTest) -> str:
    """The engine's output, no more than asked for."""
    lines = await runner.log_tail(LOG_LINES)
    require(len(lines) <= LOG_LINES, f"{len(lines)} lines came, {LOG_LINES} were asked for")
    if not lines:
        raise NotCheckedError("the engine has printed nothing, or its output is not the runner's to read")
    return f"{len(lines)} lines"


async def permits(runner: RunnerUnderTest) -> str:
    """Nothing is unloaded without a good permit, nor twice with one: operations are the registry's to decide."""
    forged = runner.permit(Action.UNLOAD, runner.model, key=FORGED_KEY)
    for_loading = runner.permit(Action.LOAD, runner.model)
    for_another = runner.permit(Action.UNLOAD, f"{runner.model}-of-another")
    await refusal(runner.load_with(None), Reason.PERMIT_INVALID)
    for permit in (None, forged, for_loading, for_another):
        await refusal(runner.unload_with(permit), Reason.PERMIT_INVALID)
    state = await runner.state()
    require(state.phase not in ASLEEP, "a model was unloaded without a good permit")
    once = runner.permit(Action.UNLOAD, runner.model)
    try:
        await runner.unload_with(once)
    except WeftError as error:
        if error.reason is not Reason.UNSUPPORTED_OPERATION:
            raise
    await refusal(runner.unload_with(once), Reason.PERMIT_INVALID)
    await runner.wake()
    return "a load and four unloads refused, one permit taken once"


async def load_then_unload(runner: RunnerUnderTest) -> str:
    """A load whose caller leaves, then an unload: asleep, without a process, and loadable again."""
    await _unload(runner)
    loading = asyncio.create_task(runner.load())
    await asyncio.wait({loading}, timeout=LOAD_HEAD_START_SECONDS)
    loading.cancel()
    await asyncio.wait({loading})
    if not loading.cancelled():
        loading.result()
    await _unload(runner)

    async def asleep() -> bool:
        return (await runner.state()).phase in ASLEEP and not (await runner.describe()).process_id

    await until(asleep, GONE_SECONDS, "after the unload the model is not asleep, or has a process")
    await runner.wake()
    if model_pb2.MODEL_OPERATION_CHAT not in runner.operations:
        return "asleep after the unload, ready after the next wake"
    require(bool(text_of(await runner.run(chat("Hello")))), "loaded again, it gave no text")
    return "asleep after the unload, answering after the next wake"


async def group_teardown(runner: RunnerUnderTest) -> str:
    """Nothing of the engine is left after its end."""
    if runner.runner.host != socket.gethostname():
        raise NotCheckedError(f"it runs on {runner.runner.host}; processes can be looked at on their own host only")
    await runner.load()
    leader = (await runner.describe()).process_id
    if not leader:
        raise NotCheckedError("it names no process of its engine")
    try:
        process = psutil.Process(leader)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        raise NotCheckedError(f"process {leader} cannot be seen from here") from None
    await _unload(runner)

    async def gone() -> bool:
        return not any(map(_is_alive, family))

    await until(gone, GONE_SECONDS, "processes of the engine are left")
    await runner.wake()
    return f"processes that ended: {len(family)}"


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _unload(runner: RunnerUnderTest) -> None:
    try:
        async with asyncio.timeout(UNLOAD_SECONDS):
            await runner.unload()
    except WeftError as error:
        if error.reason is Reason.UNSUPPORTED_OPERATION:
            raise NotCheckedError("it cannot unload this model") from None
        raise
    except TimeoutError:
        raise BrokenPromiseError(f"the unload took longer than {UNLOAD_SECONDS:g} s") from None


CONTROL_CHECKS = (
    Check(name="description", promise="says who it is and how its model does", run=description),
    Check(name="logs", promise="shows the engine's output, bounded", run=logs),
    Check(name="permits", promise="loads and unloads with the registry's permit alone", run=permits, unloads=True),
    Check(
        name="load-then-unload",
        promise="survives a cancelled load, unloads, loads again",
        run=load_then_unload,
        unloads=True,
    ),
    Check(name="teardown", promise="leaves no process of an engine behind", run=group_teardown, unloads=True),
)
