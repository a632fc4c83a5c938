"""A synchronous client of the usage that routers count.

from weft.client.usage import connect_usage

with connect_usage() as usage:
    print(usage.list(["tenant", "day"], since=datetime(2026, 11, 1, tzinfo=UTC)))
"""

from collections.abc import Iterable
from datetime import datetime

from weft.api.router.v1 import usage_service_pb2, usage_service_pb2_grpc
from weft.client._channel import MeshServiceClient
from weft.durable.usage import groups_of, usage_request
from weft.kernel.timestamps import optional_stamp


class Usage(MeshServiceClient):
    """Calls on one router. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, timeout_seconds: float | None = None) -> None:
        super().__init__(target, timeout_seconds)
        self._stub = usage_service_pb2_grpc.UsageServiceStub(self._channel)

    def list(
        self,
        by: Iterable[str] = (),
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        tenant: str = "",
        model: str = "",
        limit: int = 0,
    ) -> usage_service_pb2.ListUsageResponse:
        """Returns usage, kept apart by tenant, key, model, asked, hour or day; `limit` 0: 1,000 rows.

        Raises INVALID_ARGUMENT naming the field.
        """
        wanted = usage_request(
            groups_of(",".join(by), "by"),
            since=optional_stamp(since),
            until=optional_stamp(until),
            tenant=tenant,
            model=model,
            limit=limit,
        )
        found: usage_service_pb2.ListUsageResponse = self._call(self._stub.ListUsage, wanted)
        return found


connect_usage = Usage.connect
