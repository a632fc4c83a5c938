"""The check whether the figures of a receipt agree with each other. Pure.

A receipt that does not add up is a fault of weft or of an engine, never of its request: it is counted.
"""

from enum import StrEnum

from google.protobuf.duration_pb2 import Duration

from weft.api.common.v1 import receipt_pb2

TOLERANCE_SECONDS = 0.002
"""Each duration of a receipt is rounded separately."""


class ReceiptFault(StrEnum):
    """What is wrong with a receipt."""

    WAITS_EXCEED_TOTAL = "waits_exceed_total"
    """Queue wait and load wait together are longer than the request was."""
    FIRST_TOKEN_AFTER_END = "first_token_after_end"  # noqa: S105 - a name
    """The first content came after the end."""
    FIRST_TOKEN_BEFORE_GRANT = "first_token_before_grant"  # noqa: S105 - a name
    """The first content came before the last attempt began."""
    CACHED_EXCEEDS_PROMPT = "cached_exceeds_prompt"
    """More prompt tokens came from the cache than the prompt has."""
    REASONING_EXCEEDS_COMPLETION = "reasoning_exceeds_completion"
    """There are more tokens of reasoning than of the answer, which includes them."""
    COMPLETED_WITHOUT_ATTEMPT = "completed_without_attempt"
    """It completed, and no runner worked on it."""
    COMPLETED_WITH_REASON = "completed_with_reason"
    """It completed, and it or its last attempt has the reason of a failure."""
    FAILED_WITHOUT_REASON = "failed_without_reason"
    """It did not complete, and has no reason."""
    REJECTED_AFTER_ATTEMPT = "rejected_after_attempt"
    """It was refused before any runner worked on it, and a runner did."""


def receipt_faults(receipt: receipt_pb2.Receipt) -> list[ReceiptFault]:
    """Returns what does not add up in the receipt of a request that has ended; nothing where all of it does."""
    found: list[ReceiptFault] = []
    _add_faults_of_times(receipt, found)
    usage = receipt.usage
    if usage.cached_prompt_tokens > usage.prompt_tokens:
        found.append(ReceiptFault.CACHED_EXCEEDS_PROMPT)
    if usage.reasoning_tokens > usage.completion_tokens:
        found.append(ReceiptFault.REASONING_EXCEEDS_COMPLETION)
    _add_faults_of_end(receipt, found)
    return found


def _add_faults_of_times(receipt: receipt_pb2.Receipt, found: list[ReceiptFault]) -> None:
    waits = _seconds(receipt.queue_wait) + _seconds(receipt.load_wait)
    first = _seconds(receipt.time_to_first_token) if receipt.HasField("time_to_first_token") else None
    if receipt.HasField("total_time"):
        latest = _seconds(receipt.total_time) + TOLERANCE_SECONDS
        if waits > latest:
            found.append(ReceiptFault.WAITS_EXCEED_TOTAL)
        if first is not None and first > latest:
            found.append(ReceiptFault.FIRST_TOKEN_AFTER_END)
    if first is not None and first < waits - TOLERANCE_SECONDS:
        found.append(ReceiptFault.FIRST_TOKEN_BEFORE_GRANT)


def _add_faults_of_end(receipt: receipt_pb2.Receipt, found: list[ReceiptFault]) -> None:
    attempts = receipt.attempts
    match receipt.outcome:
        case receipt_pb2.OUTCOME_COMPLETED:
            if not attempts:
                found.append(ReceiptFault.COMPLETED_WITHOUT_ATTEMPT)
            if receipt.reason or (attempts and attempts[-1].reason):
                found.append(ReceiptFault.COMPLETED_WITH_REASON)
        case receipt_pb2.OUTCOME_REJECTED | receipt_pb2.OUTCOME_FAILED | receipt_pb2.OUTCOME_CANCELLED:
            if not receipt.reason:
                found.append(ReceiptFault.FAILED_WITHOUT_REASON)
            if receipt.outcome == receipt_pb2.OUTCOME_REJECTED and attempts:
                found.append(ReceiptFault.REJECTED_AFTER_ATTEMPT)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
