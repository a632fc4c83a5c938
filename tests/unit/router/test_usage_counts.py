"""What is counted of receipts, in which rows, and of requests without one."""

from typing import Any

import pytest
from kit.fleet import model_view
from kit.request_endings import ending

from router_svc.policy.usage_rows import OTHER, HourRows, UsageKey
from router_svc.receipt_counts import MAX_COUNTED_TOKENS, ReceiptCounts
from router_svc.usage import MAX_COUNTED_MILLIJOULES, UsageRecorder, UsageSums, usage_of
from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft_testing.fake_clock import FakeClock

QWEN = model_view(pool="chat")
VIEW = FleetView(1, {}, {"qwen": QWEN})


def _key(tenant: str, key: str = "local", model: str = "qwen") -> UsageKey:
    return UsageKey(1, tenant, key, model, "")


def _request(**changes: Any) -> PlacementRequest:
    fields: dict[str, Any] = {"request_id": "r", "tenant": "ann", "model": "qwen", "caller": "key:abc"}
    return PlacementRequest(operation=Operation.CHAT, **(fields | changes))


def _receipt(**fields: Any) -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, model="qwen", **fields)
    receipt.attempts.add(runner="titan", model="qwen")
    return receipt


def _usage_of(receipt: receipt_pb2.Receipt) -> UsageSums:
    return usage_of(ReceiptCounts(receipt))


def _recorder(max_rows: int = 10) -> UsageRecorder:
    recorder = UsageRecorder(FakeClock())
    recorder.keep(max_rows)
    return recorder


def _only(recorder: UsageRecorder) -> tuple[UsageKey, UsageSums]:
    ((key, sums),) = recorder.take().items()
    return key, sums


def test_hourly_rows_are_bounded_and_tenants_keep_their_totals() -> None:
    rows = HourRows(2)
    assert [rows.row_of(_key("ann", f"key:{number}")) for number in range(4)] == [
        _key("ann", "key:0"),
        _key("ann", "key:1"),
        *2 * [_key("ann", OTHER, OTHER)],
    ]
    assert rows.row_of(_key("ann", "key:0")) == _key("ann", "key:0"), "a row that exists stays"
    assert rows.row_of(_key("bob")) == _key("bob", OTHER, OTHER)
    assert rows.row_of(_key("cid")) == _key(OTHER, OTHER, OTHER)
    made = {rows.row_of(_key(f"t{number}", f"key:{number}")) for number in range(1_000)}
    assert made == {_key(OTHER, OTHER, OTHER)}


def test_rows_divided_by_agent_are_bounded_and_take_no_others_place() -> None:
    rows, plain = HourRows(2), _key("ann")
    divided = [plain._replace(program="codex", purpose=purpose) for purpose in ("turn", "title", "search")]
    assert [rows.row_of(key) for key in divided] == [*divided[:2], plain]
    assert rows.row_of(_key("bob")) == _key("bob"), "two rows that are not divided"
    assert rows.row_of(_key("cid", "key:c")) == _key("cid", OTHER, OTHER)
    again = HourRows(2, [*divided[:2], plain])
    assert again.row_of(divided[2]) == plain
    assert again.row_of(_key("bob")) == _key("bob")


def test_request_is_counted_by_what_it_says_of_its_agent_and_unknown_words_as_one() -> None:
    recorder = _recorder()
    for labels in ({"program=codex", "agent=sub", "purpose=turn", "team=a"}, {"program=made=up", "purpose="}, set()):
        recorder.note_end(ending(_request(labels=frozenset(labels)), receipt=_receipt(), view=VIEW))
    assert {(key.program, key.agent, key.purpose) for key in recorder.take()} == {
        ("codex", "sub", "turn"),
        ("other", "", ""),
        ("", "", ""),
    }


def test_existing_rows_count_against_the_limit() -> None:
    rows = HourRows(1, [_key("ann")])
    assert rows.row_of(_key("ann")) == _key("ann")
    assert rows.row_of(_key("ann", "key:2")) == _key("ann", OTHER, OTHER)


def test_values_missing_from_a_receipt_are_counted_as_unknown_and_never_as_zero() -> None:
    assert _usage_of(_receipt()) == UsageSums(completed_count=1, unknown_tokens_count=1, unknown_gpu_count=1)
    known = _receipt()
    known.usage.prompt_tokens, known.usage.completion_tokens, known.usage.cached_prompt_tokens = 7, 3, 5
    known.gpu_time.FromMilliseconds(1_500)
    assert _usage_of(known) == UsageSums(
        completed_count=1, prompt_tokens=7, cached_prompt_tokens=5, completion_tokens=3, gpu_nanoseconds=1_500_000_000
    )
    refused = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_REJECTED)
    assert _usage_of(refused) == UsageSums(rejected_count=1), "nobody worked on it: its zeros are known"


def test_measured_device_time_takes_precedence_over_the_engine_report() -> None:
    receipt = _receipt()
    receipt.gpu_time.FromMilliseconds(1_500)
    receipt.device_usage.gap = receipt_pb2.DeviceUsage.GAP_NOT_SAMPLED
    assert _usage_of(receipt)["gpu_nanoseconds"] == 1_500_000_000
    receipt.device_usage.device_time.FromMilliseconds(400)
    assert _usage_of(receipt)["gpu_nanoseconds"] == 400_000_000


def test_energy_is_counted_if_measured_together_with_the_number_of_measurements() -> None:
    receipt = _receipt()
    assert "measured_energy_count" not in _usage_of(receipt)
    receipt.device_usage.energy_millijoules = 0
    assert (
        _usage_of(receipt)["measured_energy_count"],
        _usage_of(receipt)["energy_millijoules"],
    ) == (1, 0)
    receipt.device_usage.energy_millijoules = 12_000
    assert _usage_of(receipt)["energy_millijoules"] == 12_000
    receipt.device_usage.energy_millijoules = 2**62
    assert _usage_of(receipt)["energy_millijoules"] == MAX_COUNTED_MILLIJOULES, "no engine is believed without a bound"


def test_remote_requests_are_counted_with_their_tokens() -> None:
    receipt = _receipt(left_premises=True)
    receipt.usage.prompt_tokens, receipt.usage.completion_tokens = 7, 3
    sums = _usage_of(receipt)
    assert (sums["remote_count"], sums["remote_prompt_tokens"], sums["remote_completion_tokens"]) == (1, 7, 3)


def test_absurd_engine_figures_are_bounded() -> None:
    receipt = _receipt()
    receipt.usage.prompt_tokens, receipt.usage.completion_tokens = 2**62, -5
    sums = _usage_of(receipt)
    assert (sums["prompt_tokens"], sums["completion_tokens"]) == (MAX_COUNTED_TOKENS, 0)


def test_no_usage_is_counted_before_a_store_is_attached() -> None:
    recorder = UsageRecorder(FakeClock())
    recorder.note_end(ending(_request(), receipt=_receipt(), view=VIEW))
    assert recorder.is_empty


def test_task_attempt_is_not_counted_by_the_usage_recorder() -> None:
    recorder = _recorder()
    recorder.note_end(ending(_request(task_id="task-1"), receipt=_receipt(), view=VIEW))
    recorder.note_end(ending(_request(task_id="task-1"), view=VIEW, refusal=WeftError(Reason.RATE_LIMIT_EXCEEDED, "x")))
    assert recorder.is_empty


def test_unknown_model_names_share_one_row() -> None:
    recorder = _recorder()
    for number in range(3):
        recorder.note_end(ending(_request(model=f"made-up-{number}"), view=VIEW, last_error=Reason.MODEL_NOT_FOUND))
    key, sums = _only(recorder)
    assert (key.model, key.asked, sums) == ("unknown", "", UsageSums(rejected_count=3))


def test_aliases_and_pools_are_counted_beside_the_answering_model() -> None:
    recorder = _recorder()
    recorder.note_end(ending(_request(model="chat", asked_model="gpt-4"), receipt=_receipt(), view=VIEW))
    recorder.note_end(ending(_request(model="chat"), receipt=_receipt(), view=VIEW))
    recorder.note_end(ending(_request(), receipt=_receipt(), view=VIEW))
    assert sorted((key.model, key.asked) for key in recorder.take()) == [
        ("qwen", ""),
        ("qwen", "chat"),
        ("qwen", "gpt-4"),
    ]


@pytest.mark.parametrize(
    ("end", "counted"),
    [
        ({}, UsageSums(unknown_count=1)),
        ({"was_placed": True}, UsageSums(unknown_count=1, unknown_tokens_count=1, unknown_gpu_count=1)),
        ({"last_error": Reason.QUEUE_FULL}, UsageSums(rejected_count=1)),
        (
            {"last_error": Reason.NO_SLOT_AVAILABLE, "was_placed": True},
            UsageSums(failed_count=1, unknown_tokens_count=1, unknown_gpu_count=1),
        ),
        ({"last_error": Reason.CANCELLED}, UsageSums(cancelled_count=1)),
        (
            {"last_error": Reason.SERVICE_UNAVAILABLE, "was_placed": True, "is_closing": True},
            UsageSums(unknown_count=1, unknown_tokens_count=1, unknown_gpu_count=1),
        ),
    ],
)
def test_request_without_a_receipt_is_counted_once(end: dict[str, Any], counted: UsageSums) -> None:
    recorder = _recorder()
    recorder.note_end(ending(_request(), view=VIEW, **end))
    assert _only(recorder)[1] == counted


def test_request_placed_again_is_counted_at_its_end() -> None:
    recorder = _recorder()
    recorder.note_end(ending(_request(), view=VIEW, last_error=Reason.SERVICE_UNAVAILABLE))
    recorder.note_end(ending(_request(), view=VIEW, last_error=Reason.SERVICE_UNAVAILABLE, is_closing=True))
    assert recorder.is_empty


def test_failed_write_is_counted_again() -> None:
    recorder = _recorder()
    recorder.note_end(ending(_request(), receipt=_receipt(), view=VIEW))
    taken = recorder.take()
    recorder.note_end(ending(_request(), receipt=_receipt(), view=VIEW))
    recorder.give_back(taken)
    assert _only(recorder)[1]["completed_count"] == 2


def test_estimated_prompt_counts_as_unknown_beside_its_tokens() -> None:
    receipt = _receipt(usage=usage_pb2.Usage(prompt_tokens=39, completion_tokens=2, prompt_estimated=True))
    sums = _usage_of(receipt)
    assert (sums["prompt_tokens"], sums["completion_tokens"], sums["unknown_tokens_count"]) == (39, 2, 1)
