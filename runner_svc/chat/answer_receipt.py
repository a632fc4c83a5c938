"""What an answer cost and what happened on the way, over all the turns of the engine."""

from runner_svc.chat.seen_tokens import SeenTokens
from runner_svc.records import RequestRecord
from weft.api.common.v1 import event_pb2, receipt_pb2, signal_pb2, usage_pb2, warning_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors import COMPLETION_TOKENS, PROMPT_TOKENS, WeftError

MAX_NOTED = 64
"""Signals, and warnings, that a receipt holds."""
MAX_SIGNAL_BYTES = 256 * 1024
"""Of these signals together: they are kept with the request's record after its end. What is told as events has no part
in this."""


class AnswerReceipt:
    """Adds up. Token counts are the engine's own; a turn that was ended early counts as far as it was seen."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._usage = usage_pb2.Usage()
        self._compute_nanoseconds: int | None = None
        """None: no turn's is known."""
        self._decode_seconds = 0.0
        self._decoded_tokens = 0
        self._warnings: list[warning_pb2.Warning] = []
        self._tool_runs = 0
        self._signal_bytes = 0

    @property
    def completion_tokens(self) -> int:
        """Generated so far."""
        return self._usage.completion_tokens

    def add_turn(self, turn: receipt_pb2.Receipt) -> None:
        """The engine's own figures of a turn. The prompt of each turn counts, and so do its cached tokens."""
        self._add_usage(turn.usage)
        if turn.HasField("gpu_time"):
            self._compute_nanoseconds = (self._compute_nanoseconds or 0) + turn.gpu_time.ToNanoseconds()
        if turn.tokens_per_second > 0:
            self._decoded_tokens += turn.usage.completion_tokens
            self._decode_seconds += turn.usage.completion_tokens / turn.tokens_per_second

    def add_unfinished_turn(self, seen: SeenTokens) -> None:
        """What was seen of a turn that was ended before the engine told its figures."""
        self._add_usage(seen.usage)

    def usage_so_far(self) -> Frame:
        """The event that tells the counts so far, before the error that ends the answer."""
        return [event_pb2.InferenceEvent(usage=self._usage)]

    def with_usage(self, error: WeftError) -> WeftError:
        """The error that ends the answer, with the counts so far among its facts."""
        error.metadata[PROMPT_TOKENS] = str(self._usage.prompt_tokens)
        error.metadata[COMPLETION_TOKENS] = str(self._usage.completion_tokens)
        return error

    def add_tool_runs(self, count: int) -> None:
        """So many tools were run."""
        self._tool_runs += count

    def note_signal(self, signal: signal_pb2.Signal) -> event_pb2.InferenceEvent:
        """The model raised a signal; the event that tells it."""
        self._signal_bytes += signal.ByteSize()
        if len(self._record.signals) < MAX_NOTED and self._signal_bytes <= MAX_SIGNAL_BYTES:
            self._record.signals.append(signal)
        return event_pb2.InferenceEvent(signal=signal)

    def note_warning(self, warning: warning_pb2.Warning) -> event_pb2.InferenceEvent | None:
        """The event that tells a warning; None if it was told before."""
        if warning in self._warnings:
            return None
        if len(self._warnings) < MAX_NOTED:
            self._warnings.append(warning)
        return event_pb2.InferenceEvent(warning=warning)

    def fill(self, receipt: receipt_pb2.Receipt) -> None:
        """Put into a receipt what the engine knows nothing of."""
        noted = [warning for warning in self._warnings if warning not in receipt.warnings]
        receipt.warnings.extend(noted)
        receipt.signals.extend(self._record.signals)
        receipt.tool_run_count = self._tool_runs

    def end(self) -> Frame:
        """The last events."""
        receipt = receipt_pb2.Receipt(usage=self._usage)
        if self._compute_nanoseconds is not None:
            receipt.gpu_time.FromNanoseconds(self._compute_nanoseconds)
        if self._decode_seconds > 0:
            receipt.tokens_per_second = self._decoded_tokens / self._decode_seconds
        self.fill(receipt)
        return [
            event_pb2.InferenceEvent(usage=self._usage),
            event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt)),
        ]

    def _add_usage(self, usage: usage_pb2.Usage) -> None:
        total = self._usage
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens += usage.completion_tokens
        total.cached_prompt_tokens += usage.cached_prompt_tokens
        total.reasoning_tokens += usage.reasoning_tokens


def warning(code: "warning_pb2.WarningCode.ValueType", message: str) -> warning_pb2.Warning:
    """A warning that is about no field of the request."""
    return warning_pb2.Warning(code=code, message=message[:500])
