"""Changes of the log level of runners behind the relay, in the audit log: such a runner cannot write there itself."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from weft.api.operations.v1 import operation_service_pb2, operation_service_pb2_grpc
from weft.api.operations.v1 import process_service_pb2 as pb
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.log_level import DEFAULT_LOG_LEVEL_SECONDS
from weft.kernel.reasons import Reason
from weft.kernel.rpc import calling
from weft.kernel.rpc_auth import caller

SET_LOG_LEVEL = "/weft.api.operations.v1.ProcessService/SetLogLevel"
TIMEOUT_SECONDS = 2.0
"""How long a change waits for its entry."""
CONFIGURED = "configured"
"""The level in an entry where the configured one holds again."""

log = get_logger("weft.relay")


class LogLevelAudit:
    """Writes entries of the audit log through the registry."""

    def __init__(self, registry: grpc.aio.Channel, clock: Clock) -> None:
        # Typed as synchronous by the generated code, whatever the channel.
        self._operations: Any = operation_service_pb2_grpc.OperationServiceStub(registry)
        self._clock = clock

    async def write(self, runner: str, request: pb.SetLogLevelRequest) -> None:
        """Writes a change that a runner has made. An entry that cannot be written is in the log."""
        entry = operation_service_pb2.RecordLogLevelRequest(
            process=f"runner/{runner}", level=request.level or CONFIGURED, changed_by=request.requested_by
        )
        if request.level:
            stated = request.HasField("duration")
            seconds = request.duration.ToNanoseconds() / 1e9 if stated else DEFAULT_LOG_LEVEL_SECONDS
            entry.end_time.FromDatetime(self._clock.utc_now() + timedelta(seconds=seconds))
        try:
            with calling(Reason.SERVICE_UNAVAILABLE):
                await self._operations.RecordLogLevel(entry, timeout=TIMEOUT_SECONDS)
        except WeftError as error:
            by, why = request.requested_by, error.message
            log.warning("log level not in the audit log", log_level=entry.level, by=by, why=why)


def as_the_caller(message: bytes) -> pb.SetLogLevelRequest:
    """Returns a request in the name of its caller: its own, or the one that it says where it may act for others.

    Raises MALFORMED_REQUEST.
    """
    try:
        request = pb.SetLogLevelRequest.FromString(message)
    except DecodeError:
        raise WeftError(Reason.MALFORMED_REQUEST, "the request cannot be read") from None
    known = caller()
    if not known.names_tenants or not request.requested_by:
        request.requested_by = known.name
    return request


async def only(message: bytes) -> AsyncIterator[bytes]:
    """Yields one message."""
    yield message
