"""Records of an instance's requests: state, progress, output, and how each ended."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum

from runner_svc.waiting import fresh_copy
from weft.api.common.v1 import signal_pb2
from weft.dispatch.rate_windows import SlidingWindow
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.cancellation import Interruptible
from weft.kernel.time.clock import Clock

MAX_ENDED_RECORDS = 100
"""Number of ended requests kept per model, without their output."""
MAX_OUTPUT_CHARS = 256 * 1024
"""Maximum kept output of a running request; the oldest part is dropped first."""
RATE_SECONDS = 10.0
"""Period over which a model's tokens per second are measured."""
MIN_RATE_SECONDS = 0.5
"""Minimum time since the first token: less does not show a rate."""


class RequestState(IntEnum):
    """Numbers as in `runner.v1.RequestRecord.State`, whose comments define them."""

    PREFILL = 1
    GENERATING = 2
    RUNNING_TOOL = 3
    COMPLETED = 4
    FAILED = 5
    CANCELLED = 6

    @property
    def ended(self) -> bool:
        """Whether the state is terminal."""
        return self >= RequestState.COMPLETED


@dataclass(slots=True, eq=False)
class RequestRecord:
    """A request on an instance. Times are seconds on the runner's monotonic clock unless stated otherwise."""

    request_id: str
    model: str
    clock: Clock
    started: float
    started_at: datetime
    """UTC; the other times are reported relative to it."""
    last_progress: float
    state: RequestState = RequestState.PREFILL
    reason: Reason = Reason.UNSPECIFIED
    turn_started: float = 0.0
    """Start of the engine's current turn."""
    turn_has_content: bool = False
    """Whether the engine's current turn has produced its first token."""
    with_caller: bool = False
    """Whether the caller holds a frame and has not requested the next one, so that the engine's silence does not count.
    Set around every frame that is passed on."""
    turn_first_token: float | None = None
    """Time of the first token of the current turn; None: none yet."""
    first_content: float | None = None
    last_token: float | None = None
    last_report: float | None = None
    """Time of the engine's last token, prefill report, answer or error."""
    ended: float | None = None
    verdict: WeftError | None = None
    """The error with which `fail` ended it."""
    output_chars: int = 0
    output_tokens: int = 0
    turn_tokens: int = 0
    """Output tokens of the current turn."""
    left_premises: bool = False
    """Whether a called tool sent data to a remote provider."""
    answered: bool = False
    """Whether the end of the answer was sent: after that the caller may hang up."""
    tool_iterations_left: int | None = None
    signals: list[signal_pb2.Signal] = field(default_factory=list)
    recent_tokens: SlidingWindow = field(default_factory=lambda: SlidingWindow(RATE_SECONDS))
    """Tokens of all the model's requests in the last RATE_SECONDS."""
    _pieces: deque[str] = field(default_factory=deque)
    _kept_chars: int = 0
    _block: Interruptible = field(default_factory=Interruptible)

    @property
    def output(self) -> str:
        """The output so far, at most the last MAX_OUTPUT_CHARS; empty once the request has ended."""
        return "".join(self._pieces)

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens per second since the first one of the current turn; None: it has ended, or is too young."""
        seconds = 0.0 if self.turn_first_token is None else self.clock.monotonic() - self.turn_first_token
        return None if self.state.ended or seconds < MIN_RATE_SECONDS else round((self.turn_tokens - 1) / seconds, 1)

    def begin_turn(self) -> None:
        """Records the start of an engine turn."""
        self.state, self.turn_has_content, self.with_caller = RequestState.PREFILL, False, False
        self.turn_first_token, self.turn_tokens = None, 0
        self.turn_started = self.last_progress = self.clock.monotonic()

    def note_prefill(self) -> None:
        """Records prefill progress reported by the engine."""
        self.last_report = self.last_progress = self.clock.monotonic()

    def note_work(self) -> None:
        """Records that the engine was observed to compute."""
        self.last_progress = self.clock.monotonic()

    def note_token(self) -> None:
        """Records a token of the engine, even if it is still held back."""
        self.last_token = self.last_report = self.last_progress = self.clock.monotonic()
        self.recent_tokens.add(self.last_token, 1)
        self.output_tokens += 1
        self.turn_tokens += 1
        if not self.turn_has_content:
            self.turn_has_content, self.state = True, RequestState.GENERATING
            self.turn_first_token = self.last_token
            self.first_content = self.first_content or self.last_token

    def note_output(self, text: str) -> None:
        """Records text that was sent to the caller."""
        self.output_chars += len(text)
        self._pieces.append(text[-MAX_OUTPUT_CHARS:])
        self._kept_chars += len(self._pieces[-1])
        while self._kept_chars > MAX_OUTPUT_CHARS:
            self._kept_chars -= len(self._pieces.popleft())

    def begin_tool(self) -> None:
        """Records the start of a tool: the engine is idle."""
        self.state = RequestState.RUNNING_TOOL
        self.last_progress = self.clock.monotonic()

    def fail(self, error: WeftError) -> None:
        """Ends the request with `error`. Only the first such error counts, and an ended request stays unchanged.

        It takes precedence over errors that it causes, such as a broken connection.
        """
        if self.verdict is None and not self.state.ended:
            self.verdict = error
            self._block.interrupt(error)

    def begin(self) -> None:
        """Begins the run of the request, which `fail` ends."""
        self._block.begin()

    def end(self, error: BaseException | None) -> BaseException | None:
        """Records how the request ended by the error that ends its run; returns the error to raise, None: none."""
        error, verdict = self._block.end(error), self.verdict
        if error is None:
            self._end(RequestState.COMPLETED, None)
        elif isinstance(error, WeftError):
            error = verdict or error
            self._end(RequestState.FAILED, error.reason)
        elif verdict is not None:
            self._end(RequestState.FAILED, verdict.reason)
        elif isinstance(error, Exception):
            self._end(RequestState.FAILED, Reason.INTERNAL)
        else:
            # A caller that disconnects closes the generator or cancels the task; other exceptions are internal errors.
            self._end(RequestState.COMPLETED if self.answered else RequestState.CANCELLED, None)
        return error

    def _end(self, state: RequestState, reason: Reason | None) -> None:
        self.state, self.ended = state, self.clock.monotonic()
        self.reason = reason or Reason.UNSPECIFIED
        is_given_up = self.verdict is not None or state is RequestState.CANCELLED or reason is Reason.DEADLINE_EXCEEDED
        if not is_given_up:
            self.last_report = self.ended
        self._pieces.clear()
        self._kept_chars = 0


class RequestRecords:
    """The records of one instance: its running requests and the last ended ones."""

    def __init__(self, model: str, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._running: list[RequestRecord] = []
        self._recent_tokens = SlidingWindow(RATE_SECONDS)
        self._ended: deque[RequestRecord] = deque(maxlen=MAX_ENDED_RECORDS)
        self.idle = asyncio.Event()
        """Set while no request runs."""
        self.idle.set()

    @property
    def running(self) -> tuple[RequestRecord, ...]:
        """The running requests, in order of arrival."""
        return tuple(self._running)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all requests, over the last RATE_SECONDS or since the first one; None: unknown."""
        now = self._clock.monotonic()
        total = self._recent_tokens.settle(now)
        seconds = RATE_SECONDS - self._recent_tokens.seconds_until_less(now)
        return round(total / seconds, 1) if self._running and seconds >= MIN_RATE_SECONDS else None

    @property
    def all(self) -> tuple[RequestRecord, ...]:
        """All records: ended ones first, oldest first."""
        return (*self._ended, *self._running)

    def find(self, request_id: str) -> RequestRecord | None:
        """Returns the newest record of a request; None: there is none."""
        return next((record for record in reversed(self.all) if record.request_id == request_id), None)

    def begin(self, request_id: str, model: str = "") -> RequestRecord:
        """Begins a request; returns its record. `model`: the requested adapter; empty: the model itself."""
        now = self._clock.monotonic()
        record = RequestRecord(
            request_id=request_id,
            model=model or self._model,
            clock=self._clock,
            started=now,
            started_at=self._clock.utc_now(),
            last_progress=now,
            recent_tokens=self._recent_tokens,
        )
        record.begin()
        self._running.append(record)
        self.idle.clear()
        return record

    def end(self, record: RequestRecord, error: BaseException | None) -> BaseException | None:
        """Ends a request; see RequestRecord.end."""
        error = record.end(error)
        self._running.remove(record)
        self._ended.append(record)
        if not self._running:
            self.idle.set()
        return error

    def fail_all(self, error: WeftError) -> None:
        """Ends every running request with a copy of `error`, except those that are already failing."""
        for record in self._running:
            record.fail(fresh_copy(error))
