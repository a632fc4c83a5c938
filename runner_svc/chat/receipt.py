"""The receipt of an answer over all engine turns: usage, tools, signals, warnings."""

from runner_svc.request_records import RequestRecord
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, signal_pb2, timing_pb2, usage_pb2, warning_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.token_counts import TokenCounter
from weft.kernel.errors.error_tree import COMPLETION_TOKENS, PROMPT_ESTIMATED, PROMPT_TOKENS, WeftError

MAX_NOTED = 64
"""Maximum number of signals, and of warnings, in a receipt."""
MAX_SIGNAL_BYTES = 256 * 1024
"""Maximum total size of these signals, which are stored in the request's record. Events are not limited."""


class AnswerReceipt:
    """Sums up turns by the engine's own token counts; for an unfinished turn, by what was received."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._usage = usage_pb2.Usage()
        self._compute_nanoseconds: int | None = None
        """None: unknown for every turn."""
        self._decode_seconds = 0.0
        self._decoded_tokens = 0
        self._timings: timing_pb2.EngineTimings | None = None
        """Times that are known for every turn so far; None: no turn has ended."""
        self._restored = receipt_pb2.RestoredPrompt()
        self._warnings: list[warning_pb2.Warning] = []
        self._tool_runs = 0
        self._repaired = self._retried = 0
        self._signal_bytes = 0

    @property
    def completion_tokens(self) -> int:
        """Completion tokens so far."""
        return self._usage.completion_tokens

    def add_turn(self, turn: receipt_pb2.Receipt) -> None:
        """Adds the engine's figures of a turn. Every turn's prompt counts, including its cached tokens."""
        self._add_usage(turn.usage)
        if turn.HasField("gpu_time"):
            self._compute_nanoseconds = (self._compute_nanoseconds or 0) + turn.gpu_time.ToNanoseconds()
        if turn.tokens_per_second > 0:
            self._decoded_tokens += turn.usage.completion_tokens
            self._decode_seconds += turn.usage.completion_tokens / turn.tokens_per_second
        self._add_timings(turn.engine_timings)
        self._repaired += turn.repaired_call_count
        self._retried += turn.retried_call_count
        if turn.HasField("restored_prompt"):
            saved = self._restored.saved_time.ToNanoseconds() + turn.restored_prompt.saved_time.ToNanoseconds()
            self._restored.source = turn.restored_prompt.source
            self._restored.token_count += turn.restored_prompt.token_count
            if saved:
                self._restored.saved_time.FromNanoseconds(saved)

    def add_unfinished_turn(self, seen: TokenCounter) -> None:
        """Adds the estimate for a turn that ended before the engine reported its figures."""
        self._add_usage(seen.usage)
        self._add_timings(timing_pb2.EngineTimings())

    def usage_so_far(self) -> Frame:
        """Returns an event with the counts so far, to send before the error that ends the answer."""
        return [event_pb2.InferenceEvent(usage=self._usage)]

    def with_usage(self, error: WeftError) -> WeftError:
        """Returns the error that ends the answer, with the counts so far in its metadata."""
        error.metadata |= counts_of(self._usage)
        return error

    def add_tool_runs(self, count: int) -> None:
        """Adds executed tool calls."""
        self._tool_runs += count

    def note_signal(self, signal: signal_pb2.Signal) -> event_pb2.InferenceEvent:
        """Records a signal; returns its event."""
        self._signal_bytes += signal.ByteSize()
        if len(self._record.signals) < MAX_NOTED and self._signal_bytes <= MAX_SIGNAL_BYTES:
            self._record.signals.append(signal)
        return event_pb2.InferenceEvent(signal=signal)

    def note_warning(self, warning: warning_pb2.Warning) -> event_pb2.InferenceEvent | None:
        """Records a warning; returns its event, None if it was sent before."""
        if warning in self._warnings:
            return None
        if len(self._warnings) < MAX_NOTED:
            self._warnings.append(warning)
        return event_pb2.InferenceEvent(warning=warning)

    def fill(self, receipt: receipt_pb2.Receipt) -> None:
        """Writes warnings, signals and the number of tool runs to a receipt."""
        if self._warnings:
            receipt.warnings.extend([warning for warning in self._warnings if warning not in receipt.warnings])
        if self._record.signals:
            receipt.signals.extend(self._record.signals)
        receipt.tool_run_count = self._tool_runs

    def end(self, *, awaits_tool_results: bool = False) -> Frame:
        """Returns the last events of the answer."""
        receipt = receipt_pb2.Receipt(awaits_tool_results=awaits_tool_results)
        self.write(receipt)
        self.fill(receipt)
        return [
            event_pb2.InferenceEvent(usage=self._usage),
            event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt)),
        ]

    def write(self, receipt: receipt_pb2.Receipt) -> None:
        """Writes the engine's figures of all turns to a receipt."""
        receipt.usage.CopyFrom(self._usage)
        receipt.repaired_call_count, receipt.retried_call_count = self._repaired, self._retried
        if self._compute_nanoseconds is not None:
            receipt.gpu_time.FromNanoseconds(self._compute_nanoseconds)
        if self._decode_seconds > 0:
            receipt.tokens_per_second = self._decoded_tokens / self._decode_seconds
        if self._timings is not None:
            receipt.engine_timings.CopyFrom(self._timings)
        if self._restored.token_count:
            receipt.restored_prompt.CopyFrom(self._restored)

    def _add_usage(self, usage: usage_pb2.Usage) -> None:
        total = self._usage
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens += usage.completion_tokens
        total.cached_prompt_tokens += usage.cached_prompt_tokens
        total.reasoning_tokens += usage.reasoning_tokens
        total.cache_write_prompt_tokens += usage.cache_write_prompt_tokens
        total.prompt_estimated |= usage.prompt_estimated

    def _add_timings(self, turn: timing_pb2.EngineTimings) -> None:
        """Adds the times of a turn. A total is known only if every turn has that time."""
        if self._timings is None:
            self._timings = timing_pb2.EngineTimings()
            self._timings.CopyFrom(turn)
            return
        for field, before in self._timings.ListFields():
            if turn.HasField(field.name):  # type: ignore[arg-type]  # a name of its own fields
                before.FromNanoseconds(before.ToNanoseconds() + getattr(turn, field.name).ToNanoseconds())
            else:
                self._timings.ClearField(field.name)  # type: ignore[arg-type]


def counts_of(usage: usage_pb2.Usage) -> dict[str, str]:
    """Returns the counts of an answer that an error ends, as the error's metadata."""
    counts = {PROMPT_TOKENS: str(usage.prompt_tokens), COMPLETION_TOKENS: str(usage.completion_tokens)}
    return counts | ({PROMPT_ESTIMATED: "true"} if usage.prompt_estimated else {})


def warning(code: "warning_pb2.WarningCode.ValueType", message: str) -> warning_pb2.Warning:
    """Returns a warning that concerns no request field."""
    return warning_pb2.Warning(code=code, message=message[:500])


MIN_CHECKED_WORDS = 512
"""Shorter prompts are not checked: they fit every context in use, and templates may shorten them."""
MIN_COUNTED_SHARE = 0.8
"""Minimum number of counted tokens per word of the prompt. A word is at least one token, so a complete prompt has at
least 1 and usually 1.3; below this at least a fifth is missing. Text without spaces has few words and causes no
warning."""


def dropped_prompt(payload: GenerationPayload, prompt_tokens: int) -> str:
    """Returns the warning for a prompt of which the engine counted too few tokens; empty: no warning.

    `prompt_tokens` includes cached ones; 0: the engine reports no count.
    """
    if not prompt_tokens or payload.ByteSize() < MIN_CHECKED_WORDS:
        return ""
    words = _word_count(payload)
    if words < MIN_CHECKED_WORDS or prompt_tokens >= MIN_COUNTED_SHARE * words:
        return ""
    return (
        f"the engine processed {prompt_tokens} tokens of a prompt of {words} words, so it truncated the prompt; "
        "use a larger context or a shorter prompt"
    )


def must_call(payload: GenerationPayload) -> bool:
    """Whether a request requires a call."""
    if not isinstance(payload, chat_pb2.ChatPayload):
        return False
    choice = payload.tool_choice
    return bool(payload.tools) and (
        choice.WhichOneof("kind") == "function_name" or choice.mode == chat_pb2.ToolChoice.MODE_REQUIRED
    )


def _word_count(payload: GenerationPayload) -> int:
    """Returns the number of words in the prompt, a lower bound of its tokens."""
    if isinstance(payload, chat_pb2.ChatPayload):
        return sum(len(part.text.split()) for message in payload.messages for part in message.content)
    return sum(len(prompt.tokens.ids) or len(prompt.text.split()) for prompt in payload.prompts)
