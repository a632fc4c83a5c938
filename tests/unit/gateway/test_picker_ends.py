"""How a request of the lane ended, by the proxy's log and the runner's report."""

import pytest
from google.protobuf.any_pb2 import Any

from gateway.picker.ends import ProxySight, disagreements, has_begun, seen_end, sight_of, was_never_reached
from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.api.envoy.v1 import access_log_pb2, token_usage_pb2
from weft.kernel.lane_names import DESTINATION_NAMESPACE, DESTINATION_SERVED, PLACED
from weft.kernel.reasons import Reason

USAGE = usage_pb2.Usage(prompt_tokens=11, completion_tokens=6)


def sight(**fields: object) -> ProxySight:
    return ProxySight(**{"request_id": "r", "status": 200, "endpoint": "10.0.0.1:1", "answer_bytes": 9, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (sight(usage=USAGE), Reason.UNSPECIFIED),
        (sight(), Reason.WORKER_LOST),
        (sight(flags=("upstream_protocol_error",)), Reason.WORKER_LOST),
        (sight(flags=("upstream_remote_reset",)), Reason.WORKER_LOST),
        (sight(flags=("downstream_connection_termination",)), Reason.CANCELLED),
        (sight(flags=("downstream_connection_termination",), usage=USAGE), Reason.CANCELLED),
        (sight(flags=("stream_idle_timeout",)), Reason.DEADLINE_EXCEEDED),
        (sight(status=503, flags=("upstream_connection_failure",), endpoint=""), Reason.CONNECT_FAILED),
        (sight(status=503, reason=Reason.NO_SLOT_AVAILABLE), Reason.NO_SLOT_AVAILABLE),
        (sight(status=500), Reason.BACKEND_ERROR),
        (sight(status=400), Reason.BACKEND_REJECTED),
        (sight(status=0, endpoint=""), Reason.WORKER_LOST),
    ],
)
def test_the_log_alone_tells_how_a_request_ended(seen: ProxySight, reason: Reason) -> None:
    assert seen_end(seen, shows_usage=True).reason is reason


def test_a_clean_end_of_an_answer_without_usage_is_a_cut_off_answer_where_usage_was_to_come() -> None:
    end = seen_end(sight(), shows_usage=True)
    assert (end.reason, end.is_known) == (Reason.WORKER_LOST, True)


def test_a_clean_end_of_an_answer_that_states_no_usage_is_not_known_to_be_complete() -> None:
    assert not seen_end(sight(), shows_usage=False).is_known


def test_an_entry_of_the_log_is_read_with_its_typed_usage_and_unknown_metadata_beside_it() -> None:
    entry = access_log_pb2.HTTPAccessLogEntry()
    common = entry.common_properties
    usage = token_usage_pb2.TokenUsage(extraction_status=token_usage_pb2.TokenUsage.EXTRACTION_STATUS_COMPLETE)
    usage.input_tokens.value, usage.output_tokens.value, usage.input_token_details.cached_tokens.value = 11, 6, 4
    common.metadata.typed_filter_metadata["usage"].CopyFrom(
        Any(type_url="type.googleapis.com/envoy.data.ai.v3.TokenUsage", value=usage.SerializeToString())
    )
    common.metadata.typed_filter_metadata["other"].CopyFrom(Any(type_url="t/of.another.Kind", value=b"\xff\xff"))
    known = common.metadata.filter_metadata[DESTINATION_NAMESPACE].fields
    known[DESTINATION_SERVED].string_value, known[PLACED].string_value = "10.0.0.2:8081", "tiny on gpu-1"
    common.response_flags.upstream_remote_reset = True
    common.upstream_request_attempt_count = 2
    common.duration.FromMilliseconds(1500)
    entry.request.request_id = "r-1"
    entry.response.response_code.value = 200
    entry.response.response_body_bytes = 339
    entry.response.response_headers["x-weft-reason"] = "NO_SLOT_AVAILABLE"
    assert sight_of(entry) == ProxySight(
        request_id="r-1",
        status=200,
        flags=("upstream_remote_reset",),
        reason=Reason.NO_SLOT_AVAILABLE,
        endpoint="10.0.0.2:8081",
        attempt_count=2,
        answer_bytes=339,
        usage=usage_pb2.Usage(prompt_tokens=11, completion_tokens=6, cached_prompt_tokens=4),
        duration_seconds=1.5,
        placed="tiny on gpu-1",
    )


@pytest.mark.parametrize("status", ["EXTRACTION_STATUS_PARTIAL", "EXTRACTION_STATUS_FAILED"])
def test_usage_that_was_not_read_to_its_end_counts_as_none(status: str) -> None:
    entry = access_log_pb2.HTTPAccessLogEntry()
    usage = token_usage_pb2.TokenUsage(extraction_status=token_usage_pb2.TokenUsage.ExtractionStatus.Value(status))
    entry.common_properties.metadata.typed_filter_metadata["usage"].CopyFrom(
        Any(type_url="t/envoy.data.ai.v3.TokenUsage", value=usage.SerializeToString())
    )
    assert sight_of(entry).usage is None


def test_witnesses_that_tell_the_same_do_not_disagree() -> None:
    receipt = receipt_pb2.Receipt(usage=USAGE)
    assert disagreements(receipt, sight(usage=USAGE), shows_usage=True) == []


def test_which_fault_it_was_is_no_disagreement_but_its_absence_is() -> None:
    failed = receipt_pb2.Receipt(reason=Reason.STALL_TIMEOUT.value)  # type: ignore[arg-type]
    assert disagreements(failed, sight(flags=("upstream_remote_reset",)), shows_usage=True) == []
    assert disagreements(failed, sight(usage=USAGE), shows_usage=True) == [
        "end: the runner reports stall_timeout, the proxy saw a complete answer"
    ]


def test_a_complete_answer_of_the_runner_that_the_proxy_saw_cut_off_is_a_disagreement() -> None:
    receipt = receipt_pb2.Receipt(usage=USAGE)
    assert disagreements(receipt, sight(), shows_usage=True) == [
        "end: the runner reports a complete answer, the proxy saw worker_lost"
    ]
    assert disagreements(receipt, sight(), shows_usage=False) == []


def test_other_counts_of_tokens_are_disagreements() -> None:
    receipt = receipt_pb2.Receipt(usage=usage_pb2.Usage(prompt_tokens=11, completion_tokens=7))
    assert disagreements(receipt, sight(usage=USAGE), shows_usage=True) == [
        "completion_tokens: the runner reports 7, the proxy saw 6"
    ]


def test_an_answer_has_begun_with_its_first_byte_unless_it_is_an_error() -> None:
    assert has_begun(sight())
    assert not has_begun(sight(status=503))
    assert was_never_reached(sight(status=503, flags=("no_healthy_upstream",)))
    assert not was_never_reached(sight(flags=("upstream_remote_reset",)))
