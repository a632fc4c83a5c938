"""gRPC calls to the registry; translates their errors to fields and messages of the HTTP API."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call


class RegistryCalls:
    """Calls of one client. Every failure is a WeftError, with field names of the HTTP request."""

    def __init__(self, callers_field: Callable[[str], str], *, timeout_seconds: float) -> None:
        """`callers_field` translates a field of a message to the registry; `timeout_seconds` bounds each call."""
        self._callers_field = callers_field
        self._timeout_seconds = timeout_seconds

    async def call(self, method: Any, request: Any, timeout_seconds: float | None = None) -> Any:
        """Returns the answer of a unary call; `timeout_seconds` replaces the default.

        Raises SERVICE_UNAVAILABLE when the registry is unreachable, DEADLINE_EXCEEDED at the timeout.
        """
        timeout_seconds = timeout_seconds or self._timeout_seconds
        try:
            return await method(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, timeout_seconds) from error

    async def follow(self, call: Any) -> AsyncGenerator[Any]:
        """Yields the messages of a stream. The call ends with the iterator. Raises as `call`."""
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._error(error, self._timeout_seconds) from error
        finally:
            call.cancel()

    def _error(self, error: grpc.aio.AioRpcError, timeout_seconds: float) -> WeftError:
        found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
        if found.reason is Reason.SERVICE_UNAVAILABLE:
            return WeftError(found.reason, "the registry cannot be reached; models go on answering without it")
        if found.reason is Reason.DEADLINE_EXCEEDED and "operation" not in found.metadata:
            return WeftError(found.reason, f"the registry did not answer within {timeout_seconds:g} seconds")
        if isinstance(found, FieldError):
            why = found.message.removeprefix(f"{found.field}: ")
            return FieldError(self._callers_field(found.field), why, found.reason)
        if "field" in found.metadata:
            found.metadata["field"] = self._callers_field(found.metadata["field"])
        return found
