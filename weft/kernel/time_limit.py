"""Time limits of coroutines, and of the ports of stores."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

T = TypeVar("T")
PortT = TypeVar("PortT")


async def within(seconds: float | None, coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine. Raises TimeoutError if it takes longer than `seconds`; None: no limit."""
    async with asyncio.timeout(seconds):
        return await coroutine


async def store_answer(
    seconds: float, answer: Coroutine[Any, Any, T], store: str, *, retry_after_seconds: float | None = None
) -> T:
    """Returns the answer of a store. Raises SERVICE_UNAVAILABLE naming the store where it takes too long."""
    try:
        return await within(seconds, answer)
    except TimeoutError:
        message = f"{store} timed out"
        raise WeftError(Reason.SERVICE_UNAVAILABLE, message, retry_after_seconds=retry_after_seconds) from None


def time_limited(
    port: PortT,
    seconds: float,
    store: str,
    *,
    without: Collection[str] = (),
    retry_after_seconds: float | None = None,
) -> PortT:
    """Returns the port of a store whose coroutine methods have a time limit, and raise as `store_answer`.

    Generators, such as watches, have none, nor have the methods named in `without`.
    """

    def limited(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*given: Any, **named: Any) -> Any:
            return await store_answer(seconds, method(*given, **named), store, retry_after_seconds=retry_after_seconds)

        return call

    return cast("PortT", _Port(port, limited, frozenset(without)))


class _Port:
    """Another port with its coroutine methods wrapped."""

    def __init__(self, port: object, wrap: Callable[[Any], Any], unwrapped: frozenset[str]) -> None:
        self._port = port
        self._wrap = wrap
        self._unwrapped = unwrapped

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._port, name)
        if name not in self._unwrapped and iscoroutinefunction(method):
            method = self._wrap(method)
        # Found at once from here on.
        setattr(self, name, method)
        return method
