"""An error that crosses gRPC arrives as the same error."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from weft.client._channel import ServiceClient
from weft.kernel.channels.rpc import CONNECTION_LOST, calling, error_from_call, error_to_status, open_channel
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field, quoting_engine
from weft.kernel.errors.reasons import Reason


def _call_error(code: grpc.StatusCode, details: str, trailers: grpc.aio.Metadata | None = None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers or grpc.aio.Metadata(), details)


def _over_the_wire(error: WeftError) -> WeftError:
    status = rpc_status.to_status(error_to_status(error))
    failed = _call_error(status.code, status.details, grpc.aio.Metadata(*status.trailing_metadata))
    return error_from_call(failed, Reason.WORKER_LOST)


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.UNSPECIFIED])
def test_every_reason_round_trips_with_message_metadata_and_retry_delay(reason: Reason) -> None:
    sent = WeftError(reason, "a sentence", metadata={"model": "m"}, retry_after_seconds=2.5)
    got = _over_the_wire(sent)
    assert (got.reason, got.message, got.metadata, got.retry_after_seconds) == (
        reason,
        "a sentence",
        {"model": "m"},
        2.5,
    )


def test_engine_observations_of_a_runner_round_trip() -> None:
    sent = WeftError(Reason.SERVER_DIED, "it died")
    sent.engine_exit, sent.engine_log = "signal SIGKILL", ("loaded", "busy")
    got = _over_the_wire(sent)
    assert (got.engine_exit, got.engine_log) == ("signal SIGKILL", ("loaded", "busy"))


@pytest.mark.parametrize("error", [WeftError(Reason.BACKEND_REJECTED, "no: x"), invalid_field("messages", "no: x")])
def test_cause_of_an_error_that_quotes_an_engine_round_trips(error: WeftError) -> None:
    got = _over_the_wire(quoting_engine(error, "refused"))
    assert (got.message, got.log_message) == (error.message, "refused")


def test_python_client_shows_the_words_of_an_engine_to_its_caller() -> None:
    status = rpc_status.to_status(error_to_status(quoting_engine(WeftError(Reason.BACKEND_ERROR, "words"), "a cause")))

    def call(*_: object, **__: object) -> None:
        raise _call_error(status.code, status.details, grpc.aio.Metadata(*status.trailing_metadata))

    with ServiceClient("127.0.0.1:1", None) as client, pytest.raises(WeftError, match="words"):
        client._call(call, None)


def test_field_error_names_its_field_once_after_a_round_trip() -> None:
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
def test_grpc_status_without_details_is_mapped_to_a_reason(
    code: grpc.StatusCode, details: str, expected: Reason
) -> None:
    assert error_from_call(_call_error(code, details), Reason.WORKER_LOST).reason is expected


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: Connection refused", Reason.RUNNER_UNREACHABLE),
        ("failed to connect to all addresses; last error: UNAVAILABLE: reset by peer", Reason.WORKER_LOST),
        ("failed to connect to all addresses; last error: CERTIFICATE_VERIFY_FAILED", Reason.WORKER_LOST),
        ("Socket closed", Reason.WORKER_LOST),
    ],
)
def test_call_without_a_connection_differs_from_one_that_lost_it(details: str, expected: Reason) -> None:
    failed = _call_error(grpc.StatusCode.UNAVAILABLE, details)
    assert error_from_call(failed, Reason.WORKER_LOST, Reason.RUNNER_UNREACHABLE).reason is expected


def _fails_with(error: BaseException) -> None:
    with calling(Reason.WORKER_LOST):
        raise error


@pytest.mark.parametrize(
    "error",
    [_call_error(grpc.StatusCode.UNAVAILABLE, "Socket closed"), asyncio.CancelledError()],
    ids=["status", "cut"],
)
async def test_call_with_a_lost_connection_fails_with_the_reason_of_its_peer(error: BaseException) -> None:
    with pytest.raises(WeftError, match=CONNECTION_LOST) as raised:
        _fails_with(error)
    assert raised.value.reason is Reason.WORKER_LOST


@pytest.mark.parametrize(
    "error", [WeftError(Reason.ROUTER_STANDBY, "elsewhere"), grpc.aio.UsageError("a bug"), KeyError("x")]
)
async def test_non_call_errors_pass_through(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        _fails_with(error)
    assert raised.value is error


async def test_call_on_a_closed_channel_counts_as_a_lost_connection() -> None:
    channel = open_channel("unix:/nowhere/a.sock")
    method: Any = channel.unary_unary("/weft.test.Echo/Say")
    await channel.close()
    with pytest.raises(WeftError, match=CONNECTION_LOST), calling(Reason.WORKER_LOST):
        await method(b"hello")


async def test_task_cancelled_during_a_call_is_cancelled() -> None:
    async def call() -> None:
        with calling(Reason.WORKER_LOST):
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
