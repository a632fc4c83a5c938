"""The client of usage: what tenants, keys and models used, by hour."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from google.protobuf.timestamp_pb2 import Timestamp

from weft.api.router.v1 import usage_service_pb2 as pb
from weft.api.router.v1 import usage_service_pb2_grpc
from weft.api.router.v1.usage_pb2 import UsageGroup
from weft.durable.store_calls import store_calls
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.schemas.field_rules import enum_words
from weft.kernel.time.timestamps import stamp_of

Group: TypeAlias = UsageGroup.ValueType
GROUPS: Mapping[str, Group] = MappingProxyType(
    {word: cast("Group", number) for number, word in enum_words(UsageGroup.DESCRIPTOR).items() if number}
)
DEFAULT_ROWS = 1_000
MAX_ROWS = 10_000
"""Maximum rows per answer."""
USAGE_TIMEOUT_SECONDS = 30.0


class UsageClient:
    """Client of the usage store. Raises SERVICE_UNAVAILABLE for a lost router or database."""

    def __init__(self, store: Any) -> None:
        """`store`: a channel to the router, or its servicer in this process."""
        stub = usage_service_pb2_grpc.UsageServiceStub
        self._calls = store_calls(store, stub, "usage store", USAGE_TIMEOUT_SECONDS)

    async def usage(self, wanted: pb.ListUsageRequest) -> pb.ListUsageResponse:
        """Returns the requested usage. Raises INVALID_ARGUMENT naming the field."""
        answer: pb.ListUsageResponse = await self._calls.ask("ListUsage", wanted)
        return answer


def groups_of(text: str, field: str) -> list[Group]:
    """Returns the groups in a text such as "tenant,day". Raises INVALID_ARGUMENT naming `field`."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if any(word not in GROUPS for word in words) or len(set(words)) < len(words):
        raise invalid_field(field, f"must be some of {', '.join(GROUPS)}, each once, joined by commas")
    return [GROUPS[word] for word in words]


_AGO = re.compile(r"(\d{1,5})(m|h|d|w)", re.ASCII)
_AGO_SECONDS = {"m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
MAX_MOMENT_CHARS = 64


def moment_of(text: str, field: str, now: datetime) -> Timestamp:
    """Returns the time in a text such as "30d" (ago), "2026-11-01" or "2026-11-01T12:00Z"; default zone: UTC.

    Raises INVALID_ARGUMENT naming `field`.
    """
    ago = _AGO.fullmatch(text)
    try:
        if ago is not None:
            found = now - timedelta(seconds=int(ago[1]) * _AGO_SECONDS[ago[2]])
        else:
            found = datetime.fromisoformat(text[:MAX_MOMENT_CHARS])
        return stamp_of((found if found.tzinfo is not None else found.replace(tzinfo=UTC)).astimezone(UTC))
    except (ValueError, OverflowError):
        raise invalid_field(field, "must be a length of time such as 90m, 12h, 30d or 4w, or a date and time") from None
