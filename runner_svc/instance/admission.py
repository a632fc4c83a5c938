"""Slots and admitted requests of an instance. Slots have no queue: requests wait in the router."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from runner_svc.backend.port import ENGINE_METHODS, Backend, CallInfo, SpeechPart
from runner_svc.cache.model_cache import RequestCache, RunningTurn
from runner_svc.instance.accepted_forms import AcceptedForms, FittedRequest
from runner_svc.instance.lifecycle_loop import IdleWork
from runner_svc.memory.device_meter import RequestMeter
from runner_svc.request_records import RequestRecord
from weft.api.common.v1 import audio_pb2, chat_pb2, completion_pb2, event_pb2, receipt_pb2, tokenize_pb2, warning_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.history import with_notes
from weft.dispatch.payload_description import unfollowed_effort
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities
from weft.kernel.requests.request_values import Operation
from weft.kernel.time.timestamps import set_seconds

if TYPE_CHECKING:
    from runner_svc.policy.engine_blocks import PromptPrefixes

BUSY_RETRY_SECONDS = 1.0


class RequestLimit:
    """The limit on concurrent requests over all instances of a runner."""

    def __init__(self, max_requests: int | None = None) -> None:
        self._max_requests = max_requests
        self._held = 0

    def take(self) -> None:
        """Counts a request. Raises NO_SLOT_AVAILABLE if the limit is reached."""
        if self._max_requests is not None and self._held >= self._max_requests:
            raise WeftError(
                Reason.NO_SLOT_AVAILABLE,
                f"the runner is already processing {self._max_requests} requests, its limit",
                retry_after_seconds=BUSY_RETRY_SECONDS,
            )
        self._held += 1

    def give_back(self) -> None:
        """Stops counting a request."""
        self._held -= 1


class SlotTable:
    """The slots of an instance and the requests that hold them. `limit` is shared by all instances of the runner."""

    def __init__(self, total: int, limit: RequestLimit | None = None) -> None:
        self._total = total
        self._limit = limit or RequestLimit()
        self._holders: list[str] = []

    @property
    def total(self) -> int:
        """Number of slots."""
        return self._total

    def resize(self, total: int) -> None:
        """Changes the number of slots; requests keep the slots that they hold."""
        self._total = total

    @property
    def holders(self) -> tuple[str, ...]:
        """Ids of the requests that hold a slot, in order of arrival."""
        return tuple(self._holders)

    def take(self, request_id: str) -> None:
        """Takes a slot. Raises NO_SLOT_AVAILABLE immediately if all are taken."""
        if len(self._holders) >= self._total:
            raise WeftError(
                Reason.NO_SLOT_AVAILABLE,
                "its slot is taken" if self._total == 1 else f"all {self._total} slots are taken",
                retry_after_seconds=BUSY_RETRY_SECONDS,
            )
        self._limit.take()
        self._holders.append(request_id)

    def give_back(self, request_id: str) -> None:
        """Gives back the slot of a request."""
        self._holders.remove(request_id)
        self._limit.give_back()


MIN_MEASURED_SECONDS = 0.05
"""Minimum time from first to last token: tokens that arrive together do not show the engine's speed."""


def tokens_per_second(tokens: int, first_at: float | None, last_at: float | None) -> float | None:
    """Returns the decode speed, from the times of the first and last token; None: not measurable."""
    if tokens < 2 or first_at is None or last_at is None or last_at - first_at < MIN_MEASURED_SECONDS:
        return None
    return (tokens - 1) / (last_at - first_at)


_EFFORT = "reasoning_effort"
OnFailure = Callable[[WeftError], None]
"""Called with every error with which the engine ends a request; some cause a restart of the engine."""


class AdmittedRequest:
    """An admitted request: its record, cache use, and engine calls. Created by `Instance.admit`."""

    def __init__(
        self,
        record: RequestRecord,
        backend: Backend,
        on_failure: OnFailure,
        cache: RequestCache | None = None,
        capabilities: Capabilities = UNKNOWN,
        meter: RequestMeter | None = None,
        idle_work: IdleWork | None = None,
    ) -> None:
        """`cache`: None if tenants' caches are not isolated. `capabilities`: those of the model.

        `meter`: None if no devices are observed. `idle_work`: what its engine calls interrupt.
        """
        self.forms = AcceptedForms()
        """What its engine is known to accept."""
        self._meter = meter
        self._idle_work = idle_work or IdleWork()
        self.notes: Frame = []
        """Warnings for the caller, sent before the first turn."""
        self.record = record
        self._capabilities = capabilities
        self._cache = cache
        self._prefixes: PromptPrefixes | None = None
        self._backend = backend
        self._on_failure = on_failure

    def note_prompt(self, payload: GenerationPayload) -> None:
        """Records the prompt as its caller sent it, before weft's own parts are added."""
        if self._cache is not None:
            self._prefixes = self._cache.prefixes_of(payload)

    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """Runs one generating turn like Backend.generate, and keeps the request's record up to date.

        The last frame is sent once the turn has ended, so that the caller's next request finds the cached prefix free.
        """
        record = self.record
        last: Frame = []
        payload, notes = _fitted(payload, self._capabilities)
        async with await self._caching(payload) as turn:
            effort = _effort_warning(payload, self._capabilities)
            if warnings := [*turn.warnings, *self.notes, *notes, *effort]:
                self.notes = []
                yield warnings
            try:
                async with aclosing(self._accepted(payload, call, turn)) as frames:
                    async for each in frames:
                        # An engine that does not support the parameter warns too, but with less explanation.
                        frame = _without_effort_warning(each) if effort else each
                        if each and not frame:
                            continue
                        if frame and not frame[0].HasField("warning"):
                            turn.note_work()
                        if frame and frame[-1].WhichOneof("event") == "finished":
                            self._measure(frame[-1].finished.receipt, _choices(payload))
                            if self._cache is not None:
                                self._cache.note_turn(turn, frame[-1].finished.receipt)
                            last = frame
                            continue
                        record.with_caller = True
                        yield frame
                        record.with_caller = False
            except WeftError as error:
                self._judge(error)
                raise
        if last:
            record.with_caller = True
            yield last
            record.with_caller = False

    async def _accepted(self, payload: GenerationPayload, call: CallInfo, turn: RunningTurn) -> AsyncGenerator[Frame]:
        """Runs an engine turn; retries in another form if the engine rejects the form of the request.

        Warnings are yielded once the engine has accepted a form.
        """
        fitted, has_begun = FittedRequest(payload, self.forms), False
        with self._calling():
            while True:
                held: Frame = []
                try:
                    async with aclosing(self._backend.generate(fitted.payload, self._begin(call, turn))) as frames:
                        async for frame in frames:
                            if not has_begun and all(event.HasField("warning") for event in frame):
                                held += frame
                                continue
                            if not has_begun:
                                has_begun = True
                                fitted.note_accepted()
                                if fitted.warnings or held:
                                    yield [*_events(fitted.warnings), *held]
                            yield frame
                        return
                except WeftError as error:
                    if has_begun or self.record.verdict is not None or not fitted.adapt(error):
                        raise

    async def run(self, operation: Operation, payload: Any, call: CallInfo) -> Any:
        """Runs a unary operation with the backend's method in `ENGINE_METHODS`.

        Raises UNSUPPORTED_OPERATION if the engine lacks it.
        """
        if isinstance(payload, tokenize_pb2.TokenizePayload) and payload.HasField("chat"):
            chat, _ = with_notes(payload.chat, self._capabilities.lacking)
            payload = tokenize_pb2.TokenizePayload(chat=chat, with_pieces=payload.with_pieces)
        row = ENGINE_METHODS[operation]
        engine = getattr(self._backend, row.name)
        async with await self._caching() if row.uses_cache else RunningTurn() as turn:
            with self._judging(), self._calling():
                if operation is Operation.TOKENIZE and payload.HasField("chat"):
                    return await self._tokenize(engine, payload, call, turn)
                return await engine(payload, self._begin(call, turn))

    async def _tokenize(self, engine: Any, payload: Any, call: CallInfo, turn: RunningTurn) -> Any:
        """Counts the tokens of a chat in the form that the engine accepts."""
        fitted = FittedRequest(payload.chat, self.forms)
        while True:
            chat = cast("chat_pb2.ChatPayload", fitted.payload)
            asked = tokenize_pb2.TokenizePayload(chat=chat, with_pieces=payload.with_pieces)
            try:
                return await engine(asked, self._begin(call, turn))
            except WeftError as error:
                if self.record.verdict is not None or not fitted.adapt(error):
                    raise

    async def stream(self, operation: Operation, payload: Any, call: CallInfo) -> AsyncGenerator[Frame]:
        """Runs an operation on images or recordings with the backend's method in `ENGINE_METHODS`; the end comes last.

        Raises UNSUPPORTED_OPERATION if the engine lacks it.
        """
        record = self.record
        last: Frame = []
        with self._judging(), self._calling():
            engine = getattr(self._backend, ENGINE_METHODS[operation].name)
            async with aclosing(engine(payload, self._begin(call, RunningTurn()))) as frames:
                async for frame in frames:
                    if frame and frame[-1].WhichOneof("event") == "finished":
                        self.note_wall_time(frame[-1].finished.receipt)
                        last = frame
                        continue
                    record.with_caller = True
                    yield frame
                    record.with_caller = False
        if last:
            record.with_caller = True
            yield last
            record.with_caller = False

    async def speak(self, payload: audio_pb2.SpeechPayload, call: CallInfo) -> AsyncGenerator[SpeechPart]:
        """See Backend.speak."""
        record = self.record
        with self._judging(), self._calling():
            async with aclosing(self._backend.speak(payload, self._begin(call, RunningTurn()))) as parts:
                async for part in parts:
                    record.with_caller = True
                    yield part
                    record.with_caller = False

    async def _caching(self, payload: GenerationPayload | None = None) -> RunningTurn:
        """Begins the prefix cache use of a turn, to enter now; of a generating turn if it has a payload."""
        await self._idle_work.make_way()
        if self._cache is None:
            return RunningTurn()
        if payload is None:
            return await self._cache.embedding()
        return await self._cache.generating(payload, self._prefixes)

    @contextmanager
    def _judging(self) -> Iterator[None]:
        try:
            yield
        except WeftError as error:
            self._judge(error)
            raise

    def _begin(self, call: CallInfo, turn: RunningTurn) -> CallInfo:
        record = self.record
        record.begin_turn()

        def note_prefill() -> None:
            record.note_prefill()
            turn.begun.set()

        cache, prefixes = turn.use, self._prefixes
        return replace(call, on_token=record.note_token, on_prefill=note_prefill, cache=cache, prefixes=prefixes)

    def _calling(self) -> AbstractContextManager[None]:
        return self._meter or nullcontext()

    def note_device_usage(self, receipt: receipt_pb2.Receipt) -> None:
        """Writes the share of the engine calls in its devices' work to a receipt."""
        usage = None if self._meter is None else self._meter.usage()
        if usage is not None:
            receipt.device_usage.CopyFrom(usage)

    def note_wall_time(self, receipt: receipt_pb2.Receipt) -> None:
        """Writes the time since the last engine call began to a receipt."""
        seconds = self.record.clock.monotonic() - self.record.turn_started
        set_seconds(receipt.engine_timings.wall_time, seconds)

    def _measure(self, receipt: receipt_pb2.Receipt, choices: int) -> None:
        """Writes the runner's measurements to a turn's receipt; the engine's reported speed takes precedence."""
        self.note_wall_time(receipt)
        if receipt.usage.completion_tokens <= choices:
            # A single token takes no measurable time: llama.cpp's server reports 1,000,000 per second.
            receipt.ClearField("tokens_per_second")
            return
        if receipt.HasField("tokens_per_second"):
            return
        record = self.record
        speed = tokens_per_second(receipt.usage.completion_tokens, record.turn_first_token, record.last_token)
        if speed is not None:
            receipt.tokens_per_second = speed

    def _judge(self, error: WeftError) -> None:
        """Raises the record's verdict if there is one: it explains more than the connection error that it caused."""
        if self.record.verdict is not None:
            raise self.record.verdict from error
        self._on_failure(error)


def _choices(payload: GenerationPayload) -> int:
    """Returns the number of choices that a payload requests."""
    prompts = len(payload.prompts) if isinstance(payload, completion_pb2.CompletionPayload) else 1
    return max(1, payload.choice_count) * prompts


def _fitted(payload: GenerationPayload, capabilities: Capabilities) -> tuple[GenerationPayload, Frame]:
    """Returns a payload without content in earlier turns that the model cannot read, and warnings about it."""
    if not capabilities.lacking or not isinstance(payload, chat_pb2.ChatPayload):
        return payload, []
    fitted, warnings = with_notes(payload, capabilities.lacking)
    return fitted, _events(warnings) if warnings else []


def _events(warnings: Sequence[warning_pb2.Warning]) -> Frame:
    return [event_pb2.InferenceEvent(warning=warning) for warning in warnings]


def _effort_warning(payload: GenerationPayload, capabilities: Capabilities) -> Frame:
    """Returns the warning that a model thinks although the request asks for no effort; empty: no warning."""
    why = unfollowed_effort(payload, capabilities)
    if not why:
        return []
    message = f"{_EFFORT}: none was ignored: the model {why}"
    code = warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER
    return [event_pb2.InferenceEvent(warning=warning_pb2.Warning(code=code, field=_EFFORT, message=message))]


def _without_effort_warning(frame: Frame) -> Frame:
    return [event for event in frame if not (event.HasField("warning") and event.warning.field == _EFFORT)]
