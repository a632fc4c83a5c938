"""Errors that a test expects."""

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

import grpc
import pytest

from weft.kernel.channels.rpc import error_from_call
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


@contextmanager
def refused(reason: Reason = Reason.INVALID_ARGUMENT, *, field: str = "") -> Iterator[list[WeftError]]:
    """Expects the block to fail with a reason, and by a field if one is given; the list receives the error."""
    errors: list[WeftError] = []
    with pytest.raises((grpc.aio.AioRpcError, WeftError)) as caught:
        yield errors
    error = caught.value
    if isinstance(error, grpc.RpcError):
        error = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
    assert isinstance(error, WeftError)
    errors.append(error)
    assert error.reason is reason, error
    if field:
        assert error.metadata["field"] == field


async def refusal_of(reason: Reason, awaited: Awaitable[object]) -> str:
    """Expects a failure with a reason; returns its message."""
    with refused(reason) as errors:
        await awaited
    return errors[0].message
