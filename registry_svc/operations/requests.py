"""From the wire: every limit of what a caller may send about operations, and the field it is about."""

import base64
import binascii
import re

from registry_svc.checks import require_count, to_actor
from registry_svc.operations.actions import checked_action
from registry_svc.operations.operations import Asked
from registry_svc.operations.policy.lifecycle import OPERATION_PREFIX
from weft.api.operations.v1 import operation_service_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_NAME_CHARS, is_name, require_request_id

MAX_AUTHORIZATION_CHARS = 16 * 1024
DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1_000
MAX_NUMBER = 2**63 - 1

_NUMBER = re.compile(r"[1-9][0-9]{0,18}")


def to_asked(request: operation_service_pb2.CreateOperationRequest) -> Asked:
    """A valid CreateOperation, on whatever names; raises INVALID_ARGUMENT naming the field."""
    request_id = require_request_id(request.request_id, "request_id")
    if len(request.authorization) > MAX_AUTHORIZATION_CHARS:
        raise invalid_field("authorization", f"must be at most {MAX_AUTHORIZATION_CHARS} characters")
    return Asked(
        request_id=request_id,
        action=checked_action(request.action),
        requested_by=to_actor(request.requested_by),
        authorization=request.authorization,
    )


def to_operation_id(name: str) -> str:
    """The id in "operations/<id>"; raises INVALID_ARGUMENT."""
    operation_id = name.removeprefix(OPERATION_PREFIX)
    if operation_id == name or not is_name(operation_id):
        raise invalid_field("name", f"must be {OPERATION_PREFIX}<id>, at most {MAX_NAME_CHARS} characters of id")
    return operation_id


def to_page(request: operation_service_pb2.ListOperationsRequest) -> tuple[int | None, int]:
    """The number before which the page begins, and how many it holds; raises INVALID_ARGUMENT naming the field."""
    size = page_size_of(request.page_size)
    if not request.page_token:
        return None, size
    try:
        text = base64.b64decode(request.page_token, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        text = ""
    if _NUMBER.fullmatch(text) is None or int(text) > MAX_NUMBER:
        raise invalid_field("page_token", "must be one that an earlier page returned")
    return int(text), size


def page_token(last_number: int) -> str:
    """The token of the page that begins after the operation of this number."""
    return base64.urlsafe_b64encode(str(last_number).encode("ascii")).decode("ascii")


def page_size_of(page_size: int) -> int:
    """How many a page holds; raises INVALID_ARGUMENT."""
    return min(require_count(page_size, "page_size") or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
