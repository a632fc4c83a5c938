"""The figures of a receipt that count, read once for all that count them."""

from dataclasses import dataclass, field

from weft.api.common.v1 import receipt_pb2
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.timestamps import seconds_of

MAX_COUNTED_TOKENS = 10**10
"""Maximum counted tokens per request, as engines' reports are not trusted without a bound."""


@dataclass(slots=True)
class ReceiptCounts:
    """A receipt with its times in seconds and its tokens, bounded to 0..MAX_COUNTED_TOKENS."""

    receipt: receipt_pb2.Receipt
    priority: Priority = Priority.NORMAL
    has_usage: bool = field(init=False)
    prompt_tokens: int = field(init=False)
    cached_prompt_tokens: int = field(init=False)
    completion_tokens: int = field(init=False)
    retries: int = field(init=False)
    """Attempts beyond the first."""
    queue_wait: float = field(init=False)
    load_wait: float = field(init=False)
    first_content: float | None = field(init=False)
    """From its arrival; None: there was none."""
    total: float | None = field(init=False)
    """None: unknown."""
    first_token: float | None = field(init=False, default=None)
    """The time to the first token, and ..."""
    per_token: float | None = field(init=False, default=None)
    """... per later token, that a completed request counts; None: it does not.

    Nobody waits for tasks in idle capacity, and a retried task has the tokens of all its attempts.
    """

    def __post_init__(self) -> None:
        receipt, usage = self.receipt, self.receipt.usage
        self.has_usage = receipt.HasField("usage")
        self.prompt_tokens = counted_tokens(usage.prompt_tokens)
        self.cached_prompt_tokens = counted_tokens(usage.cached_prompt_tokens)
        self.completion_tokens = counted_tokens(usage.completion_tokens)
        self.retries = len(receipt.attempts) - 1 if receipt.attempts else 0
        self.queue_wait, self.load_wait = seconds_of(receipt.queue_wait), seconds_of(receipt.load_wait)
        first = seconds_of(receipt.time_to_first_token) if receipt.HasField("time_to_first_token") else None
        total = seconds_of(receipt.total_time)
        self.first_content, self.total = first, total if receipt.HasField("total_time") else None
        if first is None or receipt.outcome != receipt_pb2.OUTCOME_COMPLETED:
            return
        if self.priority is not Priority.DURABLE:
            self.first_token = first
        later = usage.completion_tokens - 1
        if later > 0 and total >= first and not (receipt.task_id and self.retries):
            self.per_token = (total - first) / later


def counted_tokens(reported: int) -> int:
    """Returns a token count reported by an engine, bounded to 0..MAX_COUNTED_TOKENS."""
    return reported if 0 <= reported <= MAX_COUNTED_TOKENS else max(0, min(reported, MAX_COUNTED_TOKENS))
