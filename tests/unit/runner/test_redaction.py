from typing import Any

import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from runner_svc.redaction import redact_local_addresses, redact_status
from weft.api.common.v1 import link_pb2
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.link.frames import STATUS_DETAILS, metadata_of, new_status, status_of


@pytest.mark.parametrize(
    ("text", "concealed"),
    [
        ("listening on http://127.0.0.1:41045", "listening on <local>"),
        ("listening on http://127.0.0.1:41045listening", "listening on <local>listening"),
        ("GET https://LOCALHOST:8443/v1 failed", "GET <local>/v1 failed"),
        ("http://me:pw@127.0.0.1/v1 and [::1]:9, 127.8.9.1:80", "<local>/v1 and <local>, <local>"),
        ("http://[::1]:8080 http://localhost.", "<local> <local>."),
        ("bound to 0.0.0.0:8080", "bound to <local>"),
        ("is listening, hostname: 127.0.0.1, port: 8081, threads: 5", "is listening, <local>, threads: 5"),
    ],
)
def test_addresses_of_this_machine_are_redacted(text: str, concealed: str) -> None:
    assert redact_local_addresses(text) == concealed


@pytest.mark.parametrize(
    "text",
    [
        "http://10.0.0.1:80",
        "10.127.0.0.1:80",
        "my-localhost:80",
        "http://localhost.example:80",
        "127.0.0.1",
        "12:30:45",
    ],
)
def test_other_addresses_are_unchanged(text: str) -> None:
    assert redact_local_addresses(text) == text


def _trailing(status: link_pb2.CallEnd) -> dict[str, Any]:
    return dict(metadata_of(status.trailing_metadata))


def test_error_and_its_details_are_redacted() -> None:
    error = invalid_field("model", "http://127.0.0.1:41045 does not know it")
    status = redact_status(status_of(error))
    assert status.message == "model: <local> does not know it"
    assert b"127.0.0.1" not in _trailing(status)[STATUS_DETAILS]


def test_engine_log_lines_are_redacted() -> None:
    died = WeftError(Reason.SERVER_DIED, "it died")
    died.engine_exit, died.engine_log = "signal SIGKILL", ("listening on http://127.0.0.1:41045", "busy")
    details = _trailing(redact_status(status_of(died)))[STATUS_DETAILS]
    seen = error_details_pb2.DebugInfo()
    assert any(detail.Unpack(seen) for detail in status_pb2.Status.FromString(details).details)
    assert (seen.detail, [*seen.stack_entries]) == ("signal SIGKILL", ["listening on <local>", "busy"])


def test_other_details_and_metadata_are_unchanged() -> None:
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason="R", domain="weft", metadata={"at": "localhost:80", "model": "m"}))
    other = any_pb2.Any(type_url="x/y", value=b"\x00\xff")
    details = status_pb2.Status(code=14, message="m", details=[info, other]).SerializeToString()
    trailing: tuple[tuple[str, str | bytes], ...] = (("x-receipt-bin", b"\xff"), (STATUS_DETAILS, details))
    found = _trailing(redact_status(new_status(14, "m", trailing)))
    assert found["x-receipt-bin"] == b"\xff"
    status = status_pb2.Status.FromString(found[STATUS_DETAILS])
    assert status.details[1] == other
    assert status.details[0].Unpack(read := error_details_pb2.ErrorInfo())
    assert dict(read.metadata) == {"at": "<local>", "model": "m"}
