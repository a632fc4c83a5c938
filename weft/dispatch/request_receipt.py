"""The trace of one request, collected while it runs and converted to its receipt."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from itertools import islice

from google.protobuf.duration_pb2 import Duration

from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.api.registry.v1 import model_pb2
from weft.api.registry.v1.alias_pb2 import AliasManifest
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.dispatch.frames import Frame
from weft.dispatch.placement import MAX_ATTEMPT_LOG_LINES, MAX_ATTEMPT_MESSAGE_CHARS, Decision
from weft.dispatch.prices import price_of
from weft.dispatch.token_counts import TokenCounter
from weft.kernel.errors.error_tree import ENGINE_CAUSE, UNSENT, WeftError
from weft.kernel.errors.failover import quotes_model
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Handling, Operation, Priority
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.structured_logs import new_span_id, trace_id_of
from weft.kernel.time.timestamps import NANOSECONDS, set_seconds
from weft.kernel.values.fast_dataclass import fast_dataclass

log = get_logger("weft.request")


class WhenLeft(Enum):
    """What happens to a durable request when its caller leaves early."""

    CANCEL = "cancel"
    KEEP = "keep"
    """It continues, and its answer is kept like any task's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """Options of a request that runs as a durable task while its caller watches."""

    when_left: WhenLeft = WhenLeft.CANCEL
    idempotency_key: str = ""
    """See `NewTask`."""
    on_task: Callable[[str], None] = lambda _task_id: None
    """Called with the task's id once it is durable."""
    is_ended: Callable[[], bool] = lambda: False
    """Whether the request was cancelled: then its task is cancelled too, regardless of `when_left`."""


@fast_dataclass(kw_only=True)
class RequestContext:
    """The caller, target and options of a request, as parsed at the edge."""

    request_id: str
    tenant: str
    model: str
    """A model or a pool by name, `route/` and a route's name, or, until a dispatcher has resolved it, `agent/` and an
    agent's name."""
    operation: Operation
    traceparent: str
    asked_model: str = ""
    """The alias that the caller requested instead of `model`; empty: none."""
    preset: AliasManifest | None = None
    """That alias, if it changes its requests; of a task, it is read when the task runs."""
    priority: Priority = Priority.NORMAL
    names_priority: bool = True
    """Whether the caller chose the priority class; if not, its client's profile may."""
    max_priority: Priority = Priority.HIGH
    """Highest class that the caller's key allows."""
    allow_remote: bool = False
    timeout_seconds: float | None = None
    """Time to the caller's deadline; None: no deadline."""
    max_wait_seconds: float | None = None
    """Time within which the caller wants the first token, else the request is refused when it arrives; None: any."""
    agent: str = ""
    """The requested agent, once resolved; empty: none."""
    handling: Handling = field(default_factory=Handling)
    """Options for the runner."""
    client_id: str = ""
    """The client id stated by the caller, for profiles and statistics; empty: none."""
    caller: str = "local"
    """The caller for logs: `key:<id>`, `service:<name>` or `local`."""
    user: str = ""
    """The end user stated by the caller; empty: none."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The caller's own key-value pairs."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a gateway recognized, of coding agents; the caller's metadata take precedence."""
    session: str = ""
    """Requests of a session go to the same runner if possible; empty: none."""
    journal: Journal | None = None
    """None: it is no task, and ends with its caller's connection."""
    task_id: str = ""
    """The task of which it is an attempt; empty: none."""
    compaction: receipt_pb2.Compaction | None = None
    """How its conversation was or is being compacted; None: it is not."""
    tool_runs: tuple[receipt_pb2.ToolRun, ...] = ()
    """Tools that a gateway has run for it before; the receipt lists them first."""


_NOTHING_SENT = frozenset(
    {
        Reason.CLOCK_OFF,
        Reason.NO_SLOT_AVAILABLE,
        Reason.PERMISSION_DENIED,
        Reason.RUNNER_UNREACHABLE,
        Reason.SHUTTING_DOWN,
        Reason.TICKET_EXPIRED,
        Reason.TICKET_INVALID,
        Reason.TOOL_UNAVAILABLE,
    }
)
"""With these errors before any content, the runner has sent nothing to its engine. Not CONNECT_FAILED: a server may
close the connection after reading the request."""


@dataclass(slots=True)
class AttemptRecord:
    """An attempt of a request at a runner."""

    grant: Granted
    remote: bool
    """Whether the runner may send the request to a remote provider."""
    began: float
    price: model_pb2.ModelPrice | None = None
    """What its remote provider charges; None: unknown, or the model is not remote."""
    ended: float | None = None
    """When it failed; None: it is the last one, and ended with the request."""
    reason: Reason = Reason.UNSPECIFIED
    message: str = ""
    """Its error text, at most `MAX_ATTEMPT_MESSAGE_CHARS`; empty if records may not keep it."""
    engine_exit: str = ""
    engine_log: Sequence[str] = ()
    """See `WeftError`."""
    is_unsent: bool = False
    """Whether its runner has certainly sent nothing of the request."""
    answered: bool = False
    span_id: int = field(default_factory=new_span_id)
    generation_id: int = field(default_factory=new_span_id)
    """Span id of the runner's work; the parent of the engine's spans."""

    def note_error(self, error: WeftError) -> None:
        """Records its error without the parts that callers must not see."""
        self.reason = error.reason
        self.is_unsent = error.reason in _NOTHING_SENT or UNSENT in error.metadata
        # Internal errors are only logged, and text from a model is only for the caller.
        is_kept = error.reason is not Reason.INTERNAL and not quotes_model(error.reason)
        self.message = error.log_message[:MAX_ATTEMPT_MESSAGE_CHARS] if is_kept else ""
        self.engine_exit, self.engine_log = error.engine_exit, error.engine_log
        if ENGINE_CAUSE in error.metadata:
            self.engine_log = (*self.engine_log, error.message[:MAX_ATTEMPT_MESSAGE_CHARS])[-MAX_ATTEMPT_LOG_LINES:]
        error.engine_exit, error.engine_log = "", ()

    @property
    def may_have_left(self) -> bool:
        """Whether the request may have been sent to a remote provider; False only if it certainly was not."""
        return self.remote and (self.answered or not self.is_unsent)


@dataclass(slots=True)
class WaitPeriod:
    """A period in which a request waited for one reason."""

    began: float
    is_load: bool
    """Whether it waited for a model to load."""
    reason: str
    """The scheduler's first reason in this period: what it waited for, or the stage of the load."""
    ended: float | None = None


@dataclass(slots=True)
class ToolPeriod:
    """A tool call that the runner ran."""

    call_id: str
    tool: str
    began: float
    ended: float | None = None
    failed: bool = False


def is_miscounted(usage: usage_pb2.Usage) -> bool:
    """Whether a runner reports a count below zero; all counts are then unknown."""
    for _, count in usage.ListFields():  # noqa: SIM110 - a generator takes a call for each count
        if count < 0:
            return True
    return False


MAX_MILLIJOULES = 10**12
"""Largest energy of a request that a runner may report; larger ones are unknown."""
MAX_TOOL_RUNS = 64
"""Maximum number of recorded tool calls, the first ones."""
MAX_WAIT_PERIODS = 32
"""Maximum number of recorded periods; further waiting extends the last one."""


@dataclass(slots=True)
class RequestTrace:
    """The facts of one request. All times are seconds on the dispatcher's monotonic clock."""

    context: RequestContext
    arrived: float
    attempts: list[AttemptRecord] = field(default_factory=list)
    granted: float | None = None
    first_content: float | None = None
    load_wait: float = 0.0
    usage: usage_pb2.Usage | None = None
    """Usage that the runner reported during the answer."""
    seen: TokenCounter | None = None
    """Estimate of the current attempt's tokens; None: its answer is not text."""
    prompt_tokens: int | None = None
    """The expected length of the prompt; None: it was not placed."""
    left_premises: bool = False
    """Whether a tool is known to have sent data to a remote provider."""
    waits: list[WaitPeriod] = field(default_factory=list)
    """Periods of waiting in order, at most `MAX_WAIT_PERIODS`."""
    tool_runs: list[ToolPeriod] = field(default_factory=list)
    asked_model: str = ""
    """The requested name, even after its agent is resolved."""
    prompt_change: receipt_pb2.PromptChange | None = None
    """What changed in its prompt since earlier requests of its session; None: nothing known."""
    changed: Sequence[receipt_pb2.ChangedParameter] = ()
    """Parameters that its alias or agent replaced or removed."""
    _load_wait_at_grant: float = 0.0
    _loading_since: float | None = None

    def __post_init__(self) -> None:
        self.asked_model = self.asked_model or self.context.model

    def note_waiting(self, decision: Decision, now: float) -> None:
        """Records a decision that is not a grant; time in which a model loads counts as load wait."""
        if decision.HasField("loading"):
            self._loading_since = self._loading_since or now
            self._note_period(now, is_load=True, reason=decision.loading.stage)
        else:
            self._end_load_wait(now)
            self._note_period(now, is_load=False, reason=decision.queued.reason)

    def _note_period(self, now: float, *, is_load: bool, reason: str) -> None:
        last = self.waits[-1] if self.waits else None
        if last is not None and last.ended is None:
            if last.is_load == is_load or len(self.waits) == MAX_WAIT_PERIODS:
                return
            last.ended = now
        if len(self.waits) < MAX_WAIT_PERIODS:
            self.waits.append(WaitPeriod(now, is_load, reason))

    def note_grant(
        self, grant: Granted, now: float, *, remote: bool = False, price: model_pb2.ModelPrice | None = None
    ) -> None:
        """Records a new attempt; `remote`: its runner may send the request to a remote provider, at this price."""
        if self._loading_since is not None:
            self._end_load_wait(now)
        if self.waits and self.waits[-1].ended is None:
            self.waits[-1].ended = now
        self.granted, self.usage = now, None
        self._load_wait_at_grant = self.load_wait
        self.attempts.append(AttemptRecord(grant, remote, now, price))

    def note_attempt_failed(self, error: WeftError, now: float) -> None:
        """Records that the current attempt failed; see `AttemptRecord.note_error`."""
        self.attempts[-1].note_error(error)
        self.attempts[-1].ended = now

    def note_first_content(self, now: float) -> None:
        """Records the first content."""
        self.first_content = now
        self.attempts[-1].answered = True

    def note_tools(self, frame: Frame, now: float) -> None:
        """Records the tool calls and tool results of a frame."""
        for event in frame:
            match event.WhichOneof("event"):
                case "tool_call":
                    self.left_premises = self.left_premises or event.tool_call.remote
                    if len(self.tool_runs) < MAX_TOOL_RUNS:
                        self.tool_runs.append(ToolPeriod(event.tool_call.id, event.tool_call.name, now))
                case "tool_result":
                    for run in self.tool_runs:
                        if run.call_id == event.tool_result.id and run.ended is None:
                            run.ended, run.failed = now, event.tool_result.failed

    def _end_load_wait(self, now: float) -> None:
        if self._loading_since is not None:
            self.load_wait += now - self._loading_since
            self._loading_since = None

    def _reported(self, runner_part: receipt_pb2.Receipt | None) -> receipt_pb2.Receipt:
        """Returns a receipt with the runner's report, else with what was seen of the answer."""
        receipt = receipt_pb2.Receipt()
        if runner_part is not None:
            receipt.CopyFrom(runner_part)
            # The runner only knows its own attempt.
            receipt.ClearField("attempts")
            if not 0 <= receipt.device_usage.energy_millijoules <= MAX_MILLIJOULES:
                receipt.device_usage.ClearField("energy_millijoules")
        elif self.usage is not None:
            receipt.usage.CopyFrom(self.usage)
        elif self.seen is not None and self.seen.has_begun:
            # The caller left, or the runner or engine stopped early.
            receipt.usage.CopyFrom(self.seen.usage)
        if is_miscounted(receipt.usage):
            receipt.ClearField("usage")
        if receipt.usage.prompt_estimated and self.prompt_tokens is not None and not receipt.tool_run_count:
            # A runner estimates by characters alone.
            receipt.usage.prompt_tokens = self.prompt_tokens
        return receipt

    def receipt(self, reason: Reason, runner_part: receipt_pb2.Receipt | None, now: float) -> receipt_pb2.Receipt:
        """Returns the final receipt. `runner_part` is the runner's report: usage, digest, host, GPU time."""
        if self._loading_since is not None:
            self._end_load_wait(now)
        receipt = self._reported(runner_part)
        receipt.request_id = self.context.request_id
        receipt.task_id = self.context.task_id
        receipt.asked_model = self.context.asked_model
        receipt.outcome = self._outcome(reason)
        receipt.reason = int(reason)  # type: ignore[assignment]  # same numbers
        receipt.model = self.attempts[-1].grant.model if self.attempts else self.context.model
        if self.attempts:
            grant = self.attempts[-1].grant
            receipt.host = receipt.host or grant.host
            if self.context.names_priority and grant.priority > self.context.priority.wire:
                receipt.lowered_priority = grant.priority
        receipt.keep_alive_ignored = self.context.handling.keep_alive_ignored
        if self.context.compaction is not None:
            receipt.compaction.CopyFrom(self.context.compaction)
        receipt.changed_parameters.extend(self.changed)
        self._add_attempts(receipt, now)
        if self.tool_runs or self.context.tool_runs:
            self._note_tool_runs(receipt)
        if self.granted is not None:
            waited = self.granted - self.arrived - self._load_wait_at_grant
        else:
            waited = now - self.arrived - self.load_wait
        if self.left_premises:
            receipt.left_premises = True
        set_seconds(receipt.queue_wait, waited)
        set_seconds(receipt.load_wait, self.load_wait)
        set_seconds(receipt.total_time, now - self.arrived)
        if self.prompt_change is not None:
            receipt.prompt_change.CopyFrom(self.prompt_change)
        _note_outside(receipt)
        self._note_price(receipt)
        if self.first_content is not None:
            set_seconds(receipt.time_to_first_token, self.first_content - self.arrived)
        self._note_promise(receipt, now)
        return receipt

    def _add_attempts(self, receipt: receipt_pb2.Receipt, now: float) -> None:
        for attempt in self.attempts:
            shown = receipt.attempts.add(
                runner=attempt.grant.runner,
                runner_incarnation=attempt.grant.runner_incarnation,
                reason=int(attempt.reason),  # same numbers
                model=attempt.grant.model,
                message=attempt.message,
                engine_exit=attempt.engine_exit,
            )
            set_seconds(shown.start, attempt.began - self.arrived)
            set_seconds(shown.duration, (now if attempt.ended is None else attempt.ended) - attempt.began)
            if attempt.may_have_left:
                receipt.left_premises = True
        if self.attempts and not receipt.attempts[-1].reason:
            receipt.attempts[-1].reason = receipt.reason

    def _note_tool_runs(self, receipt: receipt_pb2.Receipt) -> None:
        add_tool_runs(receipt, self.context.tool_runs)
        for run in self.tool_runs[: MAX_TOOL_RUNS - len(receipt.tool_runs)]:
            shown = receipt.tool_runs.add(tool=run.tool, failed=run.failed)
            set_seconds(shown.start, run.began - self.arrived)
            if run.ended is not None:
                set_seconds(shown.duration, run.ended - run.began)

    def _note_price(self, receipt: receipt_pb2.Receipt) -> None:
        price = self.attempts[-1].price if self.attempts else None
        if price is not None and receipt.HasField("usage"):
            receipt.price_nanodollars = price_of(price, receipt.usage)

    def _note_promise(self, receipt: receipt_pb2.Receipt, now: float) -> None:
        """Sets whether the first content came within the caller's limit, if the request was accepted with one."""
        limit = self.context.max_wait_seconds
        if limit is not None and self.attempts:
            began = now if self.first_content is None else self.first_content
            set_seconds(receipt.promised_wait.limit, limit)
            receipt.promised_wait.kept = began - self.arrived <= limit

    def with_engine_logs(self, receipt: receipt_pb2.Receipt) -> receipt_pb2.Receipt:
        """Returns the receipt for routers: with engine logs, which callers do not get."""
        if not [attempt for attempt in self.attempts if attempt.engine_log]:
            return receipt
        full = receipt_pb2.Receipt()
        full.CopyFrom(receipt)
        for shown, attempt in zip(full.attempts, self.attempts, strict=True):
            shown.engine_log.extend(attempt.engine_log)
        return full

    def _outcome(self, reason: Reason) -> "receipt_pb2.Outcome.ValueType":
        if reason is Reason.UNSPECIFIED:
            return receipt_pb2.OUTCOME_COMPLETED
        if reason is Reason.CANCELLED:
            return receipt_pb2.OUTCOME_CANCELLED
        return receipt_pb2.OUTCOME_FAILED if self.attempts else receipt_pb2.OUTCOME_REJECTED


def add_tool_runs(receipt: receipt_pb2.Receipt, runs: Iterable[receipt_pb2.ToolRun]) -> None:
    """Adds tools that a gateway has run, at most MAX_TOOL_RUNS in all."""
    receipt.tool_runs.extend(islice(runs, MAX_TOOL_RUNS - len(receipt.tool_runs)))
    receipt.left_premises = receipt.left_premises or any(run.host for run in receipt.tool_runs)


def log_receipt(context: RequestContext, receipt: receipt_pb2.Receipt, duration_seconds: float) -> None:
    """Writes the log line of a request. It has the tenant and ids, which metrics never have."""
    usage, attempts, is_counted = receipt.usage, receipt.attempts, receipt.HasField("usage")
    log.info(
        "request",
        request_id=context.request_id,
        trace_id=trace_id_of(context.traceparent),
        tenant=context.tenant,
        caller=context.caller,
        model=receipt.model,
        agent=context.agent or None,
        **({"asked_model": context.asked_model} if context.asked_model else {}),
        operation=_OPERATIONS[context.operation],
        outcome=_OUTCOMES[receipt.outcome],
        reason=Reason(receipt.reason).name.lower() if receipt.reason else None,
        runner=attempts[-1].runner if attempts else None,
        attempts=len(attempts),
        queue_wait_ms=_millis(receipt.queue_wait),
        load_wait_ms=_millis(receipt.load_wait),
        first_token_ms=_millis(receipt.time_to_first_token) if receipt.HasField("time_to_first_token") else None,
        duration_ms=round(duration_seconds * 1e3, 1),
        prompt_tokens=usage.prompt_tokens if is_counted else None,
        cached_tokens=usage.cached_prompt_tokens if is_counted else None,
        completion_tokens=usage.completion_tokens if is_counted else None,
        tool_runs=receipt.tool_run_count,
        signals=[signal.name for signal in receipt.signals] if receipt.signals else None,
        left_premises=receipt.left_premises,
        **_device_fields(receipt.device_usage),
        **({"cancelled_by": receipt.cancelled_by} if receipt.cancelled_by else {}),
        **({"lacked_router": True} if receipt.lacked_router else {}),
    )


def log_internal(context: RequestContext, error: WeftError) -> None:
    """Logs details of an internal error that callers do not get, such as another process's message."""
    log.error("request ended with an internal error", request_id=context.request_id, error=error.log_message)


def _note_outside(receipt: receipt_pb2.Receipt) -> None:
    """Sets the time outside engine calls in a receipt that has the other two times."""
    timings = receipt.engine_timings
    if not timings.HasField("wall_time"):
        return
    total, wall = receipt.total_time, timings.wall_time
    outside = (total.seconds - wall.seconds) * NANOSECONDS + total.nanos - wall.nanos
    if outside >= 0:
        timings.outside_time.seconds, timings.outside_time.nanos = divmod(outside, NANOSECONDS)
    else:
        # The runner's clock contradicts this one.
        timings.ClearField("outside_time")


def _device_fields(usage: receipt_pb2.DeviceUsage) -> Mapping[str, object]:
    """Returns the known shares of accelerator work for the log."""
    found: dict[str, object] = {}
    if usage.HasField("device_time"):
        found["gpu_time_ms"] = _millis(usage.device_time)
    if usage.HasField("energy_millijoules"):
        found["gpu_energy_mj"] = usage.energy_millijoules
    return found


_OPERATIONS = {operation: operation.name.lower() for operation in Operation}
_OUTCOMES = {number: name.removeprefix("OUTCOME_").lower() for name, number in receipt_pb2.Outcome.items()}


def _millis(duration: Duration) -> float:
    return round(duration.seconds * 1e3 + duration.nanos / 1e6, 1)


class TimeSource(StrEnum):
    """Source of an accelerator time."""

    DEVICE = "device"
    """The request's measured share of the devices' work."""
    ENGINE = "engine"
    """The engine's report, which counts the whole time for each of several batched requests."""


def accelerator_time(receipt: receipt_pb2.Receipt) -> tuple[Duration, TimeSource] | None:
    """Returns the measured share of the devices' time, else the engine's report; None: neither is known."""
    if receipt.device_usage.HasField("device_time"):
        return receipt.device_usage.device_time, TimeSource.DEVICE
    if receipt.HasField("gpu_time"):
        return receipt.gpu_time, TimeSource.ENGINE
    return None
