"""Reader of an OpenAI-compatible stream: decodes chunks into typed structs and translates them to events.

It serves chat and text completions and runs for every token. An unreadable chunk is a BACKEND_PROTOCOL_ERROR, never a
KeyError.
"""

import json
from collections.abc import Collection

import msgspec

from runner_svc.openai_upstream.chunks import (
    CHUNKS,
    NO_TEXT,
    TEXT_CHUNKS,
    Chunk,
    ChunkChoice,
    ChunkDelta,
    ChunkToken,
    ChunkToolCall,
    HalfCharacters,
    PromptProgress,
)
from runner_svc.openai_upstream.dialects import DIALECT_FAULTS, read_delta, read_dialect, read_document
from runner_svc.openai_upstream.errors import JSON_FAULTS, ErrorBody, error_fields, malformed, stated_error
from runner_svc.openai_upstream.sse import ErrorPayload
from runner_svc.openai_upstream.tool_calls import ToolCallNormalizer, as_message
from runner_svc.openai_upstream.usage_sum import NOTHING, UsageSum
from runner_svc.policy.answer_state import CUTTING, AnswerState, Finish, quoted, require_assistant
from runner_svc.policy.model_names import is_another_model, plain_name
from weft.api.common.v1 import event_pb2, warning_pb2
from weft.dispatch.frames import MAX_JOINED_CHARS, MAX_JOINED_TEXTS, Frame, has_content, is_content
from weft.kernel.errors.error_tree import WeftError

DONE = b"[DONE]"
_EMPTY = b"null"
"""First payload of llama-server's stream for a completion with several prompts; it has no content."""
MAX_HELD_REPORTS = 2
"""Number of prefill reports held back: 0 % and 100 %."""


class _Named(msgspec.Struct):
    model: object = None


_FINISH_REASONS = {
    Finish.STOP: event_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: event_pb2.FINISH_REASON_LENGTH,
    Finish.TOOL_CALLS: event_pb2.FINISH_REASON_TOOL_CALLS,
    Finish.CONTENT_FILTER: event_pb2.FINISH_REASON_CONTENT_FILTER,
}


class ReadFrames:
    """The frames of each read. Consecutive texts of a choice are joined in one event if requested."""

    def __init__(self, *, whole: bool, joins: bool = False) -> None:
        """`whole`: the answer is not streamed to its caller, so its texts are joined.

        `joins`: a delta may hold several texts and their lengths: at most MAX_JOINED_TEXTS and MAX_JOINED_CHARS.
        """
        self._whole = whole
        self._joins = joins
        self._frames: list[Frame] = []
        self._frame: Frame = []
        self._choice = 0
        self._texts: list[str] = []
        """Texts of `_choice` that follow the events of the current frame and are not an event yet."""

    @property
    def present(self) -> Frame:
        """The unfinished frame."""
        if self._texts:
            self._end_texts()
        return self._frame

    def add_text(self, choice: int, text: str) -> list[str] | None:
        """Adds a text; returns the list to which the next texts of the choice can be appended.

        None: not added, because it may continue the text of an existing event.
        """
        if self._texts and choice != self._choice:
            self._end_texts()
        texts = self._texts
        if not texts:
            if self._whole and self._frame:
                return None
            self._choice = choice
        texts.append(text)
        return texts

    def add(self, events: Frame) -> None:
        """Adds events to the unfinished frame."""
        if self._texts:
            self._end_texts()
        self._frame += events

    def add_alone(self, events: Frame) -> None:
        """Adds a separate frame."""
        self._frames = [*self.take(), events]

    def take(self) -> list[Frame]:
        """Returns the frames of the current read, in order, and starts a new read."""
        if self._texts:
            self._end_texts()
        frames, self._frames = self._frames, []
        if self._frame:
            frames.append(self._frame)
            self._frame = []
        return frames

    def _end_texts(self) -> None:
        texts, self._texts = self._texts, []
        if self._whole:
            self._add_delta("".join(texts), ())
        elif not self._joins:
            for text in texts:
                self._add_delta(text, ())
        elif len(texts) <= MAX_JOINED_TEXTS and len(text := "".join(texts)) <= MAX_JOINED_CHARS:
            self._add_delta(text, texts)
        else:
            self._add_within_limits(texts)

    def _add_within_limits(self, texts: list[str]) -> None:
        """Adds texts in the fewest frames that the limits allow."""
        part: list[str] = []
        chars = 0
        for text in texts:
            if part and (len(part) == MAX_JOINED_TEXTS or chars + len(text) > MAX_JOINED_CHARS):
                self._add_delta("".join(part), part)
                self._frames.append(self._frame)
                self._frame, part, chars = [], [], 0
            part.append(text)
            chars += len(text)
        self._add_delta("".join(part), part)

    def _add_delta(self, text: str, pieces: "list[str] | tuple[()]") -> None:
        event = event_pb2.InferenceEvent()
        delta = event.delta
        delta.text = text
        if self._choice:
            delta.index = self._choice
        if len(pieces) > 1:
            delta.piece_lengths.extend(map(len, pieces))
        self._frame.append(event)


class StreamReader:
    """Reads a stream: converts payloads to frames of events, and checks that the answer is complete.

    `policy.answer_state` decides which chunk may follow which. Finish reasons are held back until the stream ends: the
    answer may fail until then, and its caller must not see a regular end.
    """

    def __init__(
        self,
        expected_choices: int,
        choices_per_prompt: int,
        *,
        whole: bool = False,
        joins_texts: bool = False,
        asked_model: str = "",
        used_ids: Collection[str] = (),
        may_lack_choices: bool = False,
    ) -> None:
        """`whole`: the answer is not streamed to its caller, so chunks that arrive together become one frame.

        `joins_texts`: texts that arrive together become one delta, with their lengths.

        `asked_model`: model name in the request; empty: none.

        `used_ids`: ids of earlier tool calls in the conversation.

        `may_lack_choices`: whether an answer with fewer choices is complete; the others are requested again.
        """
        self._may_lack_choices = may_lack_choices
        self._whole = whole
        self._frames = ReadFrames(whole=whole, joins=joins_texts)
        self._state = AnswerState(expected_choices)
        self._asked_model = asked_model
        self._content_started = False
        self._usage_sum = UsageSum(expected_choices, choices_per_prompt)
        self._held: Frame = []
        self._halves = HalfCharacters()
        self._used_ids = used_ids
        self._calls: dict[int, ToolCallNormalizer] = {}
        self._in_messages: set[int] = set()
        """Choices with content in messages instead of deltas."""
        self._stop_sequences: dict[int, str] = {}
        """The stop string that ended each choice."""
        self.done = False
        """Whether [DONE] was received."""
        self.ended = False
        """Whether `read` has returned the last frame."""
        self.took_token = False
        """Whether the last `read` contained part of the answer. A chunk with only a role does not count."""
        self.took_prefill = False

    def read(self, payloads: list[bytes]) -> list[Frame]:
        """Returns the frames of payloads that arrived together: the first content alone, everything else in one frame.

        An unstreamed answer gets one frame with its texts joined. Prefill reports of 0 % and 100 % are held back until
        the next event, and the events at [DONE] join those before: each frame is a message on every hop.
        """
        frames = self._frames
        self.took_token = self.took_prefill = False
        texts: list[str] | None = None
        choice = 0
        for payload in payloads:
            if texts is not None and not self._halves.held and type(payload) is bytes:
                # The usual chunk: more text of the same choice.
                try:
                    usual = TEXT_CHUNKS.decode(payload).choices[0]
                except JSON_FAULTS:
                    usual = NO_TEXT
                if usual.delta.content and usual.index == choice:
                    texts.append(usual.delta.content)
                    continue
            if payload == DONE:
                frames.add(self._note_done())
                break
            if payload == _EMPTY:
                continue
            if self._asked_model:
                frames.add(self._check_model(payload))
            chunk = self._decode(payload)
            text = _plain_text(chunk)
            texts = self._take_text(chunk.choices[0].index, text) if text else None
            if texts is None:
                self._take(chunk, text)
            else:
                choice = chunk.choices[0].index
        return frames.take()

    def _note_done(self) -> Frame:
        """Records [DONE]; returns the last frame, or an empty one if the answer is not complete."""
        self.done = True
        self.ended = self._state.is_complete
        return self.finish() if self.ended else []

    def _take_text(self, choice: int, text: str) -> list[str] | None:
        """Adds a text of a choice; returns the list for its next texts. None: process it like any chunk."""
        if not (self._content_started or (self._whole and not self._held)):
            return None
        texts = self._frames.add_text(choice, text)
        if texts is not None:
            self._state.take(choice, None, has_content=True)
            self._content_started = self.took_token = True
        return texts

    def _take(self, chunk: Chunk, text: str) -> None:
        """Adds the events of a chunk. `text`: all that it has; empty: another chunk."""
        frames = self._frames
        try:
            if self._whole and text and self._is_added(chunk.choices[0].index, text):
                return
            events = self._events(chunk)
        except (ValueError, OverflowError) as error:  # a number or text that does not fit its field
            raise _malformed(error) from error
        if events and not self._content_started and has_content(events):
            self._content_started = True
            events = self._take_held() + events
            if not self._whole:
                frames.add_alone(events)
                return
        frames.add(events)

    def finish(self) -> Frame:
        """Returns the last frame at the end of the stream.

        Raises BACKEND_PROTOCOL_ERROR for an incomplete answer, TOOL_CALL_INVALID for a call without a name.
        """
        if self._may_lack_choices:
            self._state.leave_out_missing()
        self._state.close(has_figures=self._usage_sum.has_figures, is_done=self.done)
        try:
            rests = self._halves.rest()
            receipt = self._usage_sum.receipt()
        except (ValueError, OverflowError) as error:
            raise _malformed(error) from error
        ends = self._state.ends
        return [
            *(_text_event(index, text) for index, text in rests.items()),
            *self._ends_of_calls(),
            *(_doubt(index, word) for index, word in self._state.doubts.items()),
            *(_end_event(index, reason, self._stop_sequences.get(index, "")) for index, reason in ends.items()),
            *self._take_held(),
            event_pb2.InferenceEvent(usage=receipt.usage),
            event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt)),
        ]

    def _ends_of_calls(self) -> Frame:
        """Returns the events that complete the tool calls of each choice."""
        frame: Frame = []
        for index, calls in self._calls.items():
            if deltas := calls.end(cut_off=self._state.ends.get(index) in CUTTING):
                frame.append(event_pb2.InferenceEvent(delta=event_pb2.Delta(index=index, tool_calls=deltas)))
        return frame

    def _take_held(self) -> Frame:
        held, self._held = self._held, []
        return held

    def _check_model(self, payload: bytes) -> Frame:
        """Returns a warning if the first chunk names a different model than the request."""
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
            raise self._stated(payload, "an error without a message")
        try:
            chunk = CHUNKS.decode(payload)
            if self._halves.held:
                self._join_halves(chunk)
        except JSON_FAULTS:
            chunk, payload = self._decode_dialect(payload)
        if chunk.error is not None:
            raise stated_error(chunk.error, has_begun=self._content_started)
        is_bare = chunk.usage is None and chunk.timings is None and chunk.prompt_progress is None
        if is_bare and not chunk.choices and error_fields(payload)[0]:
            # An error without an envelope: {"object": "error", "message": ...} or {"detail": ...}.
            raise self._stated(payload)
        return chunk

    def _decode_dialect(self, payload: bytes) -> tuple[Chunk, bytes]:
        """Decodes a payload that deviates from OpenAI's format; returns the chunk, and the payload as plain JSON."""
        try:
            document = read_document(payload)
            chunk = read_dialect(document)
        except DIALECT_FAULTS as error:
            raise _malformed(error) from error
        self._join_halves(chunk)
        return chunk, json.dumps(document).encode()

    def _join_halves(self, chunk: Chunk) -> None:
        try:
            for choice in chunk.choices:
                self._halves.join(choice)
        except ValueError as error:
            raise _malformed(error) from error

    def _stated(self, payload: bytes, default: str = "") -> WeftError:
        message, kind = error_fields(payload)
        return stated_error(ErrorBody(message=message or default, type=kind), has_begun=self._content_started)

    def _is_added(self, choice: int, text: str) -> bool:
        """Adds a text to the last text in the present frame; returns whether it continues it."""
        frame = self._frames.present
        last = frame[-1].delta if frame else event_pb2.Delta()
        if not last.text or choice != last.index or last.finish_reason or last.logprobs or last.tool_calls:
            return False
        self._state.take(choice, None, has_content=True)
        last.text += text
        self.took_token = True
        return True

    def _events(self, chunk: Chunk) -> Frame:
        if chunk.usage is not None or chunk.timings is not None:
            self._usage_sum.add(chunk)
        events = [event for choice in chunk.choices if (event := self._delta_event(choice)) is not None]
        if events or (chunk.choices and (self._content_started or self._state.ends)):
            # After the answer has started, an empty chunk is a token without text.
            self.took_token = True
        if (progress := chunk.prompt_progress) is not None:
            self.took_prefill = True
            self._held.append(_progress_event(progress))
            at_an_end = progress.processed <= progress.cache or progress.processed >= progress.total
            if self._content_started or not at_an_end or len(self._held) > MAX_HELD_REPORTS:
                events += self._take_held()
        return events

    def _delta_event(self, choice: ChunkChoice) -> event_pb2.InferenceEvent | None:
        """Returns the event for a choice; None: it has no content, but may have a finish reason."""
        event = event_pb2.InferenceEvent()
        delta = event.delta
        if choice.delta is None and choice.text is None and bytes(choice.message) not in NOTHING:
            self._read_message(choice)
        text = choice.text if choice.delta is None else choice.delta.content
        if text:
            delta.text = text
        if choice.delta is not None:
            require_assistant(choice.delta.role)
            _copy_rare_content(choice.delta, delta)
            if choice.delta.tool_calls:
                delta.tool_calls.extend(self._normalized(choice.index, choice.delta.tool_calls))
        calls = () if choice.delta is None else choice.delta.tool_calls or ()
        has_call = bool(calls) and any(call.name or call.arguments for call in calls)
        has_content = has_call or is_content(delta)
        self._state.take(choice.index, choice.finish_reason, has_content=has_content, has_call=has_call)
        if stop_sequence := choice.stop_sequence:
            self._stop_sequences[choice.index] = stop_sequence
        if choice.logprobs is not None and choice.logprobs.content:
            delta.logprobs.extend(map(_token_logprob, choice.logprobs.content))
        if not text and not delta.ByteSize():
            return None
        delta.index = choice.index
        return event

    def _read_message(self, choice: ChunkChoice) -> None:
        """Reads the message of a choice as its delta, unless earlier deltas contained it."""
        if self._state.has_begun(choice.index) and choice.index not in self._in_messages:
            return
        self._in_messages.add(choice.index)
        try:
            choice.delta = read_delta(read_document(bytes(choice.message)))
            self._halves.join(choice)
        except DIALECT_FAULTS as error:
            raise _malformed(error) from error

    def _normalized(self, choice: int, calls: list[ChunkToolCall]) -> list[event_pb2.ToolCallDelta]:
        normalizer = self._calls.get(choice)
        if normalizer is None:
            normalizer = self._calls[choice] = ToolCallNormalizer(self._used_ids)
        return normalizer.take(calls)


def _plain_text(chunk: Chunk) -> str:
    """Returns the text of a chunk that contains only text of one choice; empty: another chunk."""
    if len(chunk.choices) != 1 or chunk.usage is not None or chunk.timings is not None or chunk.prompt_progress:
        return ""
    choice = chunk.choices[0]
    delta = choice.delta
    if delta is None or choice.finish_reason or choice.logprobs is not None:
        return ""
    if delta.role or delta.reasoning_content or delta.reasoning or delta.refusal or delta.tool_calls or delta.extra:
        return ""
    return delta.content or ""


def _text_event(index: int, text: str) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(delta=event_pb2.Delta(index=index, text=text))


def _end_event(index: int, reason: Finish, stop_sequence: str) -> event_pb2.InferenceEvent:
    delta = event_pb2.Delta(index=index, finish_reason=_FINISH_REASONS[reason])
    if reason is Finish.STOP:
        delta.stop_sequence = stop_sequence
    return event_pb2.InferenceEvent(delta=delta)


def _doubt(index: int, word: str) -> event_pb2.InferenceEvent:
    """Returns a warning about a choice with an unknown finish reason."""
    said = (
        f"ended choice {index} with finish_reason {quoted(word)}" if word else f"gave choice {index} no finish_reason"
    )
    message = f"the engine {said}; the answer may be incomplete"
    code = warning_pb2.WARNING_CODE_FINISH_REASON_UNKNOWN
    return event_pb2.InferenceEvent(warning=warning_pb2.Warning(code=code, message=message))


def _malformed(error: Exception) -> WeftError:
    return malformed("the engine sent an event that is not a chunk:", error)


def _progress_event(progress: PromptProgress) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(
        progress=event_pb2.Progress(
            prompt_tokens=progress.total, processed_tokens=progress.processed, cached_tokens=progress.cache
        )
    )


def _copy_rare_content(source: ChunkDelta, delta: event_pb2.Delta) -> None:
    thinking = source.reasoning_content or source.reasoning
    if thinking:
        delta.reasoning = thinking
    if source.refusal:
        delta.refusal = source.refusal
    if source.extra and (extra := as_message(source.extra)) is not None:
        delta.extra_fields.CopyFrom(extra)


def _token_logprob(token: ChunkToken) -> event_pb2.TokenLogprob:
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
