"""The figures of a router's last hour and day: rings of steps that count requests as they end, and their messages.

A step can be read once it has ended. Without a reader only the counting costs anything.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from router_svc.observer import RequestEnded
from router_svc.receipt_counts import ReceiptCounts
from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.api.router.v1 import figures_pb2 as pb
from weft.api.router.v1.figure_step_pb2 import FigureStep, StepCounts
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock

SHORTEST_SECONDS = 1e-4
"""Times up to this form the first class ..."""
CLASS_GROWTH = 1.1
"""... and each class ends at this multiple of the previous end, so a percentile is at most a tenth too high."""
MAX_CLASS = 200
"""The last class, without an end: times above 5 hours."""
_LOG_GROWTH = math.log(CLASS_GROWTH)
NANOSECONDS = 1e9
UNKNOWN = math.nan
MEDIAN, TAIL = 0.5, 0.95
_OUTCOMES: Mapping[int, str] = {
    receipt_pb2.OUTCOME_COMPLETED: "completed",
    receipt_pb2.OUTCOME_REJECTED: "rejected",
    receipt_pb2.OUTCOME_CANCELLED: "cancelled",
}
_COUNTS = (
    *("completed", "failed", "rejected", "cancelled", "retried"),
    *("prompt_tokens", "cached_prompt_tokens", "completion_tokens"),
)
_TIMES = ("time_to_first_token", "time_per_output_token")
RequestEnd = Mapping[str | tuple[str, int], int]
"""What requests add to the fields of StepCounts; to times, by name and class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureLimits:
    """Bounds of the stored figures."""

    step_seconds: float = 10.0
    max_steps: int = 360
    """Maximum stored steps; an hour at 10 s."""
    max_models: int = 8
    """Maximum models shown, those with the most requests. Others are only in the sums."""
    max_models_per_step: int = 64
    """Maximum models counted per step; others are only in the sums."""
    max_devices: int = 64
    """Maximum sampled accelerators, the first ones by host and number."""


DAY = FigureLimits(step_seconds=300.0, max_steps=288)
"""Of the last day, in steps of five minutes."""


@dataclass(slots=True)
class DeviceStep:
    """An accelerator in a step."""

    last: lease_pb2.Device = field(default_factory=lease_pb2.Device)
    utilization_sum: float = 0.0
    utilization_count: int = 0
    """Known samples only."""


@dataclass(slots=True)
class Step:
    """The events of a step. Those of accelerators are not stored for a restart."""

    index: int
    """The step begins at `index * step_seconds`."""
    counted: FigureStep = field(default_factory=FigureStep)
    devices: dict[tuple[str, int], DeviceStep] = field(default_factory=dict)
    """By host and number."""
    speed: float | None = None
    """Peak tokens per second of all running answers; None: unknown."""
    speeds: dict[str, float] = field(default_factory=dict)

    def note_load(self, waiting: int, running: int) -> None:
        """Record the numbers of waiting and running requests."""
        self.counted.waiting = max(self.counted.waiting, waiting)
        self.counted.running = max(self.counted.running, running)

    def note_speeds(self, speeds: Mapping[str, float]) -> None:
        """Record the tokens per second of running answers by model."""
        self.speed = max(self.speed or 0.0, sum(speeds.values()))
        for model, speed in speeds.items():
            self.speeds[model] = max(self.speeds.get(model, 0.0), speed)


class Tally:
    """What requests add to the present steps of some rings: summed here, as fields of messages cost calls.

    Times are as for the rings.
    """

    def __init__(self) -> None:
        self._rings: Sequence[FigureRing] = ()
        self._steps_end_at = -math.inf
        """When the first of their steps ends."""
        self.waiting = self.running = 0
        """Of now."""
        self._most_waiting = self._most_running = 0
        """Of the time since `settle`, as are the ends."""
        self._ends: dict[str, Counter[str | tuple[str, int]]] = {}

    def count_for(self, rings: Sequence["FigureRing"]) -> None:
        """Count for these rings; call it before anything is counted."""
        self._rings = rings
        for ring in rings:
            ring.tally = self

    def note_load(self, waiting: int, running: int, now: float) -> None:
        """Record the numbers of waiting and running requests from now on."""
        if now >= self._steps_end_at:
            self._begin_steps(now)
        self.waiting, self.running = waiting, running
        if waiting > self._most_waiting or running > self._most_running:
            self._most_waiting = max(self._most_waiting, waiting)
            self._most_running = max(self._most_running, running)

    def note_end(self, model: str, end: RequestEnd, now: float) -> None:
        """Count a finished request."""
        if now >= self._steps_end_at:
            self._begin_steps(now)
        sums = self._ends.get(model)
        if sums is None:
            sums = self._ends[model] = Counter()
        for counted, number in end.items():
            sums[counted] += number

    def settle(self) -> None:
        """Add everything to the present steps."""
        for ring in self._rings:
            ring.add(self._most_waiting, self._most_running, self._ends)
        self._most_waiting, self._most_running, self._ends = self.waiting, self.running, {}

    def _begin_steps(self, now: float) -> None:
        for ring in self._rings:
            ring.present(now)
        self._steps_end_at = min(ring.ends_at for ring in self._rings)


class FigureRing:
    """The last steps. Times are seconds on one monotonic clock and must not decrease."""

    def __init__(self, limits: FigureLimits, now: float) -> None:
        self._limits = limits
        self.tally = Tally()
        """Counts its requests; several rings may share one."""
        self._speeds: Mapping[str, float] = {}
        self._ended: deque[Step] = deque(maxlen=limits.max_steps)
        self._current = self._step(int(now // limits.step_seconds))
        self.tally.count_for([self])

    @property
    def ends_at(self) -> float:
        """When its current step ends."""
        return (self._current.index + 1) * self._limits.step_seconds

    def add(self, waiting: int, running: int, ends: Mapping[str, RequestEnd]) -> None:
        """Add the peak load and the finished requests by model to the current step."""
        self._current.note_load(waiting, running)
        counted = self._current.counted
        for model, end in ends.items():
            _add_end(counted.all, end)
            if model in counted.models or len(counted.models) < self._limits.max_models_per_step:
                _add_end(counted.models[model], end)

    def note_devices(self, hosts: Iterable[lease_service_pb2.HostMemory], now: float) -> None:
        """Count a sample of the accelerators of all hosts."""
        devices = self._step_of(now).devices
        for host in hosts:
            for device in (each.device for each in host.devices):
                place = (host.host, device.index)
                if place not in devices and len(devices) >= self._limits.max_devices:
                    continue
                known = devices.setdefault(place, DeviceStep())
                # Copied, as a part of a response would keep the whole response in memory.
                known.last.CopyFrom(device)
                if device.HasField("utilization"):
                    known.utilization_sum += device.utilization
                    known.utilization_count += 1

    def note_speeds(self, speeds: Mapping[str, float], now: float) -> None:
        """Record the tokens per second of running answers from now on, by model."""
        current, self._speeds = self._step_of(now), speeds
        current.note_speeds(speeds)

    def steps(self, now: float, after: float = -math.inf) -> Sequence[Step]:
        """Return the stored steps that have ended, oldest first, with a number above `after`."""
        self.present(now)
        return [step for step in self._ended if step.index > after]

    def restore(self, steps: Iterable[tuple[int, FigureStep]], now: float) -> None:
        """Restore steps from before a restart by their numbers, in any order. Call it once, before counting a request.

        Missing steps have no requests. Steps with the same number are merged, as two runs of the router may start them
        at different times.
        """
        current = self.present(now)
        known = {current.index: current}
        for index, counted in steps:
            if current.index - self._limits.max_steps <= index <= current.index:
                step = known.setdefault(index, Step(index))
                step.note_load(counted.waiting, counted.running)
                _add_counts(step.counted.all, counted.all)
                for model, counts in counted.models.items():
                    _add_counts(step.counted.models[model], counts)
        if len(known) > 1:
            # From a time as a standby.
            self._ended.clear()
            self._ended.extend(known.get(index) or Step(index) for index in range(min(known), current.index))

    def present(self, now: float) -> Step:
        """Return the current step with everything counted, and end earlier ones."""
        self.tally.settle()
        return self._step_of(now)

    def _step_of(self, now: float) -> Step:
        current, index = self._current, int(now // self._limits.step_seconds)
        if index > current.index:
            self.tally.settle()
            self._ended.append(current)
            # Add empty steps, but no more than are stored.
            first = max(current.index + 1, index - self._limits.max_steps)
            self._ended.extend(map(self._step, range(first, index)))
            current = self._current = self._step(index)
        return current

    def _step(self, index: int) -> Step:
        """Return an empty step."""
        step = Step(index, FigureStep(waiting=self.tally.waiting, running=self.tally.running))
        step.note_speeds(self._speeds)
        return step


def _add_end(total: StepCounts, end: RequestEnd) -> None:
    for counted, number in end.items():
        if isinstance(counted, tuple):
            name, place = counted
            getattr(total, name)[place] += number
        elif number:
            setattr(total, counted, getattr(total, counted) + number)


def _add_counts(total: StepCounts, more: StepCounts) -> None:
    for name in _COUNTS:
        if value := getattr(more, name):
            setattr(total, name, getattr(total, name) + value)
    for name in _TIMES:
        classes = getattr(total, name)
        for place, count in getattr(more, name).items():
            classes[place] += count


def class_of(seconds: float) -> int:
    """Return the class of a time."""
    if seconds <= SHORTEST_SECONDS:
        return 0
    return min(MAX_CLASS, math.ceil(math.log(seconds / SHORTEST_SECONDS) / _LOG_GROWTH))


def percentile(classes: Mapping[int, int], share: float) -> float:
    """Return the upper end of the class that contains the percentile `share`; UNKNOWN: there are no times."""
    left = math.ceil(share * sum(classes.values()))
    for place in sorted(classes):
        left -= classes[place]
        if left <= 0:
            # Rounded up, as more digits would not be accurate and documents have thousands of these.
            return ceil_to_digits(SHORTEST_SECONDS * CLASS_GROWTH**place)
    return UNKNOWN


def ceil_to_digits(seconds: float) -> float:
    """Return a time rounded up to three digits."""
    scale: float = 10.0 ** (2 - math.floor(math.log10(seconds)))
    return math.ceil(seconds * scale - 1e-6) / scale


def busiest(steps: Iterable[Step], most: int) -> list[str]:
    """Return the models with the most requests in these steps, busiest first."""
    totals: Counter[str] = Counter()
    for step in steps:
        for model, counts in step.counted.models.items():
            totals[model] += counts.completed + counts.failed + counts.rejected + counts.cancelled
    return sorted(totals, key=lambda model: (-totals[model], model))[:most]


def end_of(counts: ReceiptCounts) -> RequestEnd:
    """Return what a receipt counts."""
    end: dict[str | tuple[str, int], int] = {
        _OUTCOMES.get(counts.receipt.outcome, "failed"): 1,
        "retried": counts.retries,
        "prompt_tokens": counts.prompt_tokens,
        "cached_prompt_tokens": counts.cached_prompt_tokens,
        "completion_tokens": counts.completion_tokens,
    }
    if counts.first_token is not None:
        end["time_to_first_token", class_of(counts.first_token)] = 1
    if counts.per_token is not None:
        end["time_per_output_token", class_of(counts.per_token)] = 1
    return end


class FiguresRecorder:
    """Records figures on a clock. Called only from the router's event loop."""

    def __init__(
        self, clock: Clock, limits: FigureLimits | None = None, *, day: "FiguresRecorder | None" = None
    ) -> None:
        """`day`: records the same in longer steps."""
        self.day = day
        self.recorders = (self,) if day is None else (self, day)
        """This one and that of the day."""
        self._clock = clock
        self.limits = limits or FigureLimits()
        self.ring = FigureRing(self.limits, clock.monotonic())
        self.tally = self.ring.tally
        self.tally.count_for([recorder.ring for recorder in self.recorders])
        self._closed = asyncio.Event()
        self._to_utc = clock.utc_now().timestamp() - clock.monotonic()
        """UTC minus the monotonic clock at the start, so that clock changes do not move a step."""
        self._first_unwritten = self.ring.present(clock.monotonic()).index

    def note_end(self, ended: RequestEnded) -> None:
        """Count a finished request, unless its dispatcher continues without this router."""
        if not ended.is_counted:
            return
        if (counts := ended.counts) is not None:
            self.tally.note_end(ended.answered_label or ended.asked_label, end_of(counts), ended.at)
            return
        # A request that its dispatcher places at another router counts there.
        if (outcome := ended.outcome) is not None and ended.last_error is not Reason.SERVICE_UNAVAILABLE:
            self.tally.note_end(ended.asked_label, {_OUTCOMES.get(outcome, "failed"): 1}, ended.at)

    def note_devices(self, hosts: Iterable[lease_service_pb2.HostMemory]) -> None:
        """Count a sample of the accelerators of all hosts."""
        hosts = list(hosts)
        for recorder in self.recorders:
            recorder.ring.note_devices(hosts, self._clock.monotonic())

    def note_speeds(self, view: FleetView) -> None:
        """Record the tokens per second of running answers, as last reported by runners."""
        speeds: Counter[str] = Counter()
        for runner in view.runners.values():
            for state in runner.instances.values() if runner.active else ():
                if state.tokens_per_second > 0 and not state.base_model:
                    speeds[view.label(state.model)] += state.tokens_per_second  # type: ignore[assignment]  # any number
        most = dict(speeds.most_common(self.limits.max_models_per_step))
        for recorder in self.recorders:
            recorder.ring.note_speeds(most, self._clock.monotonic())

    def figures(self) -> pb.Figures:
        """Return the figures of all stored steps that have ended."""
        return self._message(self.ring.steps(self._clock.monotonic()))

    async def watch(self) -> AsyncGenerator[pb.Figures]:
        """Yield the figures of the stored steps, then of each step when it ends. Raises SHUTTING_DOWN."""
        last = self.ring.present(self._clock.monotonic()).index - 1
        yield self.figures()
        while not self._closed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout((last + 2) * self.limits.step_seconds - self._clock.monotonic()):
                    await self._closed.wait()
            steps = self.ring.steps(self._clock.monotonic(), after=last)
            if steps:
                last = steps[-1].index
                yield self._message(steps)
        raise WeftError(Reason.SHUTTING_DOWN, "the router is shutting down; watch again")

    def close(self) -> None:
        """End all watches with SHUTTING_DOWN."""
        self._closed.set()

    def unwritten(self) -> tuple[Mapping[float, FigureStep], int]:
        """Return the steps that may differ from what was written, by start time, and the number for `note_written`.

        Steps without requests are omitted.
        """
        now = self._clock.monotonic()
        present = self.ring.present(now)
        steps = [*self.ring.steps(now, after=self._first_unwritten - 1), present]
        seconds = self.limits.step_seconds
        begins = {step.index * seconds + self._to_utc: step.counted for step in steps if step.counted.ByteSize()}
        return begins, present.index

    def note_written(self, upto: int) -> None:
        """Record that all steps before this number are written."""
        self._first_unwritten = upto

    def restore(self, steps: Mapping[float, FigureStep]) -> None:
        """Restore steps from before a restart by start time. Call it once, before anything is counted."""
        seconds = self.limits.step_seconds
        known = ((round((begin - self._to_utc) / seconds), step) for begin, step in steps.items())
        self.ring.restore(known, self._clock.monotonic())

    def _message(self, steps: Sequence[Step]) -> pb.Figures:
        message = pb.Figures(
            step_count=len(steps),
            waiting=[step.counted.waiting for step in steps],
            running=[step.counted.running for step in steps],
        )
        message.step.FromNanoseconds(int(self.limits.step_seconds * NANOSECONDS))
        message.start_time.FromDatetime(self._start_of(steps))
        none = StepCounts()
        _fill_requests(message.all, [step.counted.all for step in steps])
        message.all.tokens_per_second.extend(UNKNOWN if step.speed is None else step.speed for step in steps)
        for model in busiest(steps, self.limits.max_models):
            requests = message.models.add(model=model).requests
            _fill_requests(requests, [step.counted.models.get(model, none) for step in steps])
            requests.tokens_per_second.extend(
                UNKNOWN if step.speed is None else step.speeds.get(model, 0.0) for step in steps
            )
        for host, index in sorted({place for step in steps for place in step.devices}):
            _fill_device(message.devices.add(host=host, index=index), steps)
        return message

    def _start_of(self, steps: Sequence[Step]) -> datetime:
        """Return the time of day at which the first step began; without steps, the current one."""
        now = self._clock.monotonic()
        index = steps[0].index if steps else self.ring.present(now).index
        return self._clock.utc_now() - timedelta(seconds=now - index * self.limits.step_seconds)


def _fill_requests(message: pb.RequestFigures, steps: Sequence[StepCounts]) -> None:
    for name in _COUNTS:
        getattr(message, name).extend(getattr(step, name) for step in steps)
    for name in _TIMES:
        times, total = getattr(message, name), Counter[int]()
        for step in steps:
            classes = getattr(step, name)
            times.p50.append(percentile(classes, MEDIAN))
            times.p95.append(percentile(classes, TAIL))
            total.update(classes)
        if total:
            times.total_p50, times.total_p95 = percentile(total, MEDIAN), percentile(total, TAIL)


def _fill_device(message: pb.DeviceFigures, steps: Sequence[Step]) -> None:
    for step in steps:
        found = step.devices.get((message.host, message.index), DeviceStep())
        last, samples = found.last, found.utilization_count
        message.name, message.total_bytes = last.name or message.name, last.total_bytes or message.total_bytes
        message.used_bytes.append(last.used_bytes if last.HasField("used_bytes") else UNKNOWN)
        message.utilization.append(found.utilization_sum / samples if samples else UNKNOWN)
