"""An error that crosses gRPC arrives as the same error."""

import grpc
import pytest
from grpc_status import rpc_status

from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call, error_to_status


def _call_error(code: grpc.StatusCode, details: str, trailers: grpc.aio.Metadata | None = None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers or grpc.aio.Metadata(), details)


def _over_the_wire(error: WeftError) -> WeftError:
    status = rpc_status.to_status(error_to_status(error))
    failed = _call_error(status.code, status.details, grpc.aio.Metadata(*status.trailing_metadata))
    return error_from_call(failed, Reason.WORKER_LOST)


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.UNSPECIFIED])
def test_every_reason_survives_the_wire_with_message_metadata_and_retry_delay(reason: Reason) -> None:
    sent = WeftError(reason, "a sentence", metadata={"model": "m"}, retry_after_seconds=2.5)
    got = _over_the_wire(sent)
    assert (got.reason, got.message, got.metadata, got.retry_after_seconds) == (
        reason,
        "a sentence",
        {"model": "m"},
        2.5,
    )


def test_a_field_error_names_its_field_once_on_the_other_side() -> None:
    got = _over_the_wire(invalid_field("payload.messages[2].role", "must be set"))
    assert isinstance(got, FieldError)
    assert got.field == "payload.messages[2].role"
    assert got.message == "payload.messages[2].role: must be set"


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", Reason.WORKER_LOST),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", Reason.WORKER_LOST),
        (grpc.StatusCode.UNKNOWN, "Stream removed", Reason.WORKER_LOST),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", Reason.WORKER_LOST),
        (grpc.StatusCode.UNKNOWN, "Unexpected <class 'KeyError'>: 'x'", Reason.INTERNAL),
        (grpc.StatusCode.INTERNAL, "a bug", Reason.INTERNAL),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", Reason.DEADLINE_EXCEEDED),
        (grpc.StatusCode.CANCELLED, "Locally cancelled", Reason.CANCELLED),
        (grpc.StatusCode.CANCELLED, "CANCELLED", Reason.WORKER_LOST),
    ],
)
def test_a_bare_status_of_grpc_itself_is_mapped_on_purpose(
    code: grpc.StatusCode, details: str, expected: Reason
) -> None:
    assert error_from_call(_call_error(code, details), Reason.WORKER_LOST).reason is expected
