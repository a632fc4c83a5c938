"""Redaction of the addresses of a runner's own servers in text and errors that leave over a link."""

import re
from dataclasses import replace

from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from weft.link.frames import STATUS_DETAILS, CallStatus

LOCAL = "<local>"
"""Replacement of a redacted address."""

_HOST = r"(?:localhost|127(?:\.\d{1,3}){3}|0\.0\.0\.0|\[(?:::|::1|0:0:0:0:0:0:0:1|::ffff:127(?:\.\d{1,3}){3})\])"
_USER = r"(?:[^\s/@]{1,256}@)?"
# Older servers write host and port as text. A longer name that ends or begins like a loopback host is another host.
_LOCAL_ADDRESS = re.compile(
    rf"https?://{_USER}{_HOST}(?::\d{{1,5}}|(?![\w:-]|\.\w))"
    rf"|(?<![\w.-]){_HOST}:\d{{1,5}}"
    rf"|hostname: {_HOST}, port: \d{{1,5}}",
    re.IGNORECASE,
)


def redact_local_addresses(text: str) -> str:
    """Returns `text` with each loopback URL, and each loopback `host:port`, replaced by `<local>`."""
    return _LOCAL_ADDRESS.sub(LOCAL, text)


def redact_status(status: CallStatus) -> CallStatus:
    """Returns `status` with its message and its error details redacted."""
    trailing = tuple(
        (key, _conceal_in_details(value) if key == STATUS_DETAILS and isinstance(value, bytes) else value)
        for key, value in status.trailing_metadata
    )
    return replace(status, message=redact_local_addresses(status.message), trailing_metadata=trailing)


def _conceal_in_details(serialized: bytes) -> bytes:
    """Redact a serialized google.rpc.Status of the runner's own server."""
    status = status_pb2.Status.FromString(serialized)
    status.message = redact_local_addresses(status.message)
    for detail in status.details:
        _conceal_in_detail(detail)
    concealed: bytes = status.SerializeToString()
    return concealed


def _conceal_in_detail(detail: any_pb2.Any) -> None:
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    if detail.Unpack(info):
        for key, value in dict(info.metadata).items():
            info.metadata[key] = redact_local_addresses(value)
        detail.Pack(info)
    elif detail.Unpack(request):
        for violation in request.field_violations:
            violation.description = redact_local_addresses(violation.description)
        detail.Pack(request)
