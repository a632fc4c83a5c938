"""The conformance suite of a runner: tickets, events, counts, slots, life cycle; `examine` runs the checks in order."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator

import psutil

from weft.api.common.v1 import chat_pb2, event_pb2
from weft.api.registry.v1 import model_pb2, runner_pb2
from weft.dispatch.frames import has_content
from weft.dispatch.tickets import Action
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import new_id
from weft_testing.conformance.backend_steps import is_alive
from weft_testing.conformance.engine_claims import engine_claims
from weft_testing.conformance.findings import BrokenPromiseError, Finding, NotCheckedError, Verdict, require
from weft_testing.conformance.runner_requests import (
    ENDED_EARLY,
    NOTICE_SECONDS,
    SHORT_ANSWER_TOKENS,
    Check,
    Generation,
    chat,
    endless,
    kinds,
    long_prompt,
    refusal,
    text_of,
    until,
)
from weft_testing.conformance.runner_under_test import RunnerUnderTest, TicketChanges

REFUSAL_SECONDS = 1.0
"""Maximum time for a rejection because no slot is free."""
PREFILL_WATCH_SECONDS = 10.0
"""How long a prefill is observed before its caller leaves."""
MAX_SLOTS_FILLED = 32
FORGED = b"\0" * 32


async def tickets(runner: RunnerUnderTest) -> str:
    """Tests that the runner accepts only valid tickets of the router for its incarnation, once each."""
    question = chat("Hello")
    forged = runner.ticket("req-forged", TicketChanges(mac=FORGED))
    await refusal(runner.run(question, forged), Reason.TICKET_INVALID)
    foreign = runner.ticket("req-foreign", TicketChanges(incarnation="another-life"))
    await refusal(runner.run(question, foreign), Reason.TICKET_INVALID)
    old = runner.ticket("req-old", TicketChanges(lifetime_seconds=-1.0))
    await refusal(runner.run(question, old), Reason.TICKET_EXPIRED)
    once = runner.ticket("req-once", TicketChanges(ticket_id=new_id("tkt")))
    await runner.run(question, once)
    await refusal(runner.run(question, once), Reason.TICKET_INVALID)
    return "forged, foreign, expired and used tickets were refused"


async def typed_errors(runner: RunnerUnderTest) -> str:
    """Tests that every rejection has its reason."""
    await refusal(runner.run(None), Reason.INVALID_ARGUMENT)
    await refusal(runner.load("no-such-model-anywhere"), Reason.MODEL_NOT_FOUND)
    if not (await runner.state()).context_tokens:
        return "no work and no such model; it does not say how long a prompt may be"
    await refusal(runner.run(await long_prompt(runner, 3.0)), Reason.CONTEXT_LENGTH_EXCEEDED)
    return "no work, no such model, too long a prompt"


async def event_order(runner: RunnerUnderTest) -> str:
    """Tests that `started` is first, the first content alone in its frame, and a single `finished` last."""
    frames = await runner.run(chat("Say hello to the world."))
    order = kinds(frames)
    require(order[:1] == ["started"], f"the first event was {order[:1]}")
    require(order.count("finished") == 1 and order[-1] == "finished", "the last event must be the only `finished`")
    require(order.count("usage") <= 1, f"{order.count('usage')} usage events")
    first = next((frame for frame in frames if has_content(frame)), None)
    require(first is not None, "there was no content")
    deltas = [event for event in first or () if event.WhichOneof("event") == "delta"]
    require(len(deltas) == 1, f"the first content came together with {len(deltas) - 1} more deltas")
    reasons = [event.delta.finish_reason for frame in frames for event in frame if event.WhichOneof("event") == "delta"]
    require(sum(map(bool, reasons)) == 1, f"{sum(map(bool, reasons))} finish reasons for one choice")
    return f"{len(frames)} frames, {len(order)} events"


async def usage_counts(runner: RunnerUnderTest) -> str:
    """Tests that token counts are plausible."""
    short = await _receipt_usage(runner, chat("Hi"))
    longer = await _receipt_usage(runner, chat("Hi, and tell me about rivers, stones, wind and the sea." * 4))
    require(0 < short[0] < longer[0], f"prompts counted {short[0]} and {longer[0]} tokens, the second is longer")
    require(0 < short[1] <= SHORT_ANSWER_TOKENS, f"{short[1]} tokens of answer, the limit was {SHORT_ANSWER_TOKENS}")
    one = await runner.run(chat("Tell me a long story.", max_tokens=1))
    ends = [event.delta.finish_reason for frame in one for event in frame if event.delta.finish_reason]
    require(ends == [event_pb2.FINISH_REASON_LENGTH], "an answer cut by its limit must end with LENGTH")
    return f"{short[0]} and {longer[0]} prompt tokens, {short[1]} of at most {SHORT_ANSWER_TOKENS} answer tokens"


async def _receipt_usage(runner: RunnerUnderTest, payload: chat_pb2.ChatPayload) -> tuple[int, int]:
    frames = await runner.run(payload)
    receipt = frames[-1][-1].finished.receipt
    require(bool(receipt.request_id and receipt.model and receipt.host), "the receipt lacks request id, model or host")
    require(bool(text_of(frames)), "there was no text")
    return receipt.usage.prompt_tokens, receipt.usage.completion_tokens


async def disconnect(runner: RunnerUnderTest) -> str:
    """Tests that a generation is cancelled when its caller leaves."""
    running = Generation(runner, endless(), new_id("req"))
    try:
        await running.first_content()
        running.require_running()
    finally:
        await running.leave()

    async def free() -> bool:
        return running.request_id not in await runner.slot_holders()

    seconds = await until(free, NOTICE_SECONDS, f"the slot was still held {NOTICE_SECONDS:g} s after the caller left")
    frames = await runner.run(chat("Hello"))
    require(bool(text_of(frames)), "the next request got no text")
    return f"the slot was free {seconds * 1e3:.0f} ms after the caller had left"


async def slots(runner: RunnerUnderTest) -> str:
    """Tests that there is no hidden queue: a request without a free slot is rejected immediately."""
    total = (await runner.state()).slots_total
    require(total > 0, "it reports no slots")
    total = min(total, runner.runner.max_requests or total)
    if total > MAX_SLOTS_FILLED:
        raise NotCheckedError(f"it has {total} slots; this check fills at most {MAX_SLOTS_FILLED}")
    running = [Generation(runner, endless(), new_id("req")) for _ in range(total)]
    try:
        await _fill(runner, running)
        began = time.monotonic()
        try:
            await refusal(runner.run(chat("Hello")), Reason.NO_SLOT_AVAILABLE)
        except BrokenPromiseError:
            for one in running:
                one.require_running()
            raise
        seconds = time.monotonic() - began
        require(seconds < REFUSAL_SECONDS, f"the refusal took {seconds:.1f} s")
    finally:
        await asyncio.gather(*(one.leave() for one in running))

    async def free() -> bool:
        return runner.own_requests.isdisjoint(await runner.slot_holders())

    await until(free, NOTICE_SECONDS, "slots were still held after all callers had left")
    return f"all {total} taken, the next request was refused in {seconds * 1e3:.0f} ms"


async def _fill(runner: RunnerUnderTest, running: list[Generation]) -> None:
    """Waits until all of them hold a slot; an engine with fewer slots than reported may let some wait."""
    ids = {one.request_id for one in running}

    async def filled() -> bool:
        for one in running:
            if one.task.done():
                one.task.result()
                one.require_running()
        return ids <= await runner.slot_holders()

    await until(filled, NOTICE_SECONDS, f"it did not take on {len(running)} requests, which it has slots for")


async def embeddings(runner: RunnerUnderTest) -> str:
    """Tests that each input gets one vector, in order."""
    if model_pb2.MODEL_OPERATION_EMBEDDING not in runner.operations:
        raise NotCheckedError("the model gives no embeddings")
    response = await runner.embed(["a river", "a stone", "the sea"])
    order = [vector.index for vector in response.embeddings]
    require(order == [0, 1, 2], f"three inputs gave vectors {order}")
    lengths = {len(vector.values) for vector in response.embeddings}
    require(len(lengths) == 1 and lengths != {0}, f"vectors of lengths {sorted(lengths)}")
    require(response.receipt.usage.prompt_tokens > 0, "the receipt counts no tokens")
    return f"{len(order)} vectors of {lengths.pop()} numbers"


async def health_during_prefill(runner: RunnerUnderTest) -> str:
    """Tests that the control plane answers during a prefill."""
    running = Generation(runner, await long_prompt(runner, 0.7), new_id("req"))
    slowest, answers, last_look = 0.0, 0, time.monotonic() + PREFILL_WATCH_SECONDS
    try:
        while not (running.content.is_set() or running.task.done()) and time.monotonic() < last_look:
            began = time.monotonic()
            require(await runner.serving(), "its health service said that it does not serve")
            await runner.describe()
            slowest = max(slowest, time.monotonic() - began)
            answers += not running.content.is_set()
            await asyncio.sleep(0.01)
        if running.task.done():
            running.task.result()
    except WeftError as error:
        if error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED:
            raise
        raise NotCheckedError("the model needs more tokens for the prompt than were reckoned with") from None
    finally:
        await running.leave()
    if not answers:
        raise NotCheckedError("the prefill ended before the runner could be queried")
    require(slowest < REFUSAL_SECONDS, f"the slowest answer took {slowest:.1f} s")
    return f"{answers} answers during the prefill, the slowest after {slowest * 1e3:.0f} ms"


async def request_record(runner: RunnerUnderTest) -> str:
    """Tests that a running request has a record."""
    request_id = new_id("req")
    running = Generation(runner, endless(), request_id)
    try:
        await running.first_content()
        found = await runner.find_request(request_id)
        if found.record.state == found.record.STATE_COMPLETED:
            # The end of the stream is then about to arrive.
            await asyncio.wait({running.task}, timeout=NOTICE_SECONDS)
        running.require_running()
    finally:
        await running.leave()
    record = found.record
    require(record.state == record.STATE_GENERATING, f"a running request is in state {record.state}")
    require(record.HasField("last_progress_time") and record.HasField("start_time"), "its times are missing")
    require(bool(found.output), "its output so far is missing")
    await refusal(runner.find_request("req-that-never-was"), Reason.NOT_FOUND)

    async def cancelled() -> bool:
        state = (await runner.find_request(request_id)).record.state
        if state == record.STATE_COMPLETED:
            raise NotCheckedError(ENDED_EARLY)
        return state == record.STATE_CANCELLED

    await until(cancelled, NOTICE_SECONDS, "a request whose caller left is not told as cancelled")
    return f"{record.output_chars} characters so far were reported"


DATA_CHECKS = (
    Check(name="tickets", promise="accepts only valid tickets of the router, once each", run=tickets, chats=True),
    Check(name="typed-errors", promise="gives a reason for every rejection", run=typed_errors, chats=True),
    Check(name="event-order", promise="streams a start, content and one end", run=event_order, chats=True),
    Check(name="usage-counts", promise="counts tokens and enforces the token limit", run=usage_counts, chats=True),
    Check(name="disconnect", promise="stops a generation when its caller leaves", run=disconnect, chats=True),
    Check(name="slots", promise="rejects requests immediately when all slots are taken", run=slots, chats=True),
    Check(name="embeddings", promise="returns one vector per input, in order", run=embeddings),
    Check(
        name="health-in-prefill",
        promise="stays responsive during a long prefill",
        run=health_during_prefill,
        chats=True,
    ),
    Check(name="request-record", promise="reports the state of a running request", run=request_record, chats=True),
    Check(name="engine-claims", promise="describes its engine correctly", run=engine_claims, chats=True),
)


LOG_LINES = 20
LOAD_HEAD_START_SECONDS = 0.05
UNLOAD_SECONDS = 60.0
FORGED_KEY = b"f" * 32
GONE_SECONDS = 2.0
"""Time within which every process of a stopped engine must be gone."""

ASLEEP = frozenset({runner_pb2.InstanceState.PHASE_HIBERNATING, runner_pb2.InstanceState.PHASE_IDLE})


async def description(runner: RunnerUnderTest) -> str:
    """Tests that the runner describes itself and the state of its model."""
    described = await runner.describe_runner()
    found = described.runner
    require(found.name == runner.runner.name, f"it calls itself {found.name}, the mesh calls it {runner.runner.name}")
    require(found.incarnation == runner.runner.incarnation, "its incarnation is not the one that the mesh knows")
    state = await runner.state()
    require(state.phase != runner_pb2.InstanceState.PHASE_UNSPECIFIED, "its model has no phase")
    require(await runner.serving(), "its health service says that it does not serve")
    return f"{found.runtime} on {found.host}, model {runner.model}"


async def logs(runner: RunnerUnderTest) -> str:
    """Tests that the engine's output is returned, with at most the requested number of lines."""
    lines = await runner.log_tail(LOG_LINES)
    require(len(lines) <= LOG_LINES, f"{len(lines)} lines came, {LOG_LINES} were asked for")
    if not lines:
        raise NotCheckedError("the engine has printed nothing, or its output is not the runner's to read")
    return f"{len(lines)} lines"


async def permits(runner: RunnerUnderTest) -> str:
    """Tests that unloading needs a permit of the registry, which is valid once."""
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
    """Tests that after a cancelled load and an unload the model sleeps, has no process, and can be loaded again."""
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
    """Tests that no process of a stopped engine is left."""
    if runner.runner.host != socket.gethostname():
        raise NotCheckedError(f"it runs on {runner.runner.host}; processes can only be inspected on their own host")
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
        return not any(map(is_alive, family))

    await until(gone, GONE_SECONDS, "processes of the engine are left")
    await runner.wake()
    return f"processes that ended: {len(family)}"


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
    Check(name="description", promise="describes itself and the state of its model", run=description),
    Check(name="logs", promise="returns the engine's last output lines", run=logs),
    Check(name="permits", promise="loads and unloads only with the registry's permit", run=permits, unloads=True),
    Check(
        name="load-then-unload",
        promise="survives a cancelled load, unloads, loads again",
        run=load_then_unload,
        unloads=True,
    ),
    Check(name="teardown", promise="leaves no engine process behind", run=group_teardown, unloads=True),
)


CHECKS: tuple[Check, ...] = (CONTROL_CHECKS[0], *DATA_CHECKS, *CONTROL_CHECKS[1:])
"""All checks; those that unload the model come last."""
CHECK_SECONDS = 600.0
"""Time limit of a check, for runners that never answer."""
PUT_BACK_SECONDS = 5.0
"""Maximum wait for the model to return to its original state; the operation continues after it."""


async def examine(runner: RunnerUnderTest, checks: tuple[Check, ...] = CHECKS) -> AsyncGenerator[Finding]:
    """Runs the checks in sequence. A wrong answer of the runner is a finding, never an exception.

    The model is woken first, because every check would fail for a sleeping one, and finally returned to its original
    state, asleep or awake. Raises WeftError if it cannot be woken.
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
    """`unloading`: a check that unloads was interrupted; its pending unload would undo a wake."""
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
        # The first check reports it.
        return 0


async def _verdict(runner: RunnerUnderTest, check: Check) -> tuple[Verdict, str]:
    try:
        if check.chats and model_pb2.MODEL_OPERATION_CHAT not in runner.operations:
            raise NotCheckedError("the model does not chat")  # noqa: TRY301 - one place for verdicts
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
    """Returns the number of running requests of other callers; 0: unknown."""
    try:
        return len(await runner.slot_holders() - runner.own_requests)
    except WeftError:
        return 0
