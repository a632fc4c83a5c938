"""The reader of an OpenAI-compatible stream: chunks are decoded into typed structs and translated into events.

One reader serves chat and text completions. It runs once per token. A chunk of a wrong shape is a
BACKEND_PROTOCOL_ERROR, never a KeyError.
"""

import math
from typing import Annotated

import msgspec

from runner_svc.backend.read_frames import ReadFrames
from runner_svc.openai_upstream.errors import JSON_FAULTS, ErrorBody, error_fields, malformed, stated_error
from runner_svc.openai_upstream.sse import ErrorPayload
from runner_svc.policy.answer_state import AnswerState, Finish, require_assistant
from runner_svc.policy.model_names import is_another_model, plain_name
from weft.api.common.v1 import event_pb2, receipt_pb2, usage_pb2, warning_pb2
from weft.dispatch.frames import Frame, has_content, is_content
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

DONE = b"[DONE]"
_EMPTY = b"null"
"""Payload with which llama-server opens the stream of a completion with several prompts; it has no content."""
MAX_COUNT = 2**53
"""Largest accepted number of tokens: JSON numbers hold larger ones inexactly."""
MAX_HELD_REPORTS = 2
"""Number of prefill reports that are held back: that of 0 % and that of 100 %."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Place = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
MAX_MILLISECONDS = 1e12
"""Largest time that is taken from another server's `metrics`, some 32 years."""
_Milliseconds = Annotated[float, msgspec.Meta(ge=0)]
_BoundedMilliseconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_MILLISECONDS)]


class ChunkFunction(msgspec.Struct):
    """A part of a tool call's function."""

    name: str | None = None
    arguments: str | None = None


class ChunkToolCall(msgspec.Struct):
    """A part of a tool call."""

    index: Place = 0
    id: str | None = None
    function: ChunkFunction | None = None


class _Top(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Token(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[_Top] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class ChunkDelta(msgspec.Struct):
    """What a chunk adds to a choice."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: object = None
    """The same as a text, by the name that Ollama and mlx-lm give it; other servers have other things here."""
    refusal: str | None = None
    tool_calls: list[ChunkToolCall] | None = None


class ChunkChoice(msgspec.Struct):
    """One choice of a chunk."""

    index: Place = 0
    delta: ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    message: msgspec.Raw = msgspec.Raw()
    """Present in an answer that is no stream; not read."""


class PromptDetails(msgspec.Struct):
    """Tokens of the prompt by where they came from."""

    cached_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    """Not OpenAI's: tokens that were written to a provider's cache."""


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: Count | None = None


class ChunkUsage(msgspec.Struct):
    """The figures of an answer."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came from a cache."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    @property
    def cache_write_tokens(self) -> int:
        """Tokens of the prompt that were written to a cache."""
        details = self.prompt_tokens_details
        return 0 if details is None else details.cache_write_tokens or 0

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens that were reasoning."""
        details = self.completion_tokens_details
        return 0 if details is None else details.reasoning_tokens or 0


class _Timings(msgspec.Struct):
    """The times of one choice as llama-server reports them."""

    prompt_ms: _Milliseconds | msgspec.UnsetType = msgspec.UNSET
    """From its first work on the prompt to the first token."""
    predicted_ms: _Milliseconds | msgspec.UnsetType = msgspec.UNSET
    """From the first token to the last."""


class _Metrics(msgspec.Struct):
    """The times of one request as vLLM reports them with --enable-per-request-metrics; null: not known."""

    time_to_first_token_ms: _BoundedMilliseconds | None = None
    """From scheduling to the first token: waiting in its queue is not included."""
    generation_time_ms: _BoundedMilliseconds | None = None
    """From the first token to the last."""
    mean_itl_ms: _BoundedMilliseconds | None = None
    """Between two tokens."""


class _PromptProgress(msgspec.Struct):
    total: Count = 0
    cache: Count = 0
    processed: Count = 0


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    timings: _Timings | None = None
    metrics: msgspec.Raw = msgspec.Raw()
    """vLLM's times of the request; other servers may have other things of this name."""
    prompt_progress: _PromptProgress | None = None
    error: ErrorBody | str | None = None


class _Named(msgspec.Struct):
    model: object = None


_DECODER = msgspec.json.Decoder(Chunk)
_FINISH_REASONS = {
    Finish.STOP: event_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: event_pb2.FINISH_REASON_LENGTH,
    Finish.TOOL_CALLS: event_pb2.FINISH_REASON_TOOL_CALLS,
    Finish.CONTENT_FILTER: event_pb2.FINISH_REASON_CONTENT_FILTER,
}
_NOTHING = frozenset({b"", b"null"})


class _UsageSum:
    """Adds up the usage of a stream: llama-server sends usage and timings once per choice, other servers once for all.

    Others send usage with every chunk, as the choice's total so far. Then the last one counts.
    """

    def __init__(self, expected_choices: int, choices_per_prompt: int) -> None:
        self._expected_choices = expected_choices
        self._choices_per_prompt = choices_per_prompt
        self._of_choices: dict[int, ChunkUsage] = {}
        self._of_stream: ChunkUsage | None = None
        """The last usage without a choice; where there is one, the usage of choices is included in it."""
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._prefill_ms: float | None = None
        """None: not known, as for `_decode_ms`."""
        self._decode_ms: float | None = None
        self._tokens_per_second = 0.0
        self.has_figures = False
        """Whether the engine has reported usage or timings."""

    def add(self, chunk: Chunk) -> None:
        """Add a chunk's usage and timings."""
        usage, timings = chunk.usage, chunk.timings
        self.has_figures = True
        if usage is not None and chunk.choices:
            self._of_choices[chunk.choices[0].index] = usage
        elif usage is not None:
            self._of_stream = usage
            self._completion_tokens += usage.completion_tokens
            self._reasoning_tokens += usage.reasoning_tokens
        if timings is not None:
            if timings.prompt_ms is not msgspec.UNSET:
                self._prefill_ms = (self._prefill_ms or 0.0) + timings.prompt_ms
            if timings.predicted_ms is not msgspec.UNSET:
                self._decode_ms = (self._decode_ms or 0.0) + timings.predicted_ms
        elif self._expected_choices == 1 and bytes(chunk.metrics) not in _NOTHING:
            # Of several prompts vLLM tells the times of the last one alone.
            self._take_metrics(chunk.metrics)

    def receipt(self) -> receipt_pb2.Receipt:
        """Returns the backend's part of a receipt."""
        usage = self._usage()
        receipt = receipt_pb2.Receipt(usage=usage)
        if (compute_ms := (self._prefill_ms or 0.0) + (self._decode_ms or 0.0)) > 0:
            receipt.gpu_time.FromMicroseconds(int(compute_ms * 1e3))
        if self._prefill_ms is not None:
            receipt.engine_timings.prefill_time.FromMicroseconds(int(self._prefill_ms * 1e3))
        if self._decode_ms is not None:
            receipt.engine_timings.decode_time.FromMicroseconds(int(self._decode_ms * 1e3))
        rate = self._tokens_per_second
        if not rate and self._decode_ms:
            rate = usage.completion_tokens / self._decode_ms * 1e3
        if rate and math.isfinite(rate):
            receipt.tokens_per_second = rate
        return receipt

    def _take_metrics(self, metrics: msgspec.Raw) -> None:
        """Take vLLM's times; those of another shape are another server's, and say nothing here."""
        try:
            found = msgspec.json.decode(metrics, type=_Metrics)
        except JSON_FAULTS:
            return
        if found.time_to_first_token_ms is None or found.generation_time_ms is None:
            return
        self._prefill_ms, self._decode_ms = found.time_to_first_token_ms, found.generation_time_ms
        if found.mean_itl_ms:
            self._tokens_per_second = 1e3 / found.mean_itl_ms

    def _usage(self) -> usage_pb2.Usage:
        """Returns the usage. Choices of one prompt share it, so its tokens count once."""
        if self._of_stream is not None:
            prompts = [self._of_stream]
            completion, reasoning = self._completion_tokens, self._reasoning_tokens
        else:
            per_prompt = {index // self._choices_per_prompt: usage for index, usage in self._of_choices.items()}
            prompts = list(per_prompt.values())
            completion = sum(usage.completion_tokens for usage in self._of_choices.values())
            reasoning = sum(usage.reasoning_tokens for usage in self._of_choices.values())
        return usage_pb2.Usage(
            prompt_tokens=sum(prompt.prompt_tokens for prompt in prompts),
            completion_tokens=completion,
            cached_prompt_tokens=sum(prompt.cached_tokens for prompt in prompts),
            cache_write_prompt_tokens=sum(prompt.cache_write_tokens for prompt in prompts),
            reasoning_tokens=reasoning,
        )


class StreamReader:
    """Reads one stream: from payloads to frames of events, with a final check.

    `policy.answer_state` decides which chunk may follow which. Finish reasons are held back until the stream has ended:
    until then the answer may still fail, and its caller must not have received a regular end.
    """

    def __init__(
        self,
        expected_choices: int,
        choices_per_prompt: int,
        *,
        whole: bool = False,
        joins_texts: bool = False,
        asked_model: str = "",
    ) -> None:
        """`whole`: the answer is not streamed to its caller, so chunks that arrive together become one frame.

        `joins_texts`: texts that arrive together become one delta, with their lengths.

        `asked_model`: the server's name of the requested model; empty: the request named none.
        """
        self._decoder = _DECODER
        self._whole = whole
        self._joins_texts = joins_texts
        self._state = AnswerState(expected_choices)
        self._asked_model = asked_model
        self._content_started = False
        self._usage_sum = _UsageSum(expected_choices, choices_per_prompt)
        self._held: Frame = []
        self.done = False
        """Whether the stream has sent [DONE]."""
        self.ended = False
        """Whether `read` has returned the last frame."""
        self.took_token = False
        """Whether the last `read` contained a part of an answer; a chunk with the role alone is none."""
        self.took_prefill = False
        """Whether the last `read` contained a prefill report."""

    def read(self, payloads: list[bytes]) -> list[Frame]:
        """Returns the frames of payloads that arrived together: the first content of the stream alone, the rest in one.

        Where the answer is not streamed to its caller there is one frame, with the chunks of a text joined. Prefill
        reports of 0 % and 100 % are held back until the next event, and the events at [DONE] go with those before it:
        each further frame is one more message on every hop.
        """
        frames = ReadFrames(whole=self._whole, joins=self._joins_texts)
        self.took_token = self.took_prefill = False
        texts: list[str] | None = None
        choice = 0
        for payload in payloads:
            if payload == DONE:
                self.done = True
                if self._state.is_complete:
                    frames.add(self.finish())
                    self.ended = True
                break
            if payload == _EMPTY:
                continue
            if self._asked_model:
                frames.add(self._check_model(payload))
                texts = None
            chunk = self._decode(payload)
            text = _plain_text(chunk)
            if texts is not None and text and chunk.choices[0].index == choice:
                # Nearly every chunk: one more text of a choice that goes on.
                texts.append(text)
                continue
            texts = self._take_text(chunk.choices[0].index, text, frames) if text else None
            if texts is None:
                self._take(chunk, frames)
            else:
                choice = chunk.choices[0].index
        return frames.all()

    def _take_text(self, choice: int, text: str, frames: ReadFrames) -> list[str] | None:
        """Take a text of a choice; returns the list for those that follow. None: it is to be taken as any chunk."""
        if not (self._content_started or (self._whole and not self._held)):
            return None
        texts = frames.add_text(choice, text)
        if texts is not None:
            self._state.take(choice, None, has_content=True)
            self._content_started = self.took_token = True
        return texts

    def _take(self, chunk: Chunk, frames: ReadFrames) -> None:
        events = self._events_of(chunk, frames.present)
        if not self._content_started and has_content(events):
            self._content_started = True
            events = self._take_held() + events
            if not self._whole:
                frames.add_alone(events)
                return
        frames.add(events)

    def finish(self) -> Frame:
        """Returns the last frame once the stream has ended. Raises BACKEND_PROTOCOL_ERROR for an incomplete answer."""
        self._state.close(has_figures=self._usage_sum.has_figures)
        try:
            receipt = self._usage_sum.receipt()
        except (ValueError, OverflowError) as error:
            raise _malformed(error) from error
        return [
            *(_end_event(index, reason) for index, reason in self._state.ends.items()),
            *self._take_held(),
            event_pb2.InferenceEvent(usage=receipt.usage),
            event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt)),
        ]

    def _take_held(self) -> Frame:
        held, self._held = self._held, []
        return held

    def _check_model(self, payload: bytes) -> Frame:
        """Returns a warning where the first chunk names another model than the request."""
        requested, self._asked_model = self._asked_model, ""
        try:
            named = msgspec.json.decode(payload, type=_Named).model
        except JSON_FAULTS:
            return []  # the error is raised when the chunk is decoded
        if not isinstance(named, str) or not is_another_model(requested, named):
            return []
        message = f"the server answered as {plain_name(named)!r}; it was asked for {plain_name(requested)!r}"
        code = warning_pb2.WARNING_CODE_MODEL_MISMATCH
        return [event_pb2.InferenceEvent(warning=warning_pb2.Warning(code=code, message=message))]

    def _decode(self, payload: bytes) -> Chunk:
        if isinstance(payload, ErrorPayload):
            raise self._stated(payload, "an error without words")
        try:
            chunk = self._decoder.decode(payload)
        except JSON_FAULTS as error:
            raise _malformed(error) from error
        if chunk.error is not None:
            raise stated_error(chunk.error, has_begun=self._content_started)
        is_bare = chunk.usage is None and chunk.timings is None and chunk.prompt_progress is None
        if is_bare and not chunk.choices and error_fields(payload)[0]:
            # An error without an envelope: {"object": "error", "message": ...}, {"detail": ...}.
            raise self._stated(payload)
        return chunk

    def _stated(self, payload: bytes, default: str = "") -> WeftError:
        message, kind = error_fields(payload)
        return stated_error(ErrorBody(message=message or default, type=kind), has_begun=self._content_started)

    def _events_of(self, chunk: Chunk, frame: Frame) -> Frame:
        """Returns the events after `frame`; the text of an unstreamed answer that continues its end is added to it."""
        try:
            if self._whole and (text := _continuation(chunk, frame)):
                self._state.take(chunk.choices[0].index, None, has_content=True)
                frame[-1].delta.text += text
                self.took_token = True
                return []
            return self._events(chunk)
        except (ValueError, OverflowError) as error:  # a number or a text that no field can hold
            raise _malformed(error) from error

    def _events(self, chunk: Chunk) -> Frame:
        if chunk.usage is not None or chunk.timings is not None:
            self._usage_sum.add(chunk)
        events = [event for choice in chunk.choices if (event := self._delta_event(choice)) is not None]
        if events or (chunk.choices and (self._content_started or self._state.ends)):
            # Once the answer has begun, an empty chunk is a token without text.
            self.took_token = True
        if (progress := chunk.prompt_progress) is not None:
            self.took_prefill = True
            self._held.append(_progress_event(progress))
            at_an_end = progress.processed <= progress.cache or progress.processed >= progress.total
            if self._content_started or not at_an_end or len(self._held) > MAX_HELD_REPORTS:
                events += self._take_held()
        return events

    def _delta_event(self, choice: ChunkChoice) -> event_pb2.InferenceEvent | None:
        """Returns the event of a choice's chunk; None for one without content, which may have a finish reason."""
        event = event_pb2.InferenceEvent()
        delta = event.delta
        text = choice.text if choice.delta is None else choice.delta.content
        if text:
            delta.text = text
        if choice.delta is not None:
            require_assistant(choice.delta.role)
            _copy_rare_content(choice.delta, delta)
        elif choice.text is None and bytes(choice.message) not in _NOTHING:
            raise WeftError(
                Reason.BACKEND_PROTOCOL_ERROR, "the engine sent a message where a stream has pieces (delta)"
            )
        self._state.take(
            choice.index, choice.finish_reason, has_content=is_content(delta), has_call=bool(delta.tool_calls)
        )
        if choice.logprobs is not None and choice.logprobs.content:
            delta.logprobs.extend(map(_token_logprob, choice.logprobs.content))
        if not text and not delta.ByteSize():
            return None
        delta.index = choice.index
        return event


def _plain_text(chunk: Chunk) -> str:
    """Returns the text of a chunk that is nothing but text of a choice; empty: another chunk."""
    if len(chunk.choices) != 1 or chunk.usage is not None or chunk.timings is not None or chunk.prompt_progress:
        return ""
    choice = chunk.choices[0]
    delta = choice.delta
    if delta is None or choice.finish_reason or choice.logprobs is not None:
        return ""
    is_more = delta.role or delta.reasoning_content or delta.reasoning or delta.refusal or delta.tool_calls
    return "" if is_more else delta.content or ""


def _continuation(chunk: Chunk, frame: Frame) -> str:
    """Returns the text of a chunk that only continues the text at the end of `frame`; empty: another chunk."""
    if not frame or len(chunk.choices) != 1 or chunk.usage or chunk.timings or chunk.prompt_progress:
        return ""
    last, choice = frame[-1].delta, chunk.choices[0]
    if choice.index != last.index or choice.logprobs or choice.finish_reason or choice.delta is None:
        return ""
    if not last.text or last.finish_reason or last.logprobs or last.tool_calls:
        return ""
    delta = choice.delta
    is_more = delta.role or delta.reasoning_content or delta.reasoning or delta.refusal or delta.tool_calls
    return "" if is_more else delta.content or ""


def _end_event(index: int, reason: Finish) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(delta=event_pb2.Delta(index=index, finish_reason=_FINISH_REASONS[reason]))


def _malformed(error: Exception) -> WeftError:
    return malformed("the engine sent an event that is not a chunk:", error)


def _progress_event(progress: _PromptProgress) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(
        progress=event_pb2.Progress(
            prompt_tokens=progress.total, processed_tokens=progress.processed, cached_tokens=progress.cache
        )
    )


def _copy_rare_content(source: ChunkDelta, delta: event_pb2.Delta) -> None:
    thinking = source.reasoning_content or source.reasoning
    if thinking and isinstance(thinking, str):
        delta.reasoning = thinking
    if source.refusal:
        delta.refusal = source.refusal
    for call in source.tool_calls or ():
        function = call.function or ChunkFunction()
        delta.tool_calls.add(
            index=call.index, id=call.id or "", name=function.name or "", arguments_text=function.arguments or ""
        )


def _token_logprob(token: _Token) -> event_pb2.TokenLogprob:
    return event_pb2.TokenLogprob(
        token=token.token,
        logprob=token.logprob,
        raw_bytes=None if token.bytes is None else bytes(token.bytes),
        top=[
            event_pb2.TopLogprob(
                token=top.token, logprob=top.logprob, raw_bytes=None if top.bytes is None else bytes(top.bytes)
            )
            for top in token.top_logprobs or ()
        ],
    )
