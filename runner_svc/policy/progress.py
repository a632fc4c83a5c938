"""Detects stalls and freezes of engines, requests and loads.

Progress is a token, a prefill report, processor time or GPU time. Bytes on a connection and answers of /health do not
count: a frozen engine's connections stay open, and a hung engine may still answer probes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from runner_svc.policy.timeouts import TimeoutProfile
from weft.kernel.errors.reasons import Reason

FROZEN_PROBES = 3
"""Number of consecutive unanswered probes after which an idle engine counts as frozen."""
IDLE_PROBE_INTERVALS = 5
"""Observations between two probes of an idle engine."""
GIVEN_UP_REQUESTS = 2
"""Number of consecutive requests without any sign of the engine after which a computing engine counts as looping."""
MAX_NAP_INTERVALS = 5.0
"""Gap between two observations, in intervals, that indicates a suspended process or machine."""
UNLIMITED_WINDOW_SECONDS = 120.0
"""Window of an idle engine's activity if prefill has no limit."""
MAX_GAPS = 64


MIN_WORK_SHARE = 0.05
"""Minimum share of a core or a GPU that counts as activity; answering probes takes less."""
MAX_SAMPLES = 32
"""Number of samples per window, enough for it to slide smoothly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUsage:
    """Total processor and GPU time used by an engine's processes."""

    cpu_seconds: float
    """User and system time of the process tree so far. It may decrease when a child ends."""
    gpu_seconds: float | None = None
    """None: unknown."""


@dataclass(slots=True)
class UsageWindow:
    """Compares the used time with that of at most `window_seconds` earlier.

    The window ensures that a short burst, such as a garbage collection, does not count as activity, and that activity
    that starts late is detected within a twentieth of the window.
    """

    window_seconds: float
    _samples: deque[tuple[float, EngineUsage]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES + 2))

    def forget(self) -> None:
        """Resets the window, which starts at the next observation."""
        self._samples.clear()

    def worked(self, now: float, signs: EngineUsage) -> bool:
        """Whether the processes were active since the last True, or since the first observation."""
        if self._samples and _is_no_continuation(self._samples[0][1], signs):
            self._samples.clear()
        while len(self._samples) > 1 and self._samples[1][0] <= now - self.window_seconds:
            self._samples.popleft()
        worked = bool(self._samples) and _share(self._samples[0], now, signs) >= MIN_WORK_SHARE
        if worked:
            self._samples.clear()
        if not self._samples or now - self._samples[-1][0] >= self.window_seconds / MAX_SAMPLES:
            self._samples.append((now, signs))
        return worked


def _is_no_continuation(before: EngineUsage, after: EngineUsage) -> bool:
    """Whether two figures are not comparable: they decreased, or GPU time has just become available."""
    gpu_begins = before.gpu_seconds is None and after.gpu_seconds is not None
    return gpu_begins or after.cpu_seconds < before.cpu_seconds


def _share(before: tuple[float, EngineUsage], now: float, after: EngineUsage) -> float:
    since, first = before
    gpu_seconds = 0.0
    if first.gpu_seconds is not None and after.gpu_seconds is not None:
        gpu_seconds = after.gpu_seconds - first.gpu_seconds
    return max(after.cpu_seconds - first.cpu_seconds, gpu_seconds) / (now - since) if now > since else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSample:
    """The progress of one running request. Times are seconds on the clock of `now`."""

    key: int
    """Identifies the request among the running ones."""
    started: float
    turn_started: float
    """Start of the engine's current turn."""
    last_progress: float
    """Time of the last token or prefill report; the start of the turn if there was none."""
    last_token: float | None = None
    """Time of the last token of any turn."""
    last_report: float | None = None
    """Time of the last token or prefill report of the engine, without observed activity."""
    has_content: bool = False
    """Whether the engine's current turn has produced its first token."""
    in_engine: bool = True
    """Whether the request waits for the engine, as opposed to a tool or a caller that has not read the last frame."""

    @property
    def in_prefill(self) -> bool:
        """Whether the engine works on the prompt."""
        return self.in_engine and not self.has_content

    @property
    def last_sign(self) -> float:
        """Time of the last progress that the engine reported."""
        token = -float("inf") if self.last_token is None else self.last_token
        return self.last_progress if not self.has_content and self.last_progress > self.turn_started else token


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An observation of an engine and its requests at one time."""

    now: float
    requests: Sequence[RequestSample] = ()
    last_token: float | None = None
    """Time of the last token of any request, including ended ones."""
    last_report: float | None = None
    """Time of the last token, prefill report, answer or error of any request, including ended ones."""
    engine: EngineUsage | None = None
    """None for an attached server, or if it was not read."""
    owned: bool = True
    """Whether the runner can restart the engine."""
    responded: bool | None = None
    """Result of a probe that ended since the last observation; None: none did."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that must fail, with the cause."""

    key: int
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The actions to take after an observation."""

    failures: tuple[Failure, ...] = ()
    restart: str = ""
    """Why the engine must be restarted; empty: no restart."""
    working: bool = False
    """Whether the processes were active, which counts as progress of every request in prefill."""
    probe: bool = False


@dataclass(frozen=True, slots=True)
class _Failure:
    named: Failure
    wedged: bool
    """Whether the engine itself may be stuck, not only this request."""


@dataclass(slots=True)
class ProgressPolicy:
    """Judges one engine from its start to its end by a series of observations."""

    profile: TimeoutProfile
    _gaps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_GAPS))
    _elsewhere: dict[int, float] = field(default_factory=dict)
    """When a request was last observed waiting for something other than the engine."""
    _last_look: float | None = None
    _last_report_at: float = -float("inf")
    """Time of the engine's last token or report."""
    _silent: dict[int, float] = field(default_factory=dict)
    """Start of the turn of each request in prefill without any engine report."""
    _given_up: int = 0
    """Number of consecutive requests that ended without any engine report within the prefill limit."""
    _work: UsageWindow = field(init=False)
    _unanswered: int = 0
    _looks_to_probe: int = IDLE_PROBE_INTERVALS

    def __post_init__(self) -> None:
        """Uses a window of half the limit, so that activity that starts late is detected in time."""
        self._work = UsageWindow((self.profile.prefill_liveness_seconds or UNLIMITED_WINDOW_SECONDS) / 2)

    def look(self, seen: Observation) -> Verdict:
        """Returns the verdict on an observation. Call it about every `probe_interval_seconds`."""
        slept = self._note_gap(seen.now)
        elsewhere = {request.key: seen.now for request in seen.requests if not request.in_engine}
        known = {request.key for request in seen.requests}
        self._elsewhere = {key: at for key, at in self._elsewhere.items() if key in known} | elsewhere
        working = self._works(seen)
        idle = seen.owned and len(elsewhere) == len(seen.requests)
        if slept or not idle:
            self._unanswered, self._looks_to_probe = 0, IDLE_PROBE_INTERVALS
        restart = self._frozen(seen, working=working) if idle and not slept else ""
        failures: list[Failure] = []
        for request in seen.requests:
            failure = self._judge(request, seen, working=working)
            if failure is not None:
                failures.append(failure.named)
                if failure.wedged and not restart and not _others_moved(request, seen):
                    restart = failure.named.message
        self._note_silence(seen)
        if not restart and self._given_up >= GIVEN_UP_REQUESTS:
            restart = f"{self._given_up} requests in a row ended without a token or a report on their prompt"
        return Verdict(
            failures=tuple(failures), restart=restart, working=working, probe=idle and not slept and self._probe_due()
        )

    def wants_engine(self, requests: Sequence[RequestSample]) -> bool:
        """Whether the next observation needs the processes' used time, which is expensive to read."""
        return self._unanswered > 0 or any(request.in_prefill for request in requests)

    def _judge(self, request: RequestSample, seen: Observation, *, working: bool) -> _Failure | None:
        limit = self.profile.absolute_seconds
        if _over(limit, self._elapsed(request.started, seen.now)):
            words = f"the request took longer than absolute_timeout_seconds, {limit:g} s"
            return _Failure(Failure(request.key, Reason.DEADLINE_EXCEEDED, words), wedged=False)
        if not request.in_engine:
            return None
        return self._mid_answer(request, seen) if request.has_content else self._prefill(request, seen, working=working)

    def _mid_answer(self, request: RequestSample, seen: Observation) -> _Failure | None:
        limit = self.profile.idle_stream_seconds
        if not _over(limit, self._waited(request, request.last_token or request.turn_started, seen.now)):
            return None
        words = f"the engine stopped sending tokens (idle_stream_timeout_seconds, {limit:g} s)"
        return _Failure(Failure(request.key, Reason.STALL_TIMEOUT, words), wedged=True)

    def _prefill(self, request: RequestSample, seen: Observation, *, working: bool) -> _Failure | None:
        limit = self.profile.first_token_seconds
        if _over(limit, self._waited(request, request.turn_started, seen.now)):
            words = f"the engine sent no first token in time (first_token_timeout_seconds, {limit:g} s)"
            return _Failure(Failure(request.key, Reason.STALL_TIMEOUT, words), wedged=False)
        limit = self.profile.prefill_liveness_seconds
        still = self._waited(request, request.last_progress, seen.now)
        if seen.engine is None or working or not _over(limit, still):
            return None
        words = f"the engine made no progress on the prompt (prefill_liveness_timeout_seconds, {limit:g} s)"
        return _Failure(Failure(request.key, Reason.STALL_TIMEOUT, words), wedged=True)

    def _note_silence(self, seen: Observation) -> None:
        """Counts requests that ended without any engine report, mostly because their callers gave up.

        An engine in an endless loop computes too, so nothing else distinguishes it from a long prefill.
        """
        limit = self.profile.prefill_liveness_seconds
        if seen.last_report is not None and seen.last_report > self._last_report_at:
            self._last_report_at, self._given_up = seen.last_report, 0
        present = {request.key for request in seen.requests}
        for key, since in self._silent.items():
            if key not in present and _over(limit, self._elapsed(max(since, self._last_report_at), seen.now)):
                self._given_up += 1
        self._silent = {
            request.key: request.turn_started
            for request in seen.requests
            if request.in_prefill and (request.last_report or 0.0) < request.turn_started
        }

    def _works(self, seen: Observation) -> bool:
        if seen.engine is None:
            self._work.forget()
            return False
        return self._work.worked(seen.now, seen.engine)

    def _frozen(self, seen: Observation, *, working: bool) -> str:
        if working or seen.responded:
            self._unanswered = 0
        elif seen.responded is False:
            self._unanswered += 1
        # Without the used time, a frozen engine cannot be distinguished from a busy one.
        if self._unanswered < FROZEN_PROBES or seen.engine is None:
            return ""
        return f"the idle engine answered none of {self._unanswered} probes and used no processor time"

    def _probe_due(self) -> bool:
        self._looks_to_probe -= 1
        if self._looks_to_probe > 0:
            return False
        self._looks_to_probe = IDLE_PROBE_INTERVALS
        return True

    def _note_gap(self, now: float) -> bool:
        """Records time without observations, such as a suspended machine's; figures across it are not compared."""
        before, self._last_look = self._last_look, now
        interval = self.profile.probe_interval_seconds
        if before is None or now - before <= MAX_NAP_INTERVALS * interval:
            return False
        self._gaps.append((now, now - before - interval))
        self._work.forget()
        return True

    def _waited(self, request: RequestSample, since: float, now: float) -> float:
        """Returns the seconds in which the engine made no progress on a request."""
        return self._elapsed(max(since, self._elsewhere.get(request.key, since)), now)

    def _elapsed(self, since: float, now: float) -> float:
        """Returns the observed seconds since a time."""
        return now - since - sum(min(seconds, max(0.0, at - since)) for at, seconds in self._gaps)


def _over(limit_seconds: float | None, elapsed_seconds: float) -> bool:
    return limit_seconds is not None and elapsed_seconds >= limit_seconds


def _others_moved(stalled: RequestSample, seen: Observation) -> bool:
    """Whether another request made progress since the stalled one last did."""
    last = max(stalled.last_sign, stalled.turn_started)
    signs = [request.last_sign for request in seen.requests if request is not stalled]
    return any(sign > last for sign in (*signs, seen.last_token or last))


WINDOW_SECONDS = 30.0
"""Window of a load's activity. Without it, activity after a long wait would be detected too late."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Output and used time of a loading process at one time."""

    at_seconds: float
    output_bytes: int
    cpu_seconds: float


@dataclass(slots=True)
class LoadStallDetector:
    """Finds out whether a load still makes progress: output, or processor time."""

    moved: LoadSample
    """The last sample with progress."""
    _work: UsageWindow = field(default_factory=lambda: UsageWindow(WINDOW_SECONDS))

    def observe(self, signs: LoadSample) -> None:
        """Adds a sample."""
        worked = self._work.worked(signs.at_seconds, EngineUsage(cpu_seconds=signs.cpu_seconds))
        if worked or signs.output_bytes > self.moved.output_bytes:
            self.moved = signs

    def stalled(self, now_seconds: float, limit_seconds: float) -> bool:
        """Whether there was no progress for `limit_seconds`."""
        return now_seconds - self.moved.at_seconds >= limit_seconds
