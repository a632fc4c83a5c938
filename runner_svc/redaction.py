"""Redacts addresses of a runner's own servers in texts and errors that leave this machine over a link."""

import re

from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from weft.api.common.v1 import link_pb2
from weft.link.frames import STATUS_DETAILS

LOCAL = "<local>"
"""Replacement of a redacted address."""

_HOST = r"(?:localhost|127(?:\.\d{1,3}){3}|0\.0\.0\.0|\[(?:::|::1|0:0:0:0:0:0:0:1|::ffff:127(?:\.\d{1,3}){3})\])"
_USER = r"(?:[^\s/@]{1,256}@)?"
# Older servers write host and port as text. A longer name that ends or starts like a loopback host is another host.
_LOCAL_ADDRESS = re.compile(
    rf"https?://{_USER}{_HOST}(?::\d{{1,5}}|(?![\w:-]|\.\w))"
    rf"|(?<![\w.-]){_HOST}:\d{{1,5}}"
    rf"|hostname: {_HOST}, port: \d{{1,5}}",
    re.IGNORECASE,
)


def redact_local_addresses(text: str) -> str:
    """Replaces each loopback URL and each loopback `host:port` in a text by `<local>`."""
    return _LOCAL_ADDRESS.sub(LOCAL, text)


def redact_status(status: link_pb2.CallEnd) -> link_pb2.CallEnd:
    """Returns `status` with its message and error details redacted."""
    redacted = link_pb2.CallEnd()
    redacted.CopyFrom(status)
    redacted.message = redact_local_addresses(status.message)
    for entry in redacted.trailing_metadata:
        if entry.key == STATUS_DETAILS:
            entry.value = _conceal_in_details(entry.value)
    return redacted


def _conceal_in_details(serialized: bytes) -> bytes:
    """Redacts a serialized google.rpc.Status of the runner's own server."""
    status = status_pb2.Status.FromString(serialized)
    status.message = redact_local_addresses(status.message)
    for detail in status.details:
        _conceal_in_detail(detail)
    concealed: bytes = status.SerializeToString()
    return concealed


def _conceal_in_detail(detail: any_pb2.Any) -> None:
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    seen = error_details_pb2.DebugInfo()
    if detail.Unpack(info):
        for key, value in dict(info.metadata).items():
            info.metadata[key] = redact_local_addresses(value)
        detail.Pack(info)
    elif detail.Unpack(request):
        for violation in request.field_violations:
            violation.description = redact_local_addresses(violation.description)
        detail.Pack(request)
    elif detail.Unpack(seen):
        seen.stack_entries[:] = map(redact_local_addresses, seen.stack_entries)
        detail.Pack(seen)
