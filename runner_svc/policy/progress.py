"""Whether an engine and the requests on it still get anywhere.

Progress is a token, a report on prefill, processor time or GPU time. It is never a byte on a connection and never an
answer of /health: a frozen engine's connections stay open, and a hung one may go on to answer probes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from runner_svc.policy.timeouts import TimeoutProfile
from weft.kernel.reasons import Reason

FROZEN_PROBES = 3
"""Probes in a row that an idle engine must leave unanswered before it counts as frozen."""
IDLE_PROBE_INTERVALS = 5
"""Looks between two probes of an idle engine."""
MAX_NAP_INTERVALS = 5.0
"""A pause between two looks of over so many intervals means that this process or the machine slept."""
UNLIMITED_WINDOW_SECONDS = 120.0
"""Stands for the limit on prefill where there is none: an idle engine's work is still looked for."""
MAX_GAPS = 64
"""Such pauses that are remembered; an older one no longer excuses anybody."""


MIN_WORK_SHARE = 0.05
"""Answering probes and writing comments costs an engine a little; less than this share of one core, or of one GPU, is
not work on a prompt or a model's file."""
MAX_SAMPLES = 32
"""Samples that are kept of a window: enough to let it slide smoothly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUsage:
    """What an engine's processes have used so far."""

    cpu_seconds: float
    gpu_seconds: float | None = None
    """None: unknown."""


@dataclass(slots=True)
class UsageWindow:
    """Compares what was used with what was used earlier, at most `window_seconds` earlier.

    The window is why one short burst, such as a collection of garbage, is no sign of work, and why work that begins
    late is seen within a twentieth of it.
    """

    window_seconds: float
    _samples: deque[tuple[float, EngineUsage]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES + 2))

    def forget(self) -> None:
        """Begin anew with the next look."""
        self._samples.clear()

    def worked(self, now: float, signs: EngineUsage) -> bool:
        """Whether they worked since the last yes, or since the first look."""
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
    """Figures that fall, or that begin only now, measure nothing."""
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
    """What is known of one running request. Times are seconds on the clock of `now`."""

    key: int
    """Tells running requests apart."""
    started: float
    turn_started: float
    """When the engine was last asked."""
    last_progress: float
    """Last token or report on prefill; the start of the turn when there was none."""
    last_token: float | None = None
    """Of any turn."""
    has_content: bool = False
    """Whether the engine's current turn has brought its first token."""
    in_engine: bool = True
    """Whether the engine is the one to wait for: not while a tool runs, and not while the caller has not yet taken what
    the engine has sent."""

    @property
    def in_prefill(self) -> bool:
        """Whether the engine was asked and has not begun to answer."""
        return self.in_engine and not self.has_content

    @property
    def last_sign(self) -> float:
        """When the engine last did anything for it, as far as it said."""
        token = -float("inf") if self.last_token is None else self.last_token
        return self.last_progress if not self.has_content and self.last_progress > self.turn_started else token


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything that is seen at one moment."""

    now: float
    requests: Sequence[RequestSample] = ()
    last_token: float | None = None
    """Of any request, also of those that have ended."""
    engine: EngineUsage | None = None
    """None where the processes are not ours, or nobody asked."""
    owned: bool = True
    """Whether the engine is ours to restart."""
    responded: bool | None = None
    """How a probe went that ended since the last look; None: none did."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that must end, and why."""

    key: int
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do after a look."""

    failures: tuple[Failure, ...] = ()
    restart: str = ""
    """Why the engine must be restarted; empty: it need not be."""
    working: bool = False
    """The processes were seen to work: progress of every request in prefill."""
    probe: bool = False
    """The engine should be asked whether it answers."""


@dataclass(frozen=True, slots=True)
class _Failure:
    named: Failure
    wedged: bool
    """Whether the engine itself may be stuck, and not only this request."""


@dataclass(slots=True)
class ProgressPolicy:
    """Judges one engine from start to end, look by look."""

    profile: TimeoutProfile
    _gaps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_GAPS))
    _elsewhere: dict[int, float] = field(default_factory=dict)
    """When a request was last seen to wait for somebody else than the engine."""
    _last_look: float | None = None
    _work: UsageWindow = field(init=False)
    _unanswered: int = 0
    _looks_to_probe: int = IDLE_PROBE_INTERVALS

    def __post_init__(self) -> None:
        """Half the limit, so that work which begins late is seen in time."""
        self._work = UsageWindow((self.profile.prefill_liveness_seconds or UNLIMITED_WINDOW_SECONDS) / 2)

    def look(self, seen: Observation) -> Verdict:
        """The verdict on what is seen now. Looks must come about every `probe_interval_seconds`."""
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
        return Verdict(
            failures=tuple(failures), restart=restart, working=working, probe=idle and not slept and self._probe_due()
        )

    def wants_engine(self, requests: Sequence[RequestSample]) -> bool:
        """Whether the next look needs to know what the engine's processes have used: reading that is not free."""
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
        words = f"the backend sent no token in mid-answer (idle_stream_timeout_seconds, {limit:g} s)"
        return _Failure(Failure(request.key, Reason.STALL_TIMEOUT, words), wedged=True)

    def _prefill(self, request: RequestSample, seen: Observation, *, working: bool) -> _Failure | None:
        limit = self.profile.first_token_seconds
        if _over(limit, self._waited(request, request.turn_started, seen.now)):
            words = f"the backend sent no first token in time (first_token_timeout_seconds, {limit:g} s)"
            return _Failure(Failure(request.key, Reason.STALL_TIMEOUT, words), wedged=False)
        limit = self.profile.prefill_liveness_seconds
        still = self._waited(request, request.last_progress, seen.now)
        if seen.engine is None or working or not _over(limit, still):
            return None
        words = f"the backend made no progress on the prompt (prefill_liveness_timeout_seconds, {limit:g} s)"
        return _Failure(Failure(request.key, Reason.STALL_TIMEOUT, words), wedged=True)

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
        # Without a look at the processes there is no telling a frozen engine from one that is busy with itself.
        if self._unanswered < FROZEN_PROBES or seen.engine is None:
            return ""
        return f"the idle backend answered none of {self._unanswered} probes and used no processor time"

    def _probe_due(self) -> bool:
        self._looks_to_probe -= 1
        if self._looks_to_probe > 0:
            return False
        self._looks_to_probe = IDLE_PROBE_INTERVALS
        return True

    def _note_gap(self, now: float) -> bool:
        """Remember time in which nobody looked, such as a suspended machine's; nothing seen across it counts."""
        before, self._last_look = self._last_look, now
        interval = self.profile.probe_interval_seconds
        if before is None or now - before <= MAX_NAP_INTERVALS * interval:
            return False
        self._gaps.append((now, now - before - interval))
        self._work.forget()
        return True

    def _waited(self, request: RequestSample, since: float, now: float) -> float:
        """Seconds in which the engine could have done something for it and did not."""
        return self._elapsed(max(since, self._elsewhere.get(request.key, since)), now)

    def _elapsed(self, since: float, now: float) -> float:
        """Seconds since then in which somebody looked."""
        return now - since - sum(min(seconds, max(0.0, at - since)) for at, seconds in self._gaps)


def _over(limit_seconds: float | None, elapsed_seconds: float) -> bool:
    return limit_seconds is not None and elapsed_seconds >= limit_seconds


def _others_moved(stalled: RequestSample, seen: Observation) -> bool:
    """Whether the engine did something for another request since it last did for this one."""
    last = max(stalled.last_sign, stalled.turn_started)
    signs = [request.last_sign for request in seen.requests if request is not stalled]
    return any(sign > last for sign in (*signs, seen.last_token or last))


WINDOW_SECONDS = 30.0
"""Work is looked for in about the last so many seconds, or what begins after a long wait would be seen too late."""


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What can be seen of a loading process at one moment."""

    at_seconds: float
    output_bytes: int
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class LoadStallDetector:
    """The last moment at which loading was seen to move."""

    moved: LoadSample
    _mark: LoadSample | None = None
    """A look between one and two windows ago; None: it moved more recently than that."""
    _next_mark: LoadSample | None = None

    def observe(self, signs: LoadSample) -> "LoadStallDetector":
        """The watch after another look: moved on if there was output, or work worth the name."""
        if signs.output_bytes > self.moved.output_bytes or _worked(self._mark or self.moved, signs):
            return LoadStallDetector(signs)
        newest = self._next_mark or self.moved
        if signs.at_seconds - newest.at_seconds < WINDOW_SECONDS:
            return self
        return LoadStallDetector(self.moved, self._next_mark, signs)

    def stalled(self, now_seconds: float, limit_seconds: float) -> bool:
        """Whether nothing moved for `limit_seconds`."""
        return now_seconds - self.moved.at_seconds >= limit_seconds


def _worked(before: LoadSample, after: LoadSample) -> bool:
    elapsed = after.at_seconds - before.at_seconds
    return after.cpu_seconds - before.cpu_seconds >= MIN_WORK_SHARE * elapsed
