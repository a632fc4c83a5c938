"""gRPC calls to the file and batch stores.

A store that is slow or stopping counts as unreachable: SERVICE_UNAVAILABLE.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import grpc

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call

TIMEOUT_SECONDS = 10.0
"""Timeout of an answer, and of the next message of a stream."""
WRITE_TIMEOUT_SECONDS = 60.0
"""Minimum timeout of a chunk of an upload: the store first writes the previous ones, on a disk that may be slow."""
COMMIT_TIMEOUT_SECONDS = 600.0
"""Minimum timeout of the final answer of an upload: after a timeout the outcome is unknown. A store that is gone is
noticed long before, by its channel."""
TENANT = "x-tenant-id"
_WRITE_FAILED = "Internal error from Core"
"""What grpc.aio says of a call when a write to it failed."""

ResultT = TypeVar("ResultT")


def as_tenant(tenant: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call for a tenant."""
    return ((TENANT, tenant),)


async def answered(call: Awaitable[ResultT], *, kind: str) -> ResultT:
    """What a call with a deadline returns."""
    with _explained(kind):
        return await call


async def upload(
    call: "grpc.aio.StreamUnaryCall[Any, ResultT]",
    messages: AsyncIterator[object],
    *,
    kind: str,
    timeout_seconds: float,
) -> ResultT:
    """Sends all messages with back-pressure and returns the answer.

    Raises what `messages` raises; the store then gets a cancelled call and keeps nothing.
    """
    told = _Told(call)
    try:
        async for message in messages:
            with _explained(kind, told):
                if not await _write(call, message, max(timeout_seconds, WRITE_TIMEOUT_SECONDS)):
                    break
        with _explained(kind, told):
            async with asyncio.timeout(max(timeout_seconds, COMMIT_TIMEOUT_SECONDS)):
                if not call.done():
                    await call.done_writing()
                return await call
    finally:
        # Cancelling a finished call has no effect.
        call.cancel()


async def read_stream(
    call: "grpc.aio.UnaryStreamCall[Any, ResultT]", *, kind: str, timeout_seconds: float
) -> AsyncGenerator[ResultT]:
    """Every message that is sent."""
    try:
        while True:
            with _explained(kind):
                async with asyncio.timeout(timeout_seconds):
                    message = await call.read()
            if message is grpc.aio.EOF:
                return
            yield cast("ResultT", message)
    finally:
        call.cancel()


async def _write(call: "grpc.aio.StreamUnaryCall[Any, Any]", message: object, timeout_seconds: float) -> bool:
    """Writes one message. False: the call has ended, and its answer says why."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await call.write(message)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        # What a failed write says is not why: the status comes with the answer.
        return False
    return True


class _Told:
    """The status of a call, even if a write is in flight at that moment.

    The write then fails, and grpc.aio (1.85) replaces the status that has just arrived by that failure.
    """

    def __init__(self, call: "grpc.aio.StreamUnaryCall[Any, Any]") -> None:
        self._first: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def instead_of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """The reason of the call's failure, where `error` may only report a failed write."""
        return error if self._first is None or error.details() != _WRITE_FAILED else self._first

    def _note(self, call: Any) -> None:
        # The status of a finished call is available at once, though its accessors are coroutines.
        code, details, trailer = (_at_once(each) for each in (call.code(), call.details(), call.trailing_metadata()))
        if self._first is None and details != _WRITE_FAILED:
            self._first = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailer, details)


def _at_once(answer: Coroutine[Any, Any, Any]) -> Any:
    try:
        answer.send(None)
    except StopIteration as done:
        return done.value
    answer.close()
    raise AssertionError("the call is over")


@contextmanager
def _explained(kind: str, told: _Told | None = None) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        why = error if told is None else told.instead_of(error)
        found = error_from_call(why, Reason.SERVICE_UNAVAILABLE)
        if found.reason in {Reason.DEADLINE_EXCEEDED, Reason.CANCELLED}:
            found = _silent(kind)
        raise found from error
    except TimeoutError as error:
        raise _silent(kind) from error


def _silent(kind: str) -> WeftError:
    return WeftError(Reason.SERVICE_UNAVAILABLE, f"the store of {kind} timed out")
