"""Journaled requests: a task whose submitter watches it, leaves it, loses it, and never sees two answers spliced."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from gateway_script import Frame, ScriptedDispatcher, delta, finished, sample_receipt, started, usage
from task_script import ScriptedTasks, output

from weft.api.common.v1 import chat_pb2, embedding_pb2
from weft.api.common.v1.priority_pb2 import PRIORITY_LOW, PRIORITY_NORMAL, PRIORITY_UNSPECIFIED
from weft.api.router.v1 import task_pb2, task_service_pb2
from weft.dispatch.call import Call, LayeredDispatcher
from weft.dispatch.operation_table import CHAT, EMBEDDING, ChunkT, OperationSpec, PayloadT
from weft.dispatch.request_receipt import Journal, RequestContext, WhenLeft
from weft.durable.durable_call import (
    DurableCallConfig,
    durable_calls,
    durable_spec,
    task_spec,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Handling, Operation, Priority
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft_testing.fake_clock import FakeClock

CHAT_PAYLOAD = chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage()])
HELLO = output([started()], [delta("Hello")])
WORLD = output([delta(", world")], [delta(finish="STOP"), usage(), finished()])
CONTEXT = RequestContext(
    request_id="req-1",
    tenant="ann",
    model="tiny",
    operation=Operation.CHAT,
    traceparent=new_traceparent(),
    names_priority=False,
    timeout_seconds=60.0,
)
KEEP = Journal(when_left=WhenLeft.KEEP)
CONFIG = DurableCallConfig(outage_limit_seconds=1.0, retry_interval_seconds=0.4, settle_seconds=0.05)


def generation(tasks: ScriptedTasks, journal: Journal | None = None, clock: FakeClock | None = None) -> Call[Frame]:
    return durable(CHAT, CHAT_PAYLOAD, tasks, journal, clock)


def embedding(tasks: ScriptedTasks) -> Call[list[embedding_pb2.Embedding]]:
    return durable(EMBEDDING, embedding_pb2.EmbeddingPayload(), tasks)


def durable(
    spec: OperationSpec[PayloadT, ChunkT],
    payload: PayloadT,
    tasks: ScriptedTasks,
    journal: Journal | None = None,
    clock: FakeClock | None = None,
) -> Call[ChunkT]:
    context = replace(CONTEXT, journal=journal or Journal())
    dispatcher = LayeredDispatcher(ScriptedDispatcher(), durable_calls(tasks, clock or FakeClock(), CONFIG))
    return dispatcher.call(spec, context, payload)


def text_of(frames: list[Frame]) -> str:
    return "".join(event.delta.text for frame in frames for event in frame)


async def all_of(frames: AsyncGenerator[Frame], into: list[Frame] | None = None) -> list[Frame]:
    found = [] if into is None else into
    async for frame in frames:
        found.append(frame)
    return found


async def read_until(frames: AsyncGenerator[Frame], text: str) -> list[Frame]:
    found: list[Frame] = []
    while text not in text_of(found):
        found.append(await anext(frames))
    return found


async def test_stored_output_is_forwarded_and_the_end_only_after_the_task_ends() -> None:
    tasks = ScriptedTasks()
    call = generation(tasks)
    frames = call.chunks()
    (queued,) = await anext(frames)
    assert queued.queued.reason == "no runner has the model"
    tasks.begin()
    tasks.say(HELLO)
    tasks.say(WORLD)
    found = await read_until(frames, "world")
    end = asyncio.create_task(anext(frames))
    await asyncio.sleep(0)
    assert not any(event.HasField("finished") for frame in found for event in frame)
    assert (end.done(), call.receipt) == (False, None)
    tasks.complete()
    (last,) = await end
    assert last.HasField("finished")
    assert call.receipt == sample_receipt()
    assert await all_of(frames) == []
    assert tasks.cancelled == []


async def test_task_id_is_reported_first_with_caller_priority_and_pending_limit() -> None:
    tasks, told = ScriptedTasks(at_once=[HELLO, WORLD]), list[str]()
    assert text_of(await all_of(generation(tasks, Journal(on_task=told.append)).chunks())) == "Hello, world"
    assert told == list(tasks.kept)
    spec = tasks.one.new.spec
    assert (spec.options.priority, spec.pending_limit.ToSeconds(), spec.chat) == (PRIORITY_NORMAL, 60, CHAT_PAYLOAD)
    assert spec.traceparent == CONTEXT.traceparent


def test_kept_task_has_no_pending_limit_and_a_keyed_spec_is_deterministic() -> None:
    assert not durable_spec(CONTEXT, KEEP, CHAT_PAYLOAD).HasField("pending_limit")
    keyed = Journal(idempotency_key="k")
    again = replace(CONTEXT, traceparent=new_traceparent())
    assert durable_spec(CONTEXT, keyed, CHAT_PAYLOAD) == durable_spec(again, keyed, CHAT_PAYLOAD)
    assert durable_spec(CONTEXT, KEEP, CHAT_PAYLOAD) != durable_spec(again, KEEP, CHAT_PAYLOAD)


def test_task_options_equal_those_of_its_request() -> None:
    handling = Handling(cache_tag="mine", keep_alive_seconds=90.0)
    context = replace(
        CONTEXT,
        priority=Priority.LOW,
        names_priority=True,
        handling=handling,
        client_id="ci",
        session="s",
        allow_remote=True,
    )
    options = task_spec(context, CHAT_PAYLOAD).options
    assert (options.priority, options.cache_tag, options.client_id, options.session) == (
        PRIORITY_LOW,
        "mine",
        "ci",
        "s",
    )
    assert (options.allow_remote, options.keep_alive.ToSeconds()) == (True, 90)
    assert task_spec(CONTEXT, CHAT_PAYLOAD).options.priority == PRIORITY_UNSPECIFIED


def test_task_has_at_most_the_priority_that_its_callers_key_allows() -> None:
    context = replace(CONTEXT, priority=Priority.HIGH, names_priority=True, max_priority=Priority.LOW)
    assert task_spec(context, CHAT_PAYLOAD).options.priority == PRIORITY_LOW
    assert durable_spec(context, Journal(), CHAT_PAYLOAD).options.priority == PRIORITY_LOW


@pytest.mark.parametrize(("journal", "is_cancelled"), [(Journal(), True), (KEEP, False)])
async def test_client_disconnect_cancels_its_task_unless_kept(journal: Journal, is_cancelled: bool) -> None:
    tasks = ScriptedTasks()
    reading = asyncio.create_task(all_of(generation(tasks, journal).chunks()))
    await tasks.was_watched.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert tasks.was_left.is_set()
    assert bool(tasks.cancelled) is is_cancelled


async def test_disconnect_before_the_task_is_durable_cancels_it_once_durable() -> None:
    tasks = ScriptedTasks(submit_gate=asyncio.Event())
    reading = asyncio.create_task(all_of(generation(tasks).chunks()))
    await tasks.was_submitted.wait()
    reading.cancel()
    assert tasks.submit_gate is not None
    tasks.submit_gate.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert tasks.cancelled == list(tasks.kept) != []


async def test_task_durable_long_after_a_disconnect_is_still_cancelled() -> None:
    tasks = ScriptedTasks(submit_gate=asyncio.Event())
    reading = asyncio.create_task(all_of(generation(tasks).chunks()))
    await tasks.was_submitted.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert tasks.submit_gate is not None
    tasks.submit_gate.set()
    await tasks.was_cancelled.wait()
    assert tasks.cancelled == list(tasks.kept) != []


async def test_disconnect_does_not_wait_indefinitely_for_the_cancellation() -> None:
    class Silent(ScriptedTasks):
        async def cancel(self, tenant: str, task_id: str) -> task_pb2.Task:
            self.was_cancelled.set()
            await asyncio.Event().wait()
            return await super().cancel(tenant, task_id)

    tasks = Silent()
    frames = generation(tasks).chunks()
    await anext(frames)
    await frames.aclose()
    assert tasks.was_cancelled.is_set()
    assert tasks.cancelled == []


async def test_attempt_lost_before_content_is_followed_by_the_next() -> None:
    tasks = ScriptedTasks()
    reading = asyncio.create_task(all_of(generation(tasks).chunks()))
    await tasks.was_watched.wait()
    tasks.begin()
    tasks.say(output([started("first")]))
    tasks.lose()
    tasks.begin()
    tasks.say(output([started("second")], [delta("Hello")]))
    tasks.say(WORLD)
    tasks.complete()
    frames = await reading
    assert text_of(frames) == "Hello, world"
    assert sum(event.HasField("finished") for frame in frames for event in frame) == 1


@pytest.mark.parametrize(("journal", "is_cancelled"), [(Journal(), True), (KEEP, False)])
async def test_interrupted_answer_is_an_error_and_never_continued_by_another_attempt(
    journal: Journal, is_cancelled: bool
) -> None:
    tasks = ScriptedTasks()
    frames = generation(tasks, journal).chunks()
    await anext(frames)
    tasks.begin()
    tasks.say(HELLO)
    found = await read_until(frames, "Hello")
    tasks.lose(Reason.SERVER_DIED, "the engine died")
    tasks.begin()
    tasks.say(WORLD)
    with pytest.raises(WeftError) as caught:
        await all_of(frames, found)
    (task_id,) = tasks.kept
    assert caught.value.reason is Reason.SERVER_DIED
    assert task_id in caught.value.message
    assert ("continues" in caught.value.message) is not is_cancelled
    assert caught.value.metadata["task_id"] == task_id
    assert text_of(found) == "Hello"
    assert bool(tasks.cancelled) is is_cancelled


async def test_lost_attempt_without_a_known_reason_is_reported_as_worker_lost() -> None:
    class Forgetful(ScriptedTasks):
        async def details(self, tenant: str, task_id: str) -> task_service_pb2.GetTaskResponse:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "away")

    tasks = Forgetful()
    frames = generation(tasks).chunks()
    await anext(frames)
    tasks.begin()
    tasks.say(HELLO)
    found = await read_until(frames, "Hello")
    tasks.lose(Reason.SERVER_DIED)
    with pytest.raises(WeftError) as caught:
        await all_of(frames, found)
    assert caught.value.reason is Reason.WORKER_LOST


async def test_failed_or_cancelled_task_raises_that_error() -> None:
    tasks = ScriptedTasks()
    frames = generation(tasks).chunks()
    await anext(frames)
    tasks.fail(Reason.CONTEXT_LENGTH_EXCEEDED, "too long")
    with pytest.raises(WeftError, match="too long") as caught:
        await all_of(frames)
    assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert tasks.cancelled == []
    tasks = ScriptedTasks()
    frames = generation(tasks).chunks()
    await anext(frames)
    await tasks.cancel("ann", next(iter(tasks.kept)))
    with pytest.raises(WeftError) as caught:
        await all_of(frames)
    assert caught.value.reason is Reason.CANCELLED


async def test_rejected_submission_raises_that_error_and_cancels_nothing() -> None:
    tasks = ScriptedTasks(failure=WeftError(Reason.TOO_MANY_RESOURCES, "no more"))
    with pytest.raises(WeftError, match="no more"):
        await all_of(generation(tasks).chunks())
    assert (tasks.kept, tasks.cancelled) == ({}, [])


async def test_interrupted_watch_resumes_without_duplicates() -> None:
    clock = FakeClock()

    class Breaking(ScriptedTasks):
        breaks = 1

        async def watch(
            self, tenant: str, task_id: str, after_event: int = 0
        ) -> AsyncGenerator[task_service_pb2.WatchTaskResponse]:
            pieces = 0
            async for item in super().watch(tenant, task_id, after_event):
                yield item
                pieces += item.HasField("piece")
                if pieces == 1 and self.breaks:
                    self.breaks -= 1
                    raise WeftError(Reason.WATCH_LAGGED, "too slow")

    tasks = Breaking(at_once=[HELLO, WORLD])
    reading = asyncio.create_task(all_of(generation(tasks, clock=clock).chunks()))
    await clock.wait_for_sleepers(1)
    await clock.advance(0.4)
    assert text_of(await reading) == "Hello, world"
    assert tasks.watched_from == [0, tasks.one.pieces[0].last_event]


async def test_task_store_outage_is_tolerated_for_a_limited_time() -> None:
    class Away(ScriptedTasks):
        async def watch(
            self, tenant: str, task_id: str, after_event: int = 0
        ) -> AsyncGenerator[task_service_pb2.WatchTaskResponse]:
            if self.watch_failures:
                self.watched_from.append(after_event)
                raise self.watch_failures.pop(0)
            async for item in super().watch(tenant, task_id, after_event):
                yield item

    def away(count: int) -> list[WeftError]:
        return [WeftError(Reason.SERVICE_UNAVAILABLE, "restarting") for _ in range(count)]

    clock, tasks = FakeClock(), Away(at_once=[HELLO, WORLD], watch_failures=away(2))
    reading = asyncio.create_task(all_of(generation(tasks, clock=clock).chunks()))
    for pause in (0.4, 0.8):
        await clock.wait_for_sleepers(1)
        await clock.advance(pause)
    assert text_of(await reading) == "Hello, world"

    tasks = Away(watch_failures=away(9))
    reading = asyncio.create_task(all_of(generation(tasks, clock=clock).chunks()))
    for pause in (0.4, 0.8):
        await clock.wait_for_sleepers(1)
        await clock.advance(pause)
    with pytest.raises(WeftError, match="restarting") as caught:
        await reading
    assert caught.value.metadata["task_id"] in tasks.kept
    assert len(tasks.watched_from) == 3


async def test_embedding_returns_the_vectors_of_the_completed_attempt() -> None:
    tasks = ScriptedTasks()
    call = embedding(tasks)
    reading = asyncio.create_task(call.result())
    await tasks.was_watched.wait()
    tasks.begin()
    tasks.say(output([started()], vectors=[[9.0]]))
    await asyncio.sleep(0)
    tasks.lose()
    tasks.begin()
    tasks.say(output([started()], [finished()], vectors=[[0.5], [0.25]]))
    tasks.complete()
    assert [list(vector.values) for vector in await reading] == [[0.5], [0.25]]
    assert call.receipt == sample_receipt()


async def test_failed_embedding_raises_and_a_disconnect_cancels_it() -> None:
    tasks = ScriptedTasks()
    reading = asyncio.create_task(embedding(tasks).result())
    await tasks.was_watched.wait()
    tasks.fail(Reason.UNSUPPORTED_OPERATION, "it does not embed")
    with pytest.raises(WeftError, match="does not embed"):
        await reading
    tasks = ScriptedTasks()
    reading = asyncio.create_task(embedding(tasks).result())
    await tasks.was_watched.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert tasks.cancelled == list(tasks.kept)
