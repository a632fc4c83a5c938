"""The status of a call on a link, from an error and for gRPC."""

import grpc
from grpc_status import rpc_status

from weft.kernel.errors import WeftError
from weft.kernel.rpc import error_to_status
from weft.link.frames import CallStatus

_CODES = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: WeftError) -> CallStatus:
    """The status that says what an error says, with its details."""
    status = rpc_status.to_status(error_to_status(error))
    return CallStatus(
        code=status.code.value[0],
        message=status.details,
        trailing_metadata=tuple((str(key), value) for key, value in status.trailing_metadata),
    )


def grpc_code(status: CallStatus) -> grpc.StatusCode:
    """The code as gRPC names it; UNKNOWN for a number that has none."""
    return _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
