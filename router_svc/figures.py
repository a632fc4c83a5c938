"""The recorder of a router's figures of the last hour: from receipts and samples into the ring, and out as messages.

It lives where requests end. A step is read once it has ended; without a reader nothing runs but the counting itself.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice

from google.protobuf.duration_pb2 import Duration

from router_svc.observer import RequestEnded
from router_svc.policy.figures import (
    DeviceSample,
    FigureLimits,
    FigureRing,
    Outcome,
    RequestCounts,
    RequestEnd,
    Step,
    Times,
    busiest,
    devices_of,
    merged,
)
from router_svc.usage import MAX_COUNTED_TOKENS
from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1 import lease_service_pb2
from weft.api.router.v1 import figures_pb2 as pb
from weft.api.router.v1.figure_step_pb2 import FigureStep, StepCounts
from weft.dispatch.fleet import FleetView
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

NANOSECONDS = 1e9
UNKNOWN = math.nan
MEDIAN, TAIL = 0.5, 0.95
_OUTCOMES: Mapping[int, Outcome] = {
    receipt_pb2.OUTCOME_COMPLETED: Outcome.COMPLETED,
    receipt_pb2.OUTCOME_REJECTED: Outcome.REJECTED,
    receipt_pb2.OUTCOME_CANCELLED: Outcome.CANCELLED,
}


class FiguresRecorder:
    """Called from the router's event loop alone. What accelerators did is not kept over a restart."""

    def __init__(self, clock: Clock, limits: FigureLimits | None = None) -> None:
        self._clock = clock
        self._limits = limits or FigureLimits()
        self._ring = FigureRing(self._limits, clock.monotonic())
        self._closed = asyncio.Event()
        self._to_utc = clock.utc_now().timestamp() - clock.monotonic()
        """UTC less the monotonic clock at the start: a step has one time in UTC, whatever becomes of the clock."""
        self._first_unwritten = self._last_index() + 1

    def note_load(self, waiting: int, running: int, now: float) -> None:
        """Note how many requests wait and run from now on."""
        self._ring.note_load(waiting, running, now)

    def note_end(self, ended: RequestEnded) -> None:
        """Count a request that has ended."""
        asked, receipt = ended.request.spec.model, ended.receipt
        if receipt is not None:
            model = ended.view.label(receipt.model if receipt.attempts else asked)
            self._ring.note_end(end_of(model, receipt), ended.at)
            return
        outcome = Outcome.CANCELLED if ended.reason is Reason.CANCELLED else Outcome.FAILED
        if ended.refusal is not None:
            outcome = Outcome.REJECTED
        self._ring.note_end(RequestEnd(model=ended.view.label(asked), outcome=outcome), ended.at)

    def note_devices(self, hosts: Iterable[lease_service_pb2.HostMemory]) -> None:
        """Count a sample of the accelerators of all hosts."""
        samples = (_sample_of(host.host, device) for host in hosts for device in host.devices)
        self._ring.note_devices(islice(samples, self._limits.max_devices), self._clock.monotonic())

    def note_speeds(self, view: FleetView) -> None:
        """Note how many tokens per second the answers that run have, as runners reported it last."""
        speeds: dict[str, float] = {}
        for runner in view.runners.values():
            for state in runner.instances.values() if runner.active else ():
                if state.tokens_per_second > 0 and not state.base_model:
                    model = view.label(state.model)
                    speeds[model] = speeds.get(model, 0.0) + state.tokens_per_second
        busiest = sorted(speeds, key=lambda model: -speeds[model])[: self._limits.max_models_per_step]
        self._ring.note_speeds({model: speeds[model] for model in busiest}, self._clock.monotonic())

    def figures(self) -> pb.Figures:
        """Return the figures of the remembered steps that have ended."""
        return self._message(self._ring.steps(self._clock.monotonic()))

    async def watch(self) -> AsyncGenerator[pb.Figures]:
        """Yield the figures of the remembered steps, then those of each step that ends. Raises SHUTTING_DOWN."""
        last = self._last_index()
        yield self.figures()
        while not self._closed.is_set():
            seconds = self._limits.step_seconds
            with suppress(TimeoutError):
                async with asyncio.timeout((last + 2) * seconds - self._clock.monotonic()):
                    await self._closed.wait()
            steps = self._ring.steps(self._clock.monotonic(), after=last)
            if steps:
                last = steps[-1].index
                yield self._message(steps)
        raise WeftError(Reason.SHUTTING_DOWN, "the router is shutting down; watch again")

    def close(self) -> None:
        """End all watches with SHUTTING_DOWN."""
        self._closed.set()

    @property
    def limits(self) -> FigureLimits:
        """How much is remembered."""
        return self._limits

    def unwritten(self) -> tuple[Mapping[float, FigureStep], int]:
        """Return the steps that may have changed since they were written, by the time of their begin, and `written`'s.

        Steps without any request are left out.
        """
        now = self._clock.monotonic()
        present = self._ring.present(now)
        steps = [*self._ring.steps(now, after=self._first_unwritten - 1), present]
        begins = {self._begin_of(step): _to_message(step) for step in steps if not _is_empty(step)}
        return begins, present.index

    def note_written(self, upto: int) -> None:
        """Note that all steps before this number are written."""
        self._first_unwritten = upto

    def restore(self, steps: Mapping[float, FigureStep]) -> None:
        """Take the steps of before a restart, by the time of their begin. Called once, before anything is counted."""
        known = [_from_message(step, self._index_at(begin)) for begin, step in steps.items()]
        self._ring.restore(known, self._clock.monotonic())

    def _begin_of(self, step: Step) -> float:
        return step.index * self._limits.step_seconds + self._to_utc

    def _index_at(self, utc: float) -> int:
        return round((utc - self._to_utc) / self._limits.step_seconds)

    def _last_index(self) -> int:
        """Return the number of the last step that has ended."""
        return int(self._clock.monotonic() // self._limits.step_seconds) - 1

    def _message(self, steps: Sequence[Step]) -> pb.Figures:
        message = pb.Figures(
            step_count=len(steps),
            waiting=[step.waiting for step in steps],
            running=[step.running for step in steps],
        )
        message.step.FromNanoseconds(int(self._limits.step_seconds * NANOSECONDS))
        message.start_time.FromDatetime(self._start_of(steps))
        none = RequestCounts()
        _fill_requests(message.all, [step.requests or none for step in steps])
        message.all.tokens_per_second.extend(_or_unknown(step.speed) for step in steps)
        for model in busiest(steps, self._limits.max_models):
            counts = [step.models.get(model, none) for step in steps]
            requests = message.models.add(model=model).requests
            _fill_requests(requests, counts)
            speeds = (None if step.speed is None else step.speeds.get(model, 0.0) for step in steps)
            requests.tokens_per_second.extend(map(_or_unknown, speeds))
        for sample in devices_of(steps):
            _fill_device(message.devices.add(), sample, steps)
        return message

    def _start_of(self, steps: Sequence[Step]) -> datetime:
        """Return the time of day at which the first step began; of no steps, the one that continues."""
        now, seconds = self._clock.monotonic(), self._limits.step_seconds
        index = steps[0].index if steps else int(now // seconds)
        return self._clock.utc_now() - timedelta(seconds=now - index * seconds)


_OUTCOME_FIELDS = (
    (Outcome.COMPLETED, "completed"),
    (Outcome.FAILED, "failed"),
    (Outcome.REJECTED, "rejected"),
    (Outcome.CANCELLED, "cancelled"),
)
_TOKEN_FIELDS = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")


def _is_empty(step: Step) -> bool:
    return not (step.waiting or step.running or step.requests)


def _to_message(step: Step) -> FigureStep:
    message = FigureStep(waiting=step.waiting, running=step.running)
    if step.requests is not None:
        _fill_counts(message.all, step.requests)
    for model, counts in step.models.items():
        _fill_counts(message.models[model], counts)
    return message


def _fill_counts(message: StepCounts, counts: RequestCounts) -> None:
    for outcome, name in _OUTCOME_FIELDS:
        setattr(message, name, counts.outcomes[outcome])
    for name in _TOKEN_FIELDS:
        setattr(message, name, getattr(counts, name))
    message.time_to_first_token.update(counts.first_token.counts)
    message.time_per_output_token.update(counts.output_token.counts)


def _from_message(message: FigureStep, index: int) -> Step:
    step = Step(index, message.waiting, message.running)
    if message.HasField("all"):
        step.requests = _counts_from(message.all)
    step.models = {model: _counts_from(counts) for model, counts in message.models.items()}
    return step


def _counts_from(message: StepCounts) -> RequestCounts:
    counts = RequestCounts()
    for outcome, name in _OUTCOME_FIELDS:
        counts.outcomes[outcome] = getattr(message, name)
    for name in _TOKEN_FIELDS:
        setattr(counts, name, getattr(message, name))
    counts.first_token.counts = dict(message.time_to_first_token)
    counts.output_token.counts = dict(message.time_per_output_token)
    return counts


def end_of(model: str, receipt: receipt_pb2.Receipt) -> RequestEnd:
    """Return the end of a request by its receipt. Times are those of requests that completed."""
    usage, outcome = receipt.usage, _OUTCOMES.get(receipt.outcome, Outcome.FAILED)
    completion_tokens = _bounded(usage.completion_tokens)
    first = per_token = None
    if outcome is Outcome.COMPLETED and receipt.HasField("time_to_first_token"):
        first = _seconds_of(receipt.time_to_first_token)
        later, total = completion_tokens - 1, _seconds_of(receipt.total_time)
        if later > 0 and total >= first:
            per_token = (total - first) / later
    return RequestEnd(
        model=model,
        outcome=outcome,
        prompt_tokens=_bounded(usage.prompt_tokens),
        cached_prompt_tokens=_bounded(usage.cached_prompt_tokens),
        completion_tokens=completion_tokens,
        first_token_seconds=first,
        output_token_seconds=per_token,
    )


def _seconds_of(duration: Duration) -> float:
    return duration.seconds + duration.nanos / NANOSECONDS


def _bounded(tokens: int) -> int:
    return min(max(0, tokens), MAX_COUNTED_TOKENS)


def _sample_of(host: str, memory: lease_service_pb2.DeviceMemory) -> DeviceSample:
    device = memory.device
    return DeviceSample(
        host=host,
        index=device.index,
        name=device.name,
        total_bytes=device.total_bytes,
        used_bytes=device.used_bytes if device.HasField("used_bytes") else None,
        utilization=device.utilization if device.HasField("utilization") else None,
    )


def _fill_requests(message: pb.RequestFigures, steps: Sequence[RequestCounts]) -> None:
    for outcome, column in (
        (Outcome.COMPLETED, message.completed),
        (Outcome.FAILED, message.failed),
        (Outcome.REJECTED, message.rejected),
        (Outcome.CANCELLED, message.cancelled),
    ):
        column.extend(step.outcomes[outcome] for step in steps)
    message.prompt_tokens.extend(step.prompt_tokens for step in steps)
    message.cached_prompt_tokens.extend(step.cached_prompt_tokens for step in steps)
    message.completion_tokens.extend(step.completion_tokens for step in steps)
    _fill_times(message.time_to_first_token, [step.first_token for step in steps])
    _fill_times(message.time_per_output_token, [step.output_token for step in steps])


def _fill_times(message: pb.Percentiles, steps: Sequence[Times]) -> None:
    message.p50.extend(_or_unknown(step.percentile(MEDIAN)) for step in steps)
    message.p95.extend(_or_unknown(step.percentile(TAIL)) for step in steps)
    total = merged(steps)
    median, tail = total.percentile(MEDIAN), total.percentile(TAIL)
    if median is not None and tail is not None:
        message.total_p50, message.total_p95 = median, tail


def _fill_device(message: pb.DeviceFigures, sample: DeviceSample, steps: Sequence[Step]) -> None:
    message.host, message.index, message.name = sample.host, sample.index, sample.name
    message.total_bytes = sample.total_bytes
    for step in steps:
        device = step.devices.get((sample.host, sample.index))
        message.used_bytes.append(_or_unknown(None if device is None else device.last.used_bytes))
        message.utilization.append(_or_unknown(None if device is None else device.utilization))


def _or_unknown(figure: float | None) -> float:
    return UNKNOWN if figure is None else figure
