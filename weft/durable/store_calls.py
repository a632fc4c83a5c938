"""Calls of a router's stores, to a service behind a channel or to the servicer in this process.

A store that is slow or stopping counts as unreachable: SERVICE_UNAVAILABLE. The tenant is sent as metadata, so the
store must trust the caller.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from inspect import isasyncgenfunction
from typing import Any

import grpc
from typing_extensions import override

from weft.kernel.access.principal import LOCAL
from weft.kernel.access.rpc_auth import as_caller
from weft.kernel.channels.rpc import DirectContext, calling, error_from_call
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

TIMEOUT_SECONDS = 30.0
"""Timeout of an answer, and of a stream's next message; longer than a router waits for a locked database."""
RETRY_AFTER_SECONDS = 2.0
"""Retry-After if a store does not answer in time."""
WRITE_TIMEOUT_SECONDS = 60.0
"""Minimum timeout of an uploaded chunk, as the store first writes the previous ones to a possibly slow disk."""
COMMIT_TIMEOUT_SECONDS = 600.0
"""Minimum timeout of an upload's final answer, as a timeout leaves the result unknown. The channel detects a lost store
long before."""
TENANT = "x-tenant-id"
_WRITE_FAILED = "Internal error from Core"
"""Details of a grpc.aio call after a failed write."""


class StoreTimeoutError(WeftError):
    """A store did not answer in time, so it may have made the change."""


def as_tenant(tenant: str) -> tuple[tuple[str, str], ...]:
    """Returns call metadata for a tenant; empty: the request contains it."""
    return ((TENANT, tenant),) if tenant else ()


class StoreCalls(ABC):
    """Calls of a store by rpc name."""

    def __init__(self, what: str, timeout_seconds: float) -> None:
        """`what`: the store's name in timeout errors."""
        self._what = what
        self._timeout_seconds = timeout_seconds

    @abstractmethod
    async def ask(self, rpc: str, request: object, tenant: str = "", *, timeout_seconds: float = 0.0) -> Any:
        """Returns the response of a unary call; `tenant` is empty if the request contains it.

        `timeout_seconds`: minimum timeout.
        """

    @abstractmethod
    async def upload(self, rpc: str, messages: AsyncGenerator[object], tenant: str) -> Any:
        """Sends all messages with back-pressure and returns the answer.

        Raises the errors of `messages`; the store then sees a cancelled call and stores nothing.
        """

    @abstractmethod
    def read(self, rpc: str, request: object, tenant: str, *, is_timed: bool = True) -> AsyncGenerator[Any]:
        """Yields every message of a call. Leaving the iterator ends the call."""

    @contextmanager
    def _explained(self, first_status: "_FirstStatus | None" = None) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            why = error if first_status is None else first_status.instead_of(error)
            found = error_from_call(why, Reason.SERVICE_UNAVAILABLE)
            if found.reason in {Reason.DEADLINE_EXCEEDED, Reason.CANCELLED}:
                found = self._silent()
            raise found from error
        except TimeoutError as error:
            raise self._silent() from error
        except (asyncio.CancelledError, grpc.aio.UsageError):
            with calling(Reason.SERVICE_UNAVAILABLE):  # a closed channel
                raise

    def _silent(self) -> WeftError:
        return StoreTimeoutError(
            Reason.SERVICE_UNAVAILABLE, f"{self._what} timed out", retry_after_seconds=RETRY_AFTER_SECONDS
        )


def store_calls(store: Any, stub: Callable[[grpc.aio.Channel], Any], what: str, timeout_seconds: float) -> StoreCalls:
    """Returns the calls of a store: a channel to its service, with the generated `stub`, or its servicer."""
    if isinstance(store, grpc.aio.Channel):
        return ChannelCalls(stub(store), what, timeout_seconds)
    return DirectCalls(store, what, timeout_seconds)


class DirectCalls(StoreCalls):
    """Calls of a servicer in this process, with messages and errors passed unchanged."""

    def __init__(self, servicer: Any, what: str, timeout_seconds: float) -> None:
        super().__init__(what, timeout_seconds)
        self._servicer = servicer

    @override
    async def ask(self, rpc: str, request: object, tenant: str = "", *, timeout_seconds: float = 0.0) -> Any:
        with self._explained(), as_caller(LOCAL):
            async with asyncio.timeout(max(self._timeout_seconds, timeout_seconds)):
                return await getattr(self._servicer, rpc)(request, DirectContext(as_tenant(tenant)))

    @override
    async def upload(self, rpc: str, messages: AsyncGenerator[object], tenant: str) -> Any:
        async with aclosing(messages):
            with as_caller(LOCAL):
                return await getattr(self._servicer, rpc)(messages, DirectContext(as_tenant(tenant)))

    @override
    async def read(self, rpc: str, request: object, tenant: str, *, is_timed: bool = True) -> AsyncGenerator[Any]:
        serve, context = getattr(self._servicer, rpc), DirectContext(as_tenant(tenant))
        is_generator = isasyncgenfunction(serve)
        async with aclosing(serve(request, context) if is_generator else _written(serve, request, context)) as messages:
            while True:
                with self._explained(), as_caller(LOCAL):
                    async with asyncio.timeout(self._timeout_seconds if is_timed else None):
                        message = await anext(messages, None)
                if message is None:
                    return
                yield message


async def _written(serve: Callable[..., Any], request: object, context: DirectContext) -> AsyncGenerator[Any]:
    """Yields the messages that a servicer's coroutine writes."""
    written: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)
    context.write = written.put
    serving = asyncio.ensure_future(serve(request, context))
    try:
        while True:
            reading = asyncio.ensure_future(written.get())
            try:
                await asyncio.wait({serving, reading}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    await serving
                    return
                yield reading.result()
            finally:
                reading.cancel()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


class ChannelCalls(StoreCalls):
    """Calls through a generated stub."""

    def __init__(self, stub: Any, what: str, timeout_seconds: float) -> None:
        super().__init__(what, timeout_seconds)
        self._stub = stub

    @override
    async def ask(self, rpc: str, request: object, tenant: str = "", *, timeout_seconds: float = 0.0) -> Any:
        timeout = max(self._timeout_seconds, timeout_seconds)
        with self._explained():
            return await getattr(self._stub, rpc)(request, timeout=timeout, metadata=as_tenant(tenant))

    @override
    async def upload(self, rpc: str, messages: AsyncGenerator[object], tenant: str) -> Any:
        with self._explained():
            call = getattr(self._stub, rpc)(metadata=as_tenant(tenant))
        first_status = _FirstStatus(call)
        try:
            async with aclosing(messages):
                async for message in messages:
                    with self._explained(first_status):
                        if not await _write(call, message, max(self._timeout_seconds, WRITE_TIMEOUT_SECONDS)):
                            break
            with self._explained(first_status):
                async with asyncio.timeout(max(self._timeout_seconds, COMMIT_TIMEOUT_SECONDS)):
                    if not call.done():
                        await call.done_writing()
                    return await call
        finally:
            # Cancelling a finished call has no effect.
            call.cancel()

    @override
    async def read(self, rpc: str, request: object, tenant: str, *, is_timed: bool = True) -> AsyncGenerator[Any]:
        with self._explained():
            call = getattr(self._stub, rpc)(request, metadata=as_tenant(tenant))
        try:
            while True:
                with self._explained():
                    async with asyncio.timeout(self._timeout_seconds if is_timed else None):
                        message = await call.read()
                if message is grpc.aio.EOF:
                    return
                yield message
        finally:
            call.cancel()


async def _write(call: "grpc.aio.StreamUnaryCall[Any, Any]", message: object, timeout_seconds: float) -> bool:
    """Writes a message. False: the call has ended, and its answer has the reason."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await call.write(message)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        # A failed write does not contain the reason; the status comes with the answer.
        return False
    return True


class _FirstStatus:
    """The first status of a call, even if a write is in flight.

    That write then fails, and grpc.aio (1.85) replaces the status that has just arrived with its failure.
    """

    def __init__(self, call: "grpc.aio.StreamUnaryCall[Any, Any]") -> None:
        self._first: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def instead_of(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """Returns the error with the call's status, as `error` may only report a failed write."""
        return error if self._first is None or error.details() != _WRITE_FAILED else self._first

    def _note(self, call: Any) -> None:
        # The status of a finished call is available immediately, although its accessors are coroutines.
        code, details, trailer = (_result_of(each) for each in (call.code(), call.details(), call.trailing_metadata()))
        if self._first is None and details != _WRITE_FAILED:
            self._first = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailer, details)


def _result_of(answer: Coroutine[Any, Any, Any]) -> Any:
    try:
        answer.send(None)
    except StopIteration as done:
        return done.value
    answer.close()
    raise AssertionError("the call is over")
