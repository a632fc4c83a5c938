"""The dispatcher against a scripted scheduler and a real runner stub over gRPC."""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import grpc
import pytest
import structlog
from typing_extensions import override

from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, usage_pb2
from weft.api.registry.v1.tenant_pb2 import Tenant, TenantManifest
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.api.runner.v1 import generation_service_pb2, generation_service_pb2_grpc, ticket_pb2
from weft.dispatch.captured import CapturedRequest, CaptureSender
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.fleet import FleetView
from weft.dispatch.frames import GenerationPayload
from weft.dispatch.operation_table import CHAT
from weft.dispatch.placement import (
    MAX_ATTEMPT_MESSAGE_CHARS,
    Decision,
    OnCancelled,
    Placement,
    canceller_of,
    in_queue,
    request_cancelled,
)
from weft.dispatch.request_receipt import RequestContext
from weft.durable.ended_requests import EndedRequest, EndedRequests, RequestObserver
from weft.kernel.channels.rpc import ChannelPool, answering, new_server
from weft.kernel.errors.error_tree import WeftError, quoting_engine
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest, PrefixHolder
from weft.kernel.requests.request_values import Handling, Operation, Priority, Skill
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft.kernel.time.timestamps import optional_duration
from weft.kernel.values.address import relayed_address
from weft.link.carried_calls import CallStreams
from weft_testing.carried import carry
from weft_testing.fake_clock import FakeClock

Step = event_pb2.InferenceEvent | Exception | asyncio.Event


def _text(text: str) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(delta=event_pb2.Delta(text=text))


STARTED = event_pb2.InferenceEvent(started=event_pb2.Started(runner="a"))
FINISHED = event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt_pb2.Receipt(host="titan")))
DIED = WeftError(Reason.SERVER_DIED, "it died")


class ScriptedScheduler(Placement):
    """Grants the same runner for each attempt, until the script refuses."""

    def __init__(self, address: str, *words: Decision | WeftError | Exception) -> None:
        self._address = address
        self._words = list(words)
        self.failed: list[tuple[int, Reason]] = []
        self.finished: list[Reason] = []
        self.receipts: list[receipt_pb2.Receipt | None] = []
        self.asked: PlacementRequest | None = None
        self.keep_alive_seconds: float | None = None
        self.priority: Priority | None = None
        self.seconds_left: float | None = None
        self.claims = b""
        """What the grants say."""
        self.first_content: list[int] = []
        self.on_cancelled: OnCancelled | None = None

    def place(self, request: PlacementRequest) -> Self:
        self.asked = request
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def next_decision(self) -> Decision:
        if self._words:
            word = self._words.pop(0)
            if isinstance(word, Exception):
                raise word
            return word
        granted = Granted(
            ticket=ticket_pb2.Ticket(claims=self.claims),
            runner="a",
            runner_incarnation="1",
            address=self._address,
            model="m",
            attempt=len(self.failed) + 1,
            keep_alive=optional_duration(self.keep_alive_seconds),
            priority=0 if self.priority is None else self.priority.wire,  # type: ignore[arg-type]  # same numbers
            time_left=optional_duration(self.seconds_left),
        )
        return Decision(granted=granted)

    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        self.on_cancelled = on_cancelled

    async def report_first_content(self, attempt: int) -> None:
        self.first_content.append(attempt)

    async def report_attempt_failed(
        self, attempt: int, reason: Reason, message: str = "", retry_after_seconds: float | None = None
    ) -> None:
        self.failed.append((attempt, reason))

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        self.finished.append(reason)
        self.receipts.append(receipt)
        return True


class ScriptedRunner(generation_service_pb2_grpc.GenerationServiceServicer):
    """Plays one script per call."""

    def __init__(self, *scripts: list[Step]) -> None:
        self._scripts = list(scripts)
        self.requests: list[generation_service_pb2.GenerateRequest] = []

    async def Generate(  # noqa: N802 - the rpc's name
        self, request: generation_service_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_service_pb2.GenerateResponse]:
        self.requests.append(request)
        async with answering(context):
            for step in self._scripts.pop(0):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield generation_service_pb2.GenerateResponse(events=[step])


@asynccontextmanager
async def _runner(folder: Path, *scripts: list[Step]) -> AsyncGenerator[str]:
    async with _listening(folder, ScriptedRunner(*scripts)) as address:
        yield address


@asynccontextmanager
async def _listening(folder: Path, runner: ScriptedRunner) -> AsyncGenerator[str]:
    server = new_server()
    carry(server, runner, generation_service_pb2)
    address = f"unix:{folder / 'runner.sock'}"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(grace=0.5)


def _about() -> RequestContext:
    return RequestContext(
        request_id="r1", tenant="t", model="m", operation=Operation.CHAT, traceparent=new_traceparent()
    )


async def _generate(
    scheduler: ScriptedScheduler,
    payload: chat_pb2.ChatPayload | None = None,
    *,
    whole: bool = False,
    joined_texts: bool = False,
    **about: Any,
) -> tuple[list[event_pb2.InferenceEvent], Exception | None, receipt_pb2.Receipt | None]:
    channels = ChannelPool()
    streams = CallStreams(channels)
    context = RequestContext(
        request_id="r1", tenant="t", model="m", operation=Operation.CHAT, traceparent=new_traceparent(), **about
    )
    call = Dispatcher(scheduler, streams).call(CHAT, context, payload or chat_pb2.ChatPayload(), whole=whole)
    call.joined_texts = joined_texts
    events: list[event_pb2.InferenceEvent] = []
    failure: Exception | None = None
    try:
        async for frame in call.chunks():
            events.extend(frame)
    except Exception as error:  # noqa: BLE001 - what it raises is what is looked at
        failure = error
    await channels.close()
    return events, failure, call.receipt


async def test_finished_stream_leaves_no_reference_cycles(tmp_path: Path) -> None:
    """Calls that were iterated are cycles: a collection took 8 ms, and was most of the latency's tail."""
    count = 20
    scripts: list[list[Step]] = [[STARTED, _text("a"), FINISHED] for _ in range(count)]
    async with _runner(tmp_path, *scripts) as address:
        channels = ChannelPool()
        streams = CallStreams(channels)
        dispatcher = Dispatcher(ScriptedScheduler(address), streams)
        gc.collect()
        gc.disable()
        try:
            for _ in range(count):
                async for _frame in dispatcher.call(CHAT, _about(), chat_pb2.ChatPayload()).chunks():
                    pass
            for _ in range(1000):
                left = _streams_in_memory()
                if left < count / 2:
                    break
                await asyncio.sleep(0.01)  # one that has just ended may still be on its way out
        finally:
            gc.enable()
        await channels.close()
    assert left < count / 2


def _streams_in_memory() -> int:
    return sum(isinstance(each, grpc.aio.UnaryStreamCall) for each in gc.get_objects())


async def test_completed_stream_ends_with_the_full_receipt(tmp_path: Path) -> None:
    async with _runner(tmp_path, [STARTED, _text("a"), _text("b"), FINISHED]) as address:
        scheduler = ScriptedScheduler(address)
        events, failure, receipt = await _generate(scheduler)
    assert failure is None
    assert "".join(event.delta.text for event in events) == "ab"
    assert events[-1].finished.receipt == receipt
    assert receipt is not None
    assert (receipt.host, receipt.request_id, receipt.outcome) == ("titan", "r1", receipt_pb2.OUTCOME_COMPLETED)
    assert (scheduler.first_content, scheduler.finished) == ([1], [Reason.UNSPECIFIED])
    assert scheduler.receipts == [receipt], "the router is told what happened"


class KeptCaptures(CaptureSender):
    """Keeps what would be sent to the registry."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.sent: list[tuple[str, str]] = []

    def send(self, captured: CapturedRequest) -> None:
        self.sent.append((captured.message().prompt, captured.message().answer))


@pytest.mark.parametrize(("left_after", "answer"), [(None, "ab"), (2, "a")], ids=["complete", "the caller leaves"])
async def test_capture_has_what_the_caller_got_and_the_receipt_says_so(
    tmp_path: Path, left_after: int | None, answer: str
) -> None:
    async with _runner(tmp_path, [STARTED, _text("a"), _text("b"), FINISHED]) as address:
        channels, captures, frame_count = ChannelPool(), KeptCaptures(), 0
        streams = CallStreams(channels)
        tenant = Tenant(manifest=TenantManifest(name="t", capture=True))
        fleet = SimpleNamespace(view=FleetView(revision=1, tenants={"t": tenant}))
        dispatcher = Dispatcher(ScriptedScheduler(address), streams, fleet=fleet)
        dispatcher.observers = (captures,)
        message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="Hi")])
        call = dispatcher.call(CHAT, _about(), chat_pb2.ChatPayload(messages=[message]))
        async with aclosing(call.chunks()) as frames:
            async for _ in frames:
                frame_count += 1
                if frame_count == left_after:
                    break
        await channels.close()
    assert captures.sent == [("[user]\nHi", answer)]
    assert call.receipt is not None
    assert call.receipt.captured


async def test_request_that_no_runner_got_is_not_captured() -> None:
    captures, channels = KeptCaptures(), ChannelPool()
    streams = CallStreams(channels)
    tenant = Tenant(manifest=TenantManifest(name="t", capture=True))
    refusal = ScriptedScheduler("unix:none", WeftError(Reason.QUEUE_FULL, "full"))
    dispatcher = Dispatcher(refusal, streams, fleet=SimpleNamespace(view=FleetView(revision=1, tenants={"t": tenant})))
    dispatcher.observers = (captures,)
    call = dispatcher.call(CHAT, _about(), chat_pb2.ChatPayload())
    with pytest.raises(WeftError):
        await call.result()
    assert captures.sent == []
    assert call.receipt is not None
    assert not call.receipt.captured
    await channels.close()


class FailingObserver(RequestObserver):
    """Wants every request, and fails at its end."""

    def __init__(self) -> None:
        self.got: list[str] = []

    @override
    def wants(self, view: FleetView, context: RequestContext, payload: GenerationPayload) -> bool:
        return True

    @override
    async def ended(self, request: EndedRequest) -> None:
        self.got.append(request.answer.events[-1].WhichOneof("event") or "")
        raise ValueError


async def test_request_is_answered_although_its_observer_fails(tmp_path: Path) -> None:
    observer = FailingObserver()
    ended = EndedRequests("failing", observer)
    async with _runner(tmp_path, [STARTED, _text("a"), FINISHED]) as address:
        channels = ChannelPool()
        dispatcher = Dispatcher(ScriptedScheduler(address), CallStreams(channels))
        dispatcher.observers = (ended,)
        call = dispatcher.call(CHAT, _about(), chat_pb2.ChatPayload())
        frames = [frame async for frame in call.chunks()]
        await ended.stop()
        await channels.close()
    assert frames[-1][-1].WhichOneof("event") == "finished"
    assert observer.got == ["finished"]
    assert call.receipt is not None
    assert not call.receipt.captured


class FinishingRunner(ScriptedRunner):
    """Has work left after its last event."""

    def __init__(self) -> None:
        super().__init__([STARTED, _text("a"), FINISHED])
        self.may_end = asyncio.Event()
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether it ended by itself."""

    async def Generate(  # noqa: N802 - the rpc's name
        self, request: generation_service_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_service_pb2.GenerateResponse]:
        by_itself = False
        try:
            async for response in super().Generate(request, context):
                yield response
            await self.may_end.wait()
            by_itself = True
        finally:
            self.ended.set_result(by_itself)


@pytest.mark.parametrize(("patience_seconds", "by_itself"), [(60.0, True), (0.0, False)])
async def test_stream_of_a_complete_answer_closes_unless_it_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_seconds: float, by_itself: bool
) -> None:
    """A reset reached runners that were still finishing, and cost them the connection to their engine."""
    monkeypatch.setattr("weft.dispatch.dispatcher.STREAM_END_SECONDS", patience_seconds)
    runner = FinishingRunner()
    async with _listening(tmp_path, runner) as address:
        channels = ChannelPool()
        streams = CallStreams(channels)
        call = Dispatcher(ScriptedScheduler(address), streams).call(CHAT, _about(), chat_pb2.ChatPayload())
        async for _frame in call.chunks():
            pass
        if by_itself:
            # What a reset would need to get there.
            for _ in range(100):
                await asyncio.sleep(0)
            assert not runner.ended.done()
            runner.may_end.set()
        assert await runner.ended is by_itself
        await channels.close()


async def test_failure_before_content_is_reported_and_the_next_grant_is_used(tmp_path: Path) -> None:
    async with _runner(tmp_path, [STARTED, DIED], [STARTED, _text("a"), FINISHED]) as address:
        scheduler = ScriptedScheduler(address)
        _, failure, receipt = await _generate(scheduler)
    assert failure is None
    assert scheduler.failed == [(1, Reason.SERVER_DIED)]
    assert receipt is not None
    assert [Reason(attempt.reason) for attempt in receipt.attempts] == [Reason.SERVER_DIED, Reason.UNSPECIFIED]
    assert [attempt.model for attempt in receipt.attempts] == ["m", "m"]


LINES = ("loaded", "busy")


@pytest.mark.parametrize("fails_late", [True, False])
async def test_router_gets_engine_exit_and_log_and_the_caller_only_the_message(
    tmp_path: Path, *, fails_late: bool
) -> None:
    died = WeftError(Reason.SERVER_DIED, "it died" + "!" * MAX_ATTEMPT_MESSAGE_CHARS)
    died.engine_exit, died.engine_log = "signal SIGKILL", LINES
    async with _runner(tmp_path, [STARTED, *([_text("a")] if fails_late else []), died]) as address:
        scheduler = _giving_up(ScriptedScheduler(address))
        _, failure, receipt = await _generate(scheduler)
    assert isinstance(failure, WeftError)
    assert receipt is not None
    assert (failure.engine_exit, len(failure.engine_log), len(receipt.attempts[0].engine_log)) == ("", 0, 0)
    (told,) = scheduler.receipts
    assert told is not None
    assert (told.attempts[0].engine_exit, list(told.attempts[0].engine_log)) == ("signal SIGKILL", [*LINES])
    assert told.attempts[0].message == died.message[:MAX_ATTEMPT_MESSAGE_CHARS]


@pytest.mark.parametrize("reason", [Reason.TOOL_CALL_INVALID, Reason.REPEATED_LINE_LOOP])
async def test_generated_text_reaches_the_caller_and_no_record(tmp_path: Path, reason: Reason) -> None:
    """Records have no content; the errors of attempts brought it into them."""
    quoting = WeftError(reason, "the model wrote: my secret")
    async with _runner(tmp_path, [STARTED, _text("a"), quoting]) as address:
        scheduler = ScriptedScheduler(address)
        _, failure, _ = await _generate(scheduler)
    assert isinstance(failure, WeftError)
    assert failure.message == quoting.message
    (told,) = scheduler.receipts
    assert told is not None
    assert (Reason(told.attempts[0].reason), told.attempts[0].message) == (reason, "")


async def test_words_of_an_engine_reach_the_caller_and_readers_of_its_log_but_no_stored_field(tmp_path: Path) -> None:
    refused = quoting_engine(WeftError(Reason.BACKEND_REJECTED, "answered 422: my secret"), "answered 422: refused")
    async with _runner(tmp_path, [STARTED, refused]) as address:
        scheduler = _giving_up(ScriptedScheduler(address))
        _, failure, _ = await _generate(scheduler)
    assert isinstance(failure, WeftError)
    assert failure.message == refused.message
    assert "secret" not in str(failure), "tracebacks are logged"
    (told,) = scheduler.receipts
    assert told is not None
    assert told.attempts[0].message == "answered 422: refused"
    assert list(told.attempts[0].engine_log) == [refused.message], "kept in memory for those who may see runners"


async def test_internal_error_text_is_logged_under_its_request_id() -> None:
    """Callers are referred to the log, which had nothing of an error that another process had caused."""
    with structlog.testing.capture_logs() as lines:
        _, failure, _ = await _generate(ScriptedScheduler("", WeftError(Reason.INTERNAL, "Unexpected KeyError")))
    assert failure is not None
    found = [line for line in lines if line["event"] == "request ended with an internal error"]
    assert [(line["request_id"], line["error"]) for line in found] == [("r1", "Unexpected KeyError")]


async def test_failure_after_content_ends_the_request_and_reports_started_content(tmp_path: Path) -> None:
    async with _runner(tmp_path, [STARTED, _text("a"), DIED], [_text("never")]) as address:
        scheduler = ScriptedScheduler(address)
        events, failure, receipt = await _generate(scheduler)
    assert isinstance(failure, WeftError)
    assert failure.metadata["content_started"] == "true"
    assert (scheduler.failed, scheduler.finished) == ([], [Reason.SERVER_DIED])
    assert scheduler.receipts == [receipt], "the router is told what happened"
    assert [event.delta.text for event in events if event.HasField("delta")] == ["a"]
    assert receipt is not None
    assert receipt.outcome == receipt_pb2.OUTCOME_FAILED


@pytest.mark.parametrize("may_leave", [True, False])
async def test_failed_attempt_on_an_unknown_model_may_be_remote_if_its_ticket_allowed_it(
    tmp_path: Path, may_leave: bool
) -> None:
    async with _runner(tmp_path, [STARTED, DIED], [STARTED, _text("a"), FINISHED]) as address:
        scheduler = ScriptedScheduler(address)
        scheduler.claims = ticket_pb2.TicketClaims(allow_remote=may_leave).SerializeToString()
        _, _, receipt = await _generate(scheduler)
    assert receipt is not None
    assert receipt.left_premises is may_leave


@pytest.mark.parametrize("last", [[], [WeftError(Reason.CANCELLED, "why")]], ids=["no end", "cancelled by the runner"])
async def test_stream_that_the_runner_ends_is_a_lost_worker_and_no_cancellation(
    tmp_path: Path, last: list[Step]
) -> None:
    async with _runner(tmp_path, [STARTED, _text("a"), *last]) as address:
        _, failure, receipt = await _generate(ScriptedScheduler(address))
    assert isinstance(failure, WeftError)
    assert failure.reason is Reason.WORKER_LOST
    assert receipt is not None
    assert receipt.outcome == receipt_pb2.OUTCOME_FAILED


async def _cancelled_at(
    tmp_path: Path, *steps: Step, index: int
) -> tuple[ScriptedScheduler, Exception | None, receipt_pb2.Receipt | None]:
    """Runs a request that is cancelled when its caller has received this many frames."""
    async with _runner(tmp_path, list(steps)) as address:
        channels, scheduler = ChannelPool(), ScriptedScheduler(address)
        streams = CallStreams(channels)
        call = Dispatcher(scheduler, streams).call(CHAT, _about(), chat_pb2.ChatPayload())
        failure: Exception | None = None
        count = 0
        try:
            async for _ in call.chunks():
                count += 1
                if count == index:
                    assert scheduler.on_cancelled is not None
                    scheduler.on_cancelled(request_cancelled("key:k1"))
        except WeftError as error:
            failure = error
        await channels.close()
    return scheduler, failure, call.receipt


@pytest.mark.parametrize("index", [1, 2])
async def test_request_cancelled_by_id_ends_with_the_name_of_the_canceller(tmp_path: Path, index: int) -> None:
    steps: list[Step] = [STARTED, _text("a"), asyncio.Event()]
    scheduler, failure, receipt = await _cancelled_at(tmp_path, *steps, index=index)
    assert isinstance(failure, WeftError)
    assert (failure.reason, canceller_of(failure)) == (Reason.CANCELLED, "key:k1")
    assert receipt is not None
    assert (receipt.outcome, receipt.cancelled_by) == (receipt_pb2.OUTCOME_CANCELLED, "key:k1")
    assert (scheduler.failed, scheduler.finished) == ([], [Reason.CANCELLED])
    assert scheduler.receipts == [receipt], "the router is told what happened"


async def test_cancellation_after_the_last_event_has_no_effect(tmp_path: Path) -> None:
    scheduler, failure, receipt = await _cancelled_at(tmp_path, STARTED, _text("a"), FINISHED, index=3)
    assert failure is None
    assert receipt is not None
    assert (receipt.outcome, receipt.cancelled_by) == (receipt_pb2.OUTCOME_COMPLETED, "")
    assert scheduler.finished == [Reason.UNSPECIFIED]


async def test_request_cancelled_while_queued_reaches_no_runner(tmp_path: Path) -> None:
    async with _runner(tmp_path) as address:
        scheduler = ScriptedScheduler(address, in_queue(1, "busy"), request_cancelled("local"))
        _, failure, receipt = await _generate(scheduler)
    assert canceller_of(failure) == "local"
    assert receipt is not None
    assert (receipt.outcome, receipt.cancelled_by) == (receipt_pb2.OUTCOME_CANCELLED, "local")
    assert not receipt.attempts


async def test_connection_closed_during_a_call_is_a_lost_worker_and_not_a_cancellation(
    tmp_path: Path,
) -> None:
    """A pool that has to make room for another runner's channel closes the one that was used longest ago."""
    async with _runner(tmp_path, [STARTED, _text("a"), asyncio.Event()]) as address:
        channels = ChannelPool()
        streams = CallStreams(channels)
        call = Dispatcher(ScriptedScheduler(address), streams).call(CHAT, _about(), chat_pb2.ChatPayload())
        frames = call.chunks()
        while not (await anext(frames))[0].HasField("delta"):
            pass
        await channels.close()
        with pytest.raises(WeftError) as caught:
            await anext(frames)
    assert caught.value.reason is Reason.WORKER_LOST
    assert call.receipt is not None
    assert call.receipt.outcome == receipt_pb2.OUTCOME_FAILED


async def test_caller_cancelled_during_generation_is_only_cancelled(tmp_path: Path) -> None:
    async with _runner(tmp_path, [STARTED, _text("a"), asyncio.Event()]) as address:
        channels, said = ChannelPool(), asyncio.Event()
        streams = CallStreams(channels)
        call = Dispatcher(ScriptedScheduler(address), streams).call(CHAT, _about(), chat_pb2.ChatPayload())

        async def read() -> None:
            async for frame in call.chunks():
                if frame[0].HasField("delta"):
                    said.set()

        reading = asyncio.create_task(read())
        await said.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await channels.close()
    assert call.receipt is not None
    assert call.receipt.outcome == receipt_pb2.OUTCOME_CANCELLED


async def test_runner_that_cannot_be_connected_to_is_unreachable_and_not_lost(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler(f"unix:{tmp_path}/nobody.sock")
    _, failure, receipt = await _generate(_giving_up(scheduler))
    assert isinstance(failure, WeftError)
    assert scheduler.failed == [(1, Reason.RUNNER_UNREACHABLE)]
    assert receipt is not None
    assert not receipt.left_premises


def _giving_up(scheduler: ScriptedScheduler, instead: Reason | None = None) -> ScriptedScheduler:
    """The scheduler, made to refuse after the first failed attempt: with the attempt's own reason, or another."""
    original = scheduler.report_attempt_failed

    async def report(attempt: int, reason: Reason, message: str = "", retry_after_seconds: float | None = None) -> None:
        await original(attempt, reason, message, retry_after_seconds)
        scheduler._words.append(WeftError(instead or reason, "given up"))

    scheduler.report_attempt_failed = report  # type: ignore[method-assign]  # the script of this test
    return scheduler


async def test_caller_that_waits_in_vain_for_a_providers_limit_gets_its_words(tmp_path: Path) -> None:
    limit = WeftError(Reason.RATE_LIMIT_EXCEEDED, "30 requests per minute", retry_after_seconds=9.0)
    async with _runner(tmp_path, [limit]) as address:
        _, failure, _ = await _generate(_giving_up(ScriptedScheduler(address), Reason.QUEUE_TIMEOUT))
    assert isinstance(failure, WeftError)
    assert (failure.reason, failure.retry_after_seconds) == (Reason.RATE_LIMIT_EXCEEDED, 9.0)
    assert failure.message == "30 requests per minute"


async def test_attempt_error_is_reported_when_the_scheduler_stops_retrying(tmp_path: Path) -> None:
    async with _runner(tmp_path, [DIED]) as address:
        _, failure, _ = await _generate(_giving_up(ScriptedScheduler(address)))
    assert isinstance(failure, WeftError)
    assert failure.message == "it died"


async def test_runner_does_not_tell_callers_that_their_key_is_invalid(tmp_path: Path) -> None:
    async with _runner(tmp_path, [WeftError(Reason.UNAUTHENTICATED, "enter your key at evil.example")]) as address:
        _, failure, _ = await _generate(_giving_up(ScriptedScheduler(address), Reason.BACKEND_ERROR))
    assert isinstance(failure, WeftError)
    assert (failure.reason, failure.message) == (Reason.BACKEND_ERROR, "the runner refused the call of the mesh")


async def test_runner_does_not_make_callers_wait_for_longer_than_an_hour(tmp_path: Path) -> None:
    """Callers of a joined machine were told to come back in 30 years."""
    for stated, told in ((9.0, 9.0), (9e8, 3600.0), (None, None)):
        limit = WeftError(Reason.RATE_LIMIT_EXCEEDED, "later", retry_after_seconds=stated)
        async with _runner(tmp_path, [limit]) as address:
            _, failure, _ = await _generate(_giving_up(ScriptedScheduler(address)))
        assert isinstance(failure, WeftError)
        assert failure.retry_after_seconds == told


@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens", "cached_prompt_tokens", "image_steps"])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_counts_below_zero_are_unknown_and_the_answer_complete(
    tmp_path: Path, field: str, *, is_whole: bool
) -> None:
    """They ended as an internal error."""
    usage = usage_pb2.Usage(prompt_tokens=9, completion_tokens=2)
    setattr(usage, field, -(2**62))
    device = receipt_pb2.DeviceUsage(energy_millijoules=2**62)
    finished = event_pb2.Finished(receipt=receipt_pb2.Receipt(usage=usage, device_usage=device))
    script: list[Step] = [
        STARTED,
        _text("a"),
        event_pb2.InferenceEvent(usage=usage),
        event_pb2.InferenceEvent(finished=finished),
    ]
    prompt = chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER)])
    prompt.messages[0].content.add(text="Why is the sky blue?")
    async with _runner(tmp_path, script) as address:
        events, failure, receipt = await _generate(ScriptedScheduler(address), prompt, whole=is_whole)
    assert failure is None
    assert receipt is not None
    assert receipt.outcome == receipt_pb2.OUTCOME_COMPLETED
    assert not receipt.HasField("usage")
    assert not receipt.device_usage.HasField("energy_millijoules")
    assert events[-1].finished.receipt == receipt
    assert not any(event.HasField("usage") for event in events)


async def test_other_scheduler_reasons_are_reported_unchanged(tmp_path: Path) -> None:
    """A request that was bounced and then waited too long timed out in the queue; it was not short of a slot."""
    async with _runner(tmp_path, [WeftError(Reason.NO_SLOT_AVAILABLE, "full")]) as address:
        _, failure, _ = await _generate(_giving_up(ScriptedScheduler(address), Reason.QUEUE_TIMEOUT))
    assert isinstance(failure, WeftError)
    assert failure.reason is Reason.QUEUE_TIMEOUT


async def test_bug_is_an_internal_failure_on_the_receipt_and_not_a_cancellation() -> None:
    _, failure, receipt = await _generate(ScriptedScheduler("unix:/nowhere", ZeroDivisionError("a bug")))
    assert isinstance(failure, ZeroDivisionError)
    assert receipt is not None
    assert Reason(receipt.reason) is Reason.INTERNAL


class UnansweredScheduler(ScriptedScheduler):
    """A scheduler of a router that does not answer."""

    async def __aenter__(self) -> Self:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")


async def test_end_of_a_request_whose_caller_leaves_while_it_is_placed_is_reported() -> None:
    ends: list[tuple[str, Reason]] = []
    dispatcher = Dispatcher(UnansweredScheduler("unix:/nowhere"), CallStreams(ChannelPool()))
    reporter: Any = SimpleNamespace(send=lambda asked, receipt, _: ends.append((asked.request_id, receipt.reason)))
    dispatcher.report_ends_to(reporter)
    reading = asyncio.ensure_future(anext(dispatcher.call(CHAT, _about(), chat_pb2.ChatPayload()).chunks()))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert ends == [("r1", Reason.CANCELLED)]


_PROMPT = event_pb2.InferenceEvent(progress=event_pb2.Progress(prompt_tokens=31, cached_tokens=8))


@pytest.mark.parametrize("breaks_off", [False, True])
async def test_receipt_counts_received_tokens_of_a_cancelled_or_broken_answer(tmp_path: Path, breaks_off: bool) -> None:
    """Its tokens were neither in receipts nor in usage."""
    async with _runner(
        tmp_path, [STARTED, _PROMPT, _text("a"), _text("b"), DIED if breaks_off else _text("c")]
    ) as address:
        channels = ChannelPool()
        streams = CallStreams(channels)
        call = Dispatcher(ScriptedScheduler(address), streams).call(CHAT, _about(), chat_pb2.ChatPayload())
        frames = call.chunks()
        texts = 0
        with suppress(WeftError):
            while texts < 2 or breaks_off:
                texts += sum(event.HasField("delta") for event in await anext(frames))
        await frames.aclose()
        await channels.close()
    assert call.receipt is not None
    assert call.receipt.outcome == (receipt_pb2.OUTCOME_FAILED if breaks_off else receipt_pb2.OUTCOME_CANCELLED)
    assert call.receipt.usage == usage_pb2.Usage(prompt_tokens=31, cached_prompt_tokens=8, completion_tokens=2)


async def test_uncounted_prompt_is_estimated_from_earlier_counts_and_marked(tmp_path: Path) -> None:
    """13 tokens were shown and billed for the 39 of the engine, as if it had counted them."""
    counted = receipt_pb2.Receipt(usage=usage_pb2.Usage(prompt_tokens=39, completion_tokens=1))
    finished = event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=counted))
    prompt = chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER)])
    prompt.messages[0].content.add(text="Why is the sky blue?")
    async with _runner(tmp_path, [STARTED, _text("a"), finished], [STARTED, _text("a"), DIED]) as address:
        channels, scheduler = ChannelPool(), ScriptedScheduler(address)
        streams = CallStreams(channels)
        dispatcher = Dispatcher(scheduler, streams)
        expected = []
        for _ in range(2):
            call = dispatcher.call(CHAT, _about(), prompt)
            with suppress(WeftError):
                async for _frame in call.chunks():
                    pass
            expected.append(0 if scheduler.asked is None else scheduler.asked.prompt_tokens)
        await channels.close()
    assert expected[0] < 39
    assert expected[1] == 39
    assert call.receipt is not None
    assert call.receipt.usage == usage_pb2.Usage(prompt_tokens=39, completion_tokens=1, prompt_estimated=True)


async def test_prompt_that_may_have_been_read_once_per_choice_is_not_learned_from(tmp_path: Path) -> None:
    """Engines that give one choice per request read it three times, and 117 tokens were expected for 39."""
    counted = receipt_pb2.Receipt(usage=usage_pb2.Usage(prompt_tokens=117, completion_tokens=3))
    finished = event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=counted))
    prompt = chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER)], choice_count=3)
    prompt.messages[0].content.add(text="Why is the sky blue?")
    async with _runner(tmp_path, [STARTED, _text("a"), finished]) as address:
        channels = ChannelPool()
        streams = CallStreams(channels)
        dispatcher = Dispatcher(ScriptedScheduler(address), streams)
        async for _frame in dispatcher.call(CHAT, _about(), prompt).chunks():
            pass
        await channels.close()
    assert dispatcher.prompt_counts.expected("m", 10) == 10


@pytest.mark.parametrize(("is_joined", "expected"), [(False, 1000), (True, 10)])
async def test_length_of_prompts_is_not_learned_from_joined_machines(
    tmp_path: Path, is_joined: bool, expected: int
) -> None:
    """One such count excluded the prompts of everyone from a pool."""
    counted = receipt_pb2.Receipt(usage=usage_pb2.Usage(prompt_tokens=2**40, completion_tokens=1))
    finished = event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=counted))
    prompt = chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER)])
    prompt.messages[0].content.add(text="Why is the sky blue?")
    async with _runner(tmp_path, [STARTED, _text("a"), finished]) as address:
        channels = ChannelPool()
        streams = CallStreams(channels)
        scheduler = ScriptedScheduler(relayed_address(address, "laptop") if is_joined else address)
        dispatcher = Dispatcher(scheduler, streams)
        async for _frame in dispatcher.call(CHAT, _about(), prompt).chunks():
            pass
        await channels.close()
    assert min(dispatcher.prompt_counts.expected("m", 10), 1000) == expected


async def test_deadline_is_not_a_cancellation_on_the_receipt(tmp_path: Path) -> None:
    """Whoever holds the connection ends the call then, and the log said that the caller had cancelled."""
    clock = FakeClock()
    async with _runner(tmp_path, [STARTED, _text("a"), _text("b"), FINISHED]) as address:
        channels = ChannelPool()
        streams = CallStreams(channels)
        about = replace(_about(), timeout_seconds=5.0)
        call = Dispatcher(ScriptedScheduler(address), streams, clock=clock).call(CHAT, about, chat_pb2.ChatPayload())
        frames = call.chunks()
        await anext(frames)
        await clock.advance(5.0)
        await frames.aclose()
        await channels.close()
    assert call.receipt is not None
    assert Reason(call.receipt.reason) is Reason.DEADLINE_EXCEEDED
    assert call.receipt.outcome == receipt_pb2.OUTCOME_FAILED


class SomeFleet:
    """A mesh of which nothing is known at first."""

    def __init__(self) -> None:
        self.view = FleetView()


async def test_agent_request_waits_for_the_first_mesh_snapshot(tmp_path: Path) -> None:
    """A gateway that has just started refused it: it knew no agent yet."""
    clock, fleet = FakeClock(), SomeFleet()
    async with _runner(tmp_path, [STARTED, _text("a"), FINISHED]) as address:
        channels = ChannelPool()
        streams = CallStreams(channels)
        dispatcher = Dispatcher(ScriptedScheduler(address), streams, clock=clock, fleet=fleet)
        call = dispatcher.call(CHAT, replace(_about(), model="agent/nobody"), chat_pb2.ChatPayload())
        asked = asyncio.create_task(anext(call.chunks()))
        await clock.wait_for_sleepers(1)
        assert not asked.done()
        fleet.view = FleetView(revision=1)
        await clock.advance(1.0)
        with pytest.raises(WeftError) as caught:
            await asked
        await channels.close()
    assert (caught.value.reason, "there is no agent nobody" in caught.value.message) == (Reason.MODEL_NOT_FOUND, True)


async def test_scheduler_gets_the_request_description_without_its_content(tmp_path: Path) -> None:
    payload = chat_pb2.ChatPayload()
    payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text="secret " * 1_000)
    payload.messages[0].content.add().image.media_type = "image/png"
    payload.sampling.max_tokens = 9
    async with _runner(tmp_path, [FINISHED]) as address:
        scheduler = ScriptedScheduler(address)
        await _generate(scheduler, payload, session="s", client_id="editor")
    asked = scheduler.asked
    assert asked is not None
    assert (asked.max_output_tokens, asked.skills, asked.client_id) == (9, frozenset({Skill.IMAGE}), "editor")
    assert asked.prompt_tokens > 1_000
    assert asked.prefix_digests
    assert asked.affinity_key not in (b"", b"s")
    assert "secret" not in repr(asked)


async def test_a_scheduler_is_told_where_the_beginning_of_a_prompt_was_sent_before(tmp_path: Path) -> None:
    payload, channels = chat_pb2.ChatPayload(), ChannelPool()
    streams = CallStreams(channels)
    payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text="long " * 1_000)
    async with _runner(tmp_path, [FINISHED], [FINISHED]) as address:
        scheduler = ScriptedScheduler(address)
        dispatcher, holders = Dispatcher(scheduler, streams), list[PrefixHolder | None]()
        for _ in range(2):
            async for _ in dispatcher.call(CHAT, _about(), payload).chunks():
                pass
            assert scheduler.asked is not None
            holders.append(scheduler.asked.prefix_holder)
        await channels.close()
    assert holders == [None, PrefixHolder("m", "a", "1", 4)]


@pytest.mark.parametrize(("own", "served"), [(None, 900.0), (5.0, 5.0)])
async def test_route_keep_alive_applies_if_the_request_sets_none(
    tmp_path: Path, own: float | None, served: float
) -> None:
    runner = ScriptedRunner([FINISHED])
    async with _listening(tmp_path, runner) as address:
        scheduler = ScriptedScheduler(address)
        scheduler.keep_alive_seconds = 900.0
        await _generate(scheduler, handling=Handling(keep_alive_seconds=own))
    assert runner.requests[0].options.keep_alive.seconds == served


@pytest.mark.parametrize("option", ["whole", "joined_texts"])
async def test_runner_is_told_how_the_answer_is_read(tmp_path: Path, option: str) -> None:
    runner = ScriptedRunner([FINISHED], [FINISHED])
    async with _listening(tmp_path, runner) as address:
        for value in (True, False):
            given: dict[str, Any] = {option: value}
            await _generate(ScriptedScheduler(address), **given)
    assert [getattr(request.options, option) for request in runner.requests] == [True, False]


@pytest.mark.parametrize(("granted", "served"), [(None, Priority.NORMAL), (Priority.LOW, Priority.LOW)])
async def test_runner_gets_the_band_of_the_profile_and_not_the_default_one(
    tmp_path: Path, granted: Priority | None, served: Priority
) -> None:
    runner = ScriptedRunner([FINISHED])
    async with _listening(tmp_path, runner) as address:
        scheduler = ScriptedScheduler(address)
        scheduler.priority = granted
        await _generate(scheduler)
    assert runner.requests[0].options.priority == served.wire


async def test_answer_beyond_its_route_budget_is_truncated_and_marked(tmp_path: Path) -> None:
    class EndlessRunner(ScriptedRunner):
        async def Generate(  # noqa: N802 - the rpc's name
            self, request: generation_service_pb2.GenerateRequest, context: Any
        ) -> AsyncIterator[generation_service_pb2.GenerateResponse]:
            yield generation_service_pb2.GenerateResponse(events=[_text("a")])
            await asyncio.sleep(60)

    async with _listening(tmp_path, EndlessRunner()) as address:
        scheduler = ScriptedScheduler(address)
        scheduler.seconds_left = 0.2
        _, failure, receipt = await _generate(scheduler, timeout_seconds=60.0)
    assert isinstance(failure, WeftError)
    assert failure.reason is Reason.DEADLINE_EXCEEDED
    assert "route" in failure.message
    assert receipt is not None
    assert receipt.outcome == receipt_pb2.OUTCOME_FAILED
