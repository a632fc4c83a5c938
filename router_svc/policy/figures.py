"""The figures of the last hour: a ring of steps that counts requests as they end, and samples of devices.

Each step is cheap while nothing happens: what it counts is made with its first request.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from weft.kernel.value import value_class

SHORTEST_SECONDS = 1e-4
"""Times up to this are one class ..."""
CLASS_GROWTH = 1.1
"""... and each further class ends at this many times the end of the one before: a percentile is up to a tenth high."""
MAX_CLASS = 200
"""The last class, which has no end: times of more than 5 hours."""
_LOG_GROWTH = math.log(CLASS_GROWTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureLimits:
    """How much is remembered."""

    step_seconds: float = 10.0
    """Length of a step."""
    max_steps: int = 360
    """Steps that are remembered; at 10 s they are an hour."""
    max_models: int = 8
    """Models that are shown: those with the most requests. The others are in the sums."""
    max_models_per_step: int = 64
    """Models that are counted in one step; further ones are in the sums alone."""
    max_devices: int = 64
    """Accelerators that are sampled, the first ones by host and number."""


class Outcome(IntEnum):
    """How a request ended."""

    COMPLETED = 0
    FAILED = 1
    REJECTED = 2
    CANCELLED = 3


@value_class(kw_only=True)
class RequestEnd:
    """The end of a request, as its receipt has it."""

    model: str
    outcome: Outcome
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_seconds: float | None = None
    """From arrival to the first content; None: not counted."""
    output_token_seconds: float | None = None
    """Mean time of a token after the first one; None: not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One accelerator as it was seen."""

    host: str
    index: int
    name: str
    total_bytes: int
    used_bytes: int | None
    """None: unknown."""
    utilization: float | None
    """Share of time that it computed lately, 0 to 1; None: unknown."""


class Times:
    """Times of requests, by class."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        """How many there are of each class."""

    def add(self, seconds: float) -> None:
        """Count one time."""
        if seconds > SHORTEST_SECONDS:
            place = min(MAX_CLASS, math.ceil(math.log(seconds / SHORTEST_SECONDS) / _LOG_GROWTH))
        else:
            place = 0
        self.counts[place] = self.counts.get(place, 0) + 1

    def merge(self, other: "Times") -> None:
        """Count the times of another step as well."""
        for place, count in other.counts.items():
            self.counts[place] = self.counts.get(place, 0) + count

    def percentile(self, share: float) -> float | None:
        """Return the end of the class up to which `share` of the times lie; None: there are none."""
        total = sum(self.counts.values())
        if not total:
            return None
        left = math.ceil(share * total)
        for place in sorted(self.counts):
            left -= self.counts[place]
            if left <= 0:
                break
        # Rounded up: what more digits say is not known, and documents have thousands of these.
        return ceil_to_digits(SHORTEST_SECONDS * CLASS_GROWTH**place)


class RequestCounts:
    """Requests that ended in one step."""

    __slots__ = (
        "cached_prompt_tokens",
        "completion_tokens",
        "first_token",
        "outcomes",
        "output_token",
        "prompt_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.outcomes = [0] * len(Outcome)
        self.prompt_tokens = self.cached_prompt_tokens = self.completion_tokens = 0
        self.first_token = Times()
        self.output_token = Times()

    def merge(self, other: "RequestCounts") -> None:
        """Count the requests of another step as well."""
        self.outcomes = [one + more for one, more in zip(self.outcomes, other.outcomes, strict=True)]
        self.prompt_tokens += other.prompt_tokens
        self.cached_prompt_tokens += other.cached_prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.first_token.merge(other.first_token)
        self.output_token.merge(other.output_token)

    def add(self, end: RequestEnd) -> None:
        """Count one request."""
        self.outcomes[end.outcome] += 1
        self.prompt_tokens += end.prompt_tokens
        self.cached_prompt_tokens += end.cached_prompt_tokens
        self.completion_tokens += end.completion_tokens
        if end.first_token_seconds is not None:
            self.first_token.add(end.first_token_seconds)
        if end.output_token_seconds is not None:
            self.output_token.add(end.output_token_seconds)


@dataclass(slots=True)
class DeviceStep:
    """One accelerator in one step."""

    last: DeviceSample
    utilization_sum: float = 0.0
    utilization_count: int = 0

    @property
    def utilization(self) -> float | None:
        """Return the mean of the samples; None: unknown."""
        return self.utilization_sum / self.utilization_count if self.utilization_count else None

    def add(self, sample: DeviceSample) -> None:
        """Count one sample."""
        self.last = sample
        if sample.utilization is not None:
            self.utilization_sum += sample.utilization
            self.utilization_count += 1


@dataclass(slots=True)
class Step:
    """What happened in one step."""

    index: int
    """Its number: it begins at `index * step_seconds`."""
    waiting: int
    """The highest number of waiting requests."""
    running: int
    """The highest number of requests that held a slot."""
    requests: RequestCounts | None = None
    """None: no request ended."""
    models: dict[str, RequestCounts] = field(default_factory=dict)
    devices: dict[tuple[str, int], DeviceStep] = field(default_factory=dict)
    speed: float | None = None
    """The highest number of tokens per second of running answers; None: unknown."""
    speeds: dict[str, float] = field(default_factory=dict)
    """The same of each model that had any."""

    def note_speeds(self, speeds: Mapping[str, float]) -> None:
        """Note the tokens per second of the running answers of each model."""
        self.speed = max(self.speed or 0.0, sum(speeds.values()))
        for model, speed in speeds.items():
            self.speeds[model] = max(self.speeds.get(model, 0.0), speed)


class FigureRing:
    """The last steps. Times are seconds on one monotonic clock, and do not go back."""

    def __init__(self, limits: FigureLimits, now: float) -> None:
        self._limits = limits
        self._seconds = limits.step_seconds
        self._waiting = self._running = 0
        self._speeds: Mapping[str, float] = {}
        self._ended: deque[Step] = deque(maxlen=limits.max_steps)
        self._current = self._step(int(now // self._seconds))

    def note_load(self, waiting: int, running: int, now: float) -> None:
        """Note how many requests wait and run from now on."""
        current = self._at(now)
        self._waiting, self._running = waiting, running
        current.waiting = max(current.waiting, waiting)
        current.running = max(current.running, running)

    def note_end(self, end: RequestEnd, now: float) -> None:
        """Count a request that has ended."""
        current = self._at(now)
        if current.requests is None:
            current.requests = RequestCounts()
        current.requests.add(end)
        counts = current.models.get(end.model)
        if counts is None:
            if len(current.models) >= self._limits.max_models_per_step:
                return
            counts = current.models[end.model] = RequestCounts()
        counts.add(end)

    def note_devices(self, samples: Iterable[DeviceSample], now: float) -> None:
        """Count one sample of each accelerator."""
        devices = self._at(now).devices
        for sample in samples:
            place = (sample.host, sample.index)
            known = devices.get(place)
            if known is None:
                if len(devices) >= self._limits.max_devices:
                    continue
                known = devices[place] = DeviceStep(sample)
            known.add(sample)

    def note_speeds(self, speeds: Mapping[str, float], now: float) -> None:
        """Note the tokens per second of running answers from now on, by model."""
        current, self._speeds = self._at(now), speeds
        current.note_speeds(speeds)

    def steps(self, now: float, after: int | None = None) -> Sequence[Step]:
        """Return the remembered steps that have ended, the oldest first; only those after number `after`."""
        self._at(now)
        if after is None:
            return tuple(self._ended)
        found = [step for step in reversed(self._ended) if step.index > after]
        return tuple(reversed(found))

    def restore(self, steps: Iterable[Step], now: float) -> None:
        """Take steps of before a restart, in any order. Called once, before a request is counted.

        Between them, and up to the present step, nothing was counted. Two with one number are one step: two runs of the
        router began theirs at different moments.
        """
        current = self._at(now)
        known: dict[int, Step] = {}
        for step in steps:
            if current.index - self._limits.max_steps <= step.index <= current.index:
                _merge(known.setdefault(step.index, Step(step.index, 0, 0)), step)
        if (present := known.pop(current.index, None)) is not None:
            _merge(current, present)
        if known:
            # Of a router that stood by.
            self._ended.clear()
            self._ended.extend(known.get(index) or Step(index, 0, 0) for index in range(min(known), current.index))

    def present(self, now: float) -> Step:
        """Return the step that continues."""
        return self._at(now)

    def _at(self, now: float) -> Step:
        """Return the step of now, and end the ones before."""
        current, index = self._current, int(now // self._seconds)
        if index > current.index:
            self._ended.append(current)
            # Steps without any event: no more of them than are remembered.
            first = max(current.index + 1, index - self._limits.max_steps)
            self._ended.extend(map(self._step, range(first, index)))
            current = self._current = self._step(index)
        return current

    def _step(self, index: int) -> Step:
        """Return a step in which nothing has happened yet."""
        step = Step(index, self._waiting, self._running)
        step.note_speeds(self._speeds)
        return step


def _merge(step: Step, other: Step) -> None:
    """Count what another step has, its accelerators left out."""
    step.waiting, step.running = max(step.waiting, other.waiting), max(step.running, other.running)
    if other.requests is not None:
        step.requests = step.requests or RequestCounts()
        step.requests.merge(other.requests)
    for model, counts in other.models.items():
        step.models.setdefault(model, RequestCounts()).merge(counts)


def ceil_to_digits(seconds: float) -> float:
    """Return a time rounded up to three digits."""
    scale: float = 10.0 ** (2 - math.floor(math.log10(seconds)))
    return math.ceil(seconds * scale - 1e-6) / scale


def busiest(steps: Iterable[Step], most: int) -> list[str]:
    """Return the models with the most requests in these steps, the busiest first."""
    totals: dict[str, int] = {}
    for step in steps:
        for model, counts in step.models.items():
            totals[model] = totals.get(model, 0) + sum(counts.outcomes)
    return sorted(totals, key=lambda model: (-totals[model], model))[:most]


def merged(times: Iterable[Times]) -> Times:
    """Return the times of several steps as those of one."""
    found = Times()
    for each in times:
        found.merge(each)
    return found


def devices_of(steps: Sequence[Step]) -> Iterator[DeviceSample]:
    """Yield the last sample of each accelerator in these steps, by host and number."""
    newest: dict[tuple[str, int], DeviceSample] = {}
    for step in steps:
        for place, device in step.devices.items():
            newest[place] = device.last
    for _, sample in sorted(newest.items()):
        yield sample
