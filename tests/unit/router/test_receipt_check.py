"""Receipts that add up, and those that do not."""

from collections.abc import Callable

import pytest

from router_svc.receipt_counts import ReceiptCounts
from router_svc.router_metrics import ReceiptFault, receipt_faults
from weft.api.common.v1 import error_reason_pb2, receipt_pb2

DIED = error_reason_pb2.ERROR_REASON_SERVER_DIED


def _receipt(outcome: "receipt_pb2.Outcome.ValueType" = receipt_pb2.OUTCOME_COMPLETED) -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt(outcome=outcome)
    receipt.attempts.add(runner="a")
    receipt.queue_wait.FromMilliseconds(100)
    receipt.load_wait.FromMilliseconds(200)
    receipt.time_to_first_token.FromMilliseconds(400)
    receipt.total_time.FromMilliseconds(900)
    receipt.usage.prompt_tokens, receipt.usage.cached_prompt_tokens = 10, 10
    receipt.usage.completion_tokens, receipt.usage.reasoning_tokens = 5, 5
    return receipt


def _failed() -> receipt_pb2.Receipt:
    receipt = _receipt(receipt_pb2.OUTCOME_FAILED)
    receipt.reason = receipt.attempts[0].reason = DIED
    return receipt


def _rejected() -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_REJECTED, reason=DIED)
    receipt.queue_wait.FromMilliseconds(100)
    receipt.total_time.FromMilliseconds(100)
    return receipt


@pytest.mark.parametrize("receipt", [_receipt(), _failed(), _rejected()], ids=["completed", "failed", "rejected"])
def test_consistent_receipt_has_no_fault(receipt: receipt_pb2.Receipt) -> None:
    assert list(receipt_faults(ReceiptCounts(receipt))) == []


def test_receipt_of_a_failover_is_consistent() -> None:
    receipt = _receipt()
    receipt.attempts[0].reason = DIED
    receipt.attempts.add(runner="b")
    assert list(receipt_faults(ReceiptCounts(receipt))) == []


def test_rounding_is_not_a_fault() -> None:
    receipt = _receipt()
    receipt.total_time.FromMicroseconds(399_999)
    assert list(receipt_faults(ReceiptCounts(receipt))) == []


def _spoilt(change: Callable[[receipt_pb2.Receipt], object], receipt: receipt_pb2.Receipt) -> receipt_pb2.Receipt:
    change(receipt)
    return receipt


PLANTED = {
    ReceiptFault.WAITS_EXCEED_TOTAL: _spoilt(lambda each: each.queue_wait.FromMilliseconds(120), _rejected()),
    ReceiptFault.FIRST_TOKEN_AFTER_END: _spoilt(lambda each: each.time_to_first_token.FromSeconds(1), _receipt()),
    ReceiptFault.FIRST_TOKEN_BEFORE_GRANT: _spoilt(
        lambda each: each.time_to_first_token.FromMilliseconds(250), _receipt()
    ),
    ReceiptFault.CACHED_EXCEEDS_PROMPT: _spoilt(
        lambda each: setattr(each.usage, "cached_prompt_tokens", 11), _receipt()
    ),
    ReceiptFault.REASONING_EXCEEDS_COMPLETION: _spoilt(
        lambda each: setattr(each.usage, "reasoning_tokens", 6), _receipt()
    ),
    ReceiptFault.COMPLETED_WITHOUT_ATTEMPT: _spoilt(lambda each: each.ClearField("attempts"), _receipt()),
    ReceiptFault.COMPLETED_WITH_REASON: _spoilt(lambda each: setattr(each, "reason", DIED), _receipt()),
    ReceiptFault.FAILED_WITHOUT_REASON: _spoilt(lambda each: each.ClearField("reason"), _failed()),
    ReceiptFault.REJECTED_AFTER_ATTEMPT: _spoilt(lambda each: each.attempts.add(runner="a"), _rejected()),
}
"""A receipt for each fault that has this one alone."""


@pytest.mark.parametrize("fault", ReceiptFault)
def test_each_planted_fault_is_detected(fault: ReceiptFault) -> None:
    assert list(receipt_faults(ReceiptCounts(PLANTED[fault]))) == [fault]
