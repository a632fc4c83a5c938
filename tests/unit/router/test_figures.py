"""The figures of the last hour: the ring that counts, and the messages made of it."""

import math
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kit.fleet import runner_view
from kit.request_endings import ending
from kit.scheduling import placement_request

from router_svc.figures import (
    DAY,
    MAX_CLASS,
    FigureLimits,
    FigureRing,
    FiguresRecorder,
    RequestEnd,
    busiest,
    class_of,
    end_of,
    percentile,
)
from router_svc.receipt_counts import ReceiptCounts
from router_svc.usage import usage_of
from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.router.v1 import figures_pb2 as pb
from weft.api.router.v1.figure_step_pb2 import FigureStep, StepCounts
from weft.dispatch.fleet import FleetView
from weft.documents.codec import document_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

LIMITS = FigureLimits(step_seconds=10.0, max_steps=6, max_models=2, max_models_per_step=3, max_devices=2)
ASKED = placement_request()


COMPLETED: RequestEnd = {"completed": 1}


def titan(*devices: lease_pb2.Device) -> list[lease_service_pb2.HostMemory]:
    host = lease_service_pb2.HostMemory(host="titan")
    for device in devices:
        host.devices.add(device=device)
    return [host]


def sample(index: int = 0, used: int = 5, utilization: float = 0.5) -> lease_pb2.Device:
    return lease_pb2.Device(index=index, name="GPU", total_bytes=10, used_bytes=used, utilization=utilization)


def outcomes(counts: StepCounts) -> list[int]:
    return [counts.completed, counts.failed, counts.rejected, counts.cancelled]


def receipt(outcome: int = receipt_pb2.OUTCOME_COMPLETED, tokens: int = 11) -> receipt_pb2.Receipt:
    made = receipt_pb2.Receipt(outcome=outcome, model="qwen-1")  # type: ignore[arg-type]  # a number
    made.attempts.add(runner="titan", model="qwen-1")
    made.time_to_first_token.FromMilliseconds(500)
    made.total_time.FromMilliseconds(1500)
    made.usage.prompt_tokens, made.usage.cached_prompt_tokens, made.usage.completion_tokens = 7, 3, tokens
    return made


def test_requests_are_counted_in_the_step_in_which_they_ended() -> None:
    ring = FigureRing(LIMITS, 100.0)
    whole: RequestEnd = {"completed": 1, "prompt_tokens": 3, "cached_prompt_tokens": 1, "completion_tokens": 5}
    ring.tally.note_end("qwen", whole, 101.0)
    ring.tally.note_end("qwen", {"failed": 1, "prompt_tokens": 2}, 109.9)
    ring.tally.note_end("phi", {"rejected": 1}, 110.0)
    first, second = ring.steps(120.0)
    counted = first.counted.all
    assert (first.index, outcomes(counted), outcomes(second.counted.all)) == (10, [1, 1, 0, 0], [0, 0, 1, 0])
    assert (counted.prompt_tokens, counted.cached_prompt_tokens, counted.completion_tokens) == (5, 1, 5)
    assert list(first.counted.models) == ["qwen"]
    assert list(second.counted.models) == ["phi"]


def test_current_step_is_not_shown() -> None:
    ring = FigureRing(LIMITS, 100.0)
    ring.tally.note_end("qwen", COMPLETED, 105.0)
    assert ring.steps(109.0) == []
    assert [step.index for step in ring.steps(110.0)] == [10]


def test_step_has_peak_waiting_and_running_and_the_next_starts_with_the_current_values() -> None:
    ring = FigureRing(LIMITS, 0.0)
    ring.tally.note_load(3, 2, 1.0)
    ring.tally.note_load(1, 4, 2.0)
    ring.tally.note_load(0, 1, 25.0)
    assert [(step.counted.waiting, step.counted.running) for step in ring.steps(40.0)] == [
        (3, 4),
        (1, 4),
        (1, 4),
        (0, 1),
    ]


def streaming(**speeds: float) -> FleetView:
    """A mesh whose runner reports this many tokens per second of its models."""
    instances = {name: InstanceState(model=name, tokens_per_second=speed) for name, speed in speeds.items()}
    runner = runner_view("r1", instances=instances)
    return FleetView(1, {"r1": runner}, {}, {})


async def test_tokens_per_second_are_nonzero_while_answers_stream() -> None:
    clock = FakeClock()
    recorder = FiguresRecorder(clock, LIMITS)
    recorder.note_end(ending(ASKED, clock.monotonic(), Reason.UNSPECIFIED, receipt(), view=FleetView()))
    for view in (streaming(qwen=30.0, phi=12.0), streaming(qwen=40.0), streaming(qwen=20.0)):
        recorder.note_speeds(view)
    await clock.advance(2 * LIMITS.step_seconds)
    recorder.note_speeds(streaming())
    await clock.advance(LIMITS.step_seconds)
    figures = recorder.figures()
    assert list(figures.all.tokens_per_second) == [42.0, 20.0, 20.0]


def test_tokens_per_second_from_before_a_restart_are_unknown() -> None:
    ring = FigureRing(LIMITS, 100.0)
    ring.restore([(9, FigureStep(running=1))], 100.0)
    assert [step.speed for step in ring.steps(110.0)] == [None, 0.0]


def test_number_of_steps_is_bounded_after_any_idle_time() -> None:
    ring = FigureRing(LIMITS, 0.0)
    ring.tally.note_end("qwen", COMPLETED, 5.0)
    ring.tally.note_load(0, 1, 1e9)
    steps = ring.steps(1e9 + 10)
    assert [step.index for step in steps] == list(range(10**8 - 5, 10**8 + 1))
    assert not any(step.counted.HasField("all") for step in steps)


def test_reader_gets_the_steps_after_its_last_one() -> None:
    ring = FigureRing(LIMITS, 0.0)
    assert [step.index for step in ring.steps(45.0, after=1)] == [2, 3]
    assert ring.steps(45.0, after=3) == []


def test_models_beyond_the_step_bound_are_only_in_the_totals() -> None:
    ring = FigureRing(LIMITS, 0.0)
    for model in ("a", "b", "c", "d", "d"):
        ring.tally.note_end(model, COMPLETED, 1.0)
    (step,) = ring.steps(10.0)
    assert outcomes(step.counted.all) == [5, 0, 0, 0]
    assert sorted(step.counted.models) == ["a", "b", "c"]


def test_busiest_models_have_the_most_requests_over_all_steps() -> None:
    ring = FigureRing(LIMITS, 0.0)
    for at, model in ((1.0, "a"), (2.0, "b"), (11.0, "b"), (12.0, "c"), (13.0, "c"), (14.0, "c")):
        ring.tally.note_end(model, COMPLETED, at)
    assert busiest(ring.steps(20.0), 2) == ["c", "b"]


@pytest.mark.parametrize("seconds", [1e-4, 0.0007, 0.02, 1.0, 37.5, 600.0])
def test_percentile_is_at_most_a_tenth_too_high(seconds: float) -> None:
    shown = percentile({class_of(seconds): 1}, 0.5)
    assert seconds <= shown * (1 + 1e-9)
    assert shown <= seconds * 1.1 * 1.01


def test_half_of_the_times_are_below_the_median_and_19_of_20_below_p95() -> None:
    times = Counter(class_of(count / 10) for count in range(1, 101))
    assert 5.0 <= percentile(times, 0.5) <= 5.5
    assert 9.5 <= percentile(times, 0.95) <= 10.45
    assert math.isnan(percentile({}, 0.5))


def test_absurd_time_is_in_the_last_bucket() -> None:
    times = Counter(map(class_of, (-1.0, 0.0, 1e300)))
    assert percentile(times, 1.0) == pytest.approx(1e-4 * 1.1**MAX_CLASS, rel=0.01)


def test_device_shows_its_last_memory_and_its_mean_utilization() -> None:
    ring = FigureRing(LIMITS, 0.0)
    ring.note_devices(titan(sample(used=4, utilization=0.2)), 1.0)
    ring.note_devices(titan(sample(used=8, utilization=0.6), sample(1), sample(2)), 6.0)
    (step,) = ring.steps(10.0)
    device = step.devices["titan", 0]
    assert device.last.used_bytes == 8
    assert device.utilization_sum == pytest.approx(0.8)
    assert device.utilization_count == 2
    assert list(step.devices) == [("titan", 0), ("titan", 1)], "the third is beyond the bound"


def test_receipt_counts_tokens_and_times_and_for_a_failed_request_tokens_only() -> None:
    whole: RequestEnd = {
        "completed": 1,
        "retried": 0,
        "prompt_tokens": 7,
        "cached_prompt_tokens": 3,
        "completion_tokens": 11,
    }
    times: RequestEnd = {("time_to_first_token", class_of(0.5)): 1, ("time_per_output_token", class_of(0.1)): 1}
    assert end_of(ReceiptCounts(receipt())) == {**whole, **times}
    failed = end_of(ReceiptCounts(receipt(receipt_pb2.OUTCOME_FAILED)))
    assert (failed["failed"], failed["completion_tokens"]) == (1, 11)
    assert not times.keys() & failed.keys()
    assert ("time_per_output_token", class_of(0.1)) not in end_of(ReceiptCounts(receipt(tokens=1))), (
        "there is no token after the first"
    )


def test_attempts_beyond_the_first_of_a_request_are_counted_as_retries_beside_it() -> None:
    again = receipt()
    again.attempts.extend(receipt_pb2.Attempt(runner=f"box-{number}") for number in range(4))
    ends = end_of(ReceiptCounts(again))
    assert (ends["completed"], ends["retried"]) == (1, 4)
    assert usage_of(ReceiptCounts(again))["retried_count"] == 4


async def test_document_has_one_entry_per_step_and_null_for_unknown_values() -> None:
    clock = FakeClock()
    recorder = FiguresRecorder(clock, LIMITS)
    await clock.advance(10 - clock.monotonic() % 10)
    began = clock.utc_now()
    recorder.note_end(ending(ASKED, clock.monotonic(), Reason.UNSPECIFIED, receipt(), view=FleetView()))
    recorder.note_end(
        ending(ASKED, clock.monotonic(), Reason.CANCELLED, None, view=FleetView(), last_error=Reason.CANCELLED)
    )
    recorder.note_end(
        ending(ASKED, clock.monotonic(), view=FleetView(), refusal=WeftError(Reason.RATE_LIMIT_EXCEEDED, "x"))
    )
    host = lease_service_pb2.HostMemory(host="titan")
    host.devices.add(device=lease_pb2.Device(index=0, id="GPU-1", total_bytes=10, used_bytes=5))
    recorder.note_devices([host])
    await clock.advance(20.0)
    figures = recorder.figures()
    document = document_of(figures)
    assert document["kind"] == "figures"
    assert document["stepSeconds"] == 10
    assert document["stepCount"] == len(document["waiting"]) == len(document["all"]["completed"])
    assert figures.start_time.ToDatetime(tzinfo=UTC) + timedelta(seconds=10 * (document["stepCount"] - 2)) == began
    every = document["all"]
    assert [every[name][-2:] for name in ("completed", "failed", "rejected", "cancelled")] == [
        [1, 0],
        [0, 0],
        [1, 0],
        [1, 0],
    ]
    assert (every["promptTokens"][-2:], every["completionTokens"][-2:]) == ([7, 0], [11, 0])
    times = every["timeToFirstTokenSeconds"]
    assert times["p50"][-2:] == [pytest.approx(0.5, rel=0.1), None]
    assert times["totalP95"] == times["p95"][-2]
    assert [model["model"] for model in document["models"]] == ["unknown"], "the mesh knows no model"
    (device,) = document["devices"]
    assert (device["host"], device["usedBytes"][-2:], device["utilization"][-2:]) == (
        "titan",
        [5.0, None],
        [None, None],
    )


async def test_day_counts_the_same_requests_in_its_longer_steps() -> None:
    clock = FakeClock()
    recorder = FiguresRecorder(clock, LIMITS, day=FiguresRecorder(clock, DAY))
    assert recorder.day is not None
    await clock.advance(300 - clock.monotonic() % 300)
    for _ in range(3):
        recorder.tally.note_load(2, 1, clock.monotonic())
        recorder.note_end(ending(ASKED, clock.monotonic(), Reason.UNSPECIFIED, receipt(), view=FleetView()))
        recorder.note_speeds(streaming(qwen=30.0))
        recorder.note_devices(titan(sample()))
        await clock.advance(100.0)
    figures = recorder.day.figures()
    assert (figures.all.completed[-1], figures.waiting[-1], figures.all.tokens_per_second[-1]) == (3, 2, 30.0)
    assert list(figures.devices[0].utilization)[-1] == 0.5
    await clock.advance(2 * 86_400.0)
    assert recorder.day.figures().step_count == DAY.max_steps == 288


async def test_present_steps_of_hour_and_day_are_stored_with_their_requests() -> None:
    clock = FakeClock()
    recorder = FiguresRecorder(clock, LIMITS, day=FiguresRecorder(clock, DAY))
    for _ in range(2):
        recorder.note_end(ending(ASKED, clock.monotonic(), Reason.UNSPECIFIED, receipt(), view=FleetView()))
        recorder.tally.note_load(0, 3, clock.monotonic())
        steps = [list(each.unwritten()[0].values()) for each in reversed(recorder.recorders)]
    assert [(each.all.completed, each.running) for (each,) in steps] == [(2, 3), (2, 3)]


async def test_figures_watch_gets_the_history_and_then_each_completed_step() -> None:
    clock = FakeClock()
    recorder = FiguresRecorder(clock, FigureLimits(step_seconds=1.0, max_steps=5))
    await clock.advance(30.0)
    watch = recorder.watch()
    first = await anext(watch)
    assert first.step_count == 5
    recorder.tally.note_load(2, 1, clock.monotonic())
    await clock.advance(1.0)
    second = await anext(watch)
    assert (second.step_count, list(second.waiting), list(second.running)) == (1, [2], [1])
    assert _start(second) - _start(first) == timedelta(seconds=5)
    await watch.aclose()


def _start(figures: pb.Figures) -> datetime:
    return figures.start_time.ToDatetime(tzinfo=UTC)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ({}, "failed"),
        ({"last_error": Reason.CANCELLED}, "cancelled"),
        ({"last_error": Reason.QUEUE_FULL}, "rejected"),
        ({"last_error": Reason.SERVER_DIED, "was_placed": True}, "failed"),
    ],
)
async def test_request_refused_over_grpc_is_not_counted_as_cancelled(end: dict[str, Any], outcome: str) -> None:
    clock = FakeClock()
    recorder = FiguresRecorder(clock, LIMITS)
    # Its dispatcher got the refusal at the end of the call, so it could not report a receipt.
    recorder.note_end(ending(ASKED, clock.monotonic(), Reason.CANCELLED, view=FleetView(), **end))
    counted = recorder.ring.present(clock.monotonic()).counted.all
    assert outcomes(counted) == [int(name == outcome) for name in ("completed", "failed", "rejected", "cancelled")]


@pytest.mark.parametrize("end", [{}, {"is_closing": True}, {"is_closing": True, "was_placed": True}])
async def test_request_that_continues_at_another_router_is_not_counted(end: dict[str, Any]) -> None:
    clock = FakeClock()
    recorder = FiguresRecorder(clock, LIMITS)
    error = Reason.SERVICE_UNAVAILABLE
    recorder.note_end(ending(ASKED, clock.monotonic(), view=FleetView(), last_error=error, **end))
    counted = recorder.ring.present(clock.monotonic()).counted.all
    assert outcomes(counted) == [0, 0, 0, 0]
