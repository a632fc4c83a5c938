"""The figures of an answer that its runner measures or adds up: speed, wall time, times over several turns."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kit.running_record import running_record

from runner_svc.backend.port import Backend, CallInfo
from runner_svc.chat.receipt import AnswerReceipt
from runner_svc.instance.admission import MIN_MEASURED_SECONDS, AdmittedRequest, tokens_per_second
from runner_svc.request_records import RequestRecord, RequestRecords
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, usage_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.token_counts import TokenCounter
from weft_testing.fake_clock import FakeClock

Event = event_pb2.InferenceEvent


def test_first_token_ends_the_wait_and_is_not_counted() -> None:
    assert tokens_per_second(11, 2.0, 3.0) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("tokens", "first", "last"),
    [(0, None, None), (1, 1.0, 1.0), (50, 1.0, 1.0), (50, 1.0, 1.0 + MIN_MEASURED_SECONDS / 2), (0, 1.0, 9.0)],
)
def test_unmeasurable_speed_is_omitted(tokens: int, first: float | None, last: float | None) -> None:
    assert tokens_per_second(tokens, first, last) is None


def _record(clock: FakeClock) -> RequestRecord:
    return RequestRecord(
        request_id="r", model="m", clock=clock, started=0.0, started_at=clock.utc_now(), last_progress=0.0
    )


def _engine(clock: FakeClock, *, told: float | None = None, tokens: int = 5) -> Backend:
    """Tokens, ten per second."""

    async def generate(payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        del payload
        await clock.advance(2.0)
        for number in range(tokens):
            if number:
                await clock.advance(0.1)
            call.on_token()
            yield [Event(delta=event_pb2.Delta(text=f"{number}"))]
        receipt = receipt_pb2.Receipt(usage=usage_pb2.Usage(prompt_tokens=3, completion_tokens=tokens))
        if told is not None:
            receipt.tokens_per_second = told
        yield [Event(finished=event_pb2.Finished(receipt=receipt))]

    return cast("Backend", SimpleNamespace(generate=generate))


async def _receipt(clock: FakeClock, engine: Backend) -> receipt_pb2.Receipt:
    work = AdmittedRequest(_record(clock), engine, lambda _: None)
    frames = [frame async for frame in work.generate(chat_pb2.ChatPayload(), CallInfo(request_id="r", traceparent=""))]
    return frames[-1][-1].finished.receipt


async def test_engine_without_a_reported_speed_is_measured() -> None:
    """Observed: "0 tokens/s" for every server that reports no timings."""
    clock = FakeClock()
    assert (await _receipt(clock, _engine(clock))).tokens_per_second == pytest.approx(10.0)


async def test_speed_reported_by_an_engine_is_kept() -> None:
    clock = FakeClock()
    assert (await _receipt(clock, _engine(clock, told=42.0))).tokens_per_second == 42.0


async def test_single_token_without_duration_has_no_speed() -> None:
    """Observed: "1000000 tokens/s" of llama.cpp's server."""
    clock = FakeClock()
    assert not (await _receipt(clock, _engine(clock, told=1_000_000.0, tokens=1))).HasField("tokens_per_second")


async def test_model_tokens_per_second_update_while_its_requests_stream() -> None:
    """Observed: 0 tokens/s while four requests streamed."""
    clock = FakeClock()
    records = RequestRecords("m", clock)
    with running_record(records, "a") as one, running_record(records, "b") as other:
        assert records.tokens_per_second is None
        for _ in range(10):
            one.note_token()
            other.note_token()
            await clock.advance(0.5)
        assert records.tokens_per_second == pytest.approx(4.0)
        await clock.advance(100.0)
        assert records.tokens_per_second is None
    assert records.tokens_per_second is None


async def test_running_request_counts_its_tokens_and_the_speed_of_its_turn() -> None:
    clock = FakeClock()
    with running_record(RequestRecords("m", clock), "a") as record:
        record.begin_turn()
        assert record.tokens_per_second is None
        for _ in range(5):
            record.note_token()
            await clock.advance(0.5)
        assert record.tokens_per_second == pytest.approx(1.6)
        record.begin_turn()
        assert record.tokens_per_second is None
        assert record.output_tokens == 5
    assert record.tokens_per_second is None


async def test_wall_time_runs_from_the_engine_call_to_its_last_event() -> None:
    clock = FakeClock()
    assert (await _receipt(clock, _engine(clock))).engine_timings.wall_time.ToMilliseconds() == 2400


def test_engine_times_are_summed_if_all_turns_have_them() -> None:
    total = AnswerReceipt(_record(FakeClock()))
    for prefill, tokenize in ((100, 3), (50, None)):
        turn = receipt_pb2.Receipt(usage=usage_pb2.Usage(completion_tokens=4))
        turn.engine_timings.wall_time.FromMilliseconds(400)
        turn.engine_timings.prefill_time.FromMilliseconds(prefill)
        if tokenize is not None:
            turn.engine_timings.tokenize_time.FromMilliseconds(tokenize)
        total.add_turn(turn)
    timings = total.end()[-1].finished.receipt.engine_timings
    assert (timings.wall_time.ToMilliseconds(), timings.prefill_time.ToMilliseconds()) == (800, 150)
    assert not timings.HasField("tokenize_time"), "a sum of some of the turns is not the time of the answer"
    assert not timings.HasField("decode_time")


def test_turn_ended_early_makes_the_answer_times_unknown() -> None:
    total = AnswerReceipt(_record(FakeClock()))
    turn = receipt_pb2.Receipt()
    turn.engine_timings.prefill_time.FromMilliseconds(100)
    total.add_turn(turn)
    total.add_unfinished_turn(TokenCounter(chat_pb2.ChatPayload(), whole=False))
    assert not total.end()[-1].finished.receipt.engine_timings.HasField("prefill_time")


def test_times_unknown_to_every_turn_are_absent_and_not_zero() -> None:
    def receipt_of(*turns: Any) -> receipt_pb2.Receipt:
        total = AnswerReceipt(_record(FakeClock()))
        for turn in turns:
            total.add_turn(turn)
        return total.end()[-1].finished.receipt

    unknown = receipt_pb2.Receipt(usage=usage_pb2.Usage(completion_tokens=4))
    known = receipt_pb2.Receipt(usage=usage_pb2.Usage(completion_tokens=4), tokens_per_second=8.0)
    known.gpu_time.FromMilliseconds(500)
    assert not receipt_of(unknown).HasField("gpu_time")
    assert not receipt_of(unknown).HasField("tokens_per_second")
    assert receipt_of(unknown, known).gpu_time.ToMilliseconds() == 500
    assert receipt_of(unknown, known).tokens_per_second == pytest.approx(8.0)
