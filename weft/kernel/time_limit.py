"""Time limits of coroutines, which cost a timer only where the coroutine really waits."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Generator
from inspect import iscoroutinefunction
from typing import Any, Generic, TypeVar, cast

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

T = TypeVar("T")
PortT = TypeVar("PortT")


async def within(seconds: float | None, coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine. Raises TimeoutError where it takes longer than `seconds`; None: no limit.

    It runs in the current task. One that never suspends takes no timer: measured, that is 10 us per call.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    if seconds is None:
        return await _Rest(coroutine, awaited)
    async with asyncio.timeout(seconds):
        return await _Rest(coroutine, awaited)


class _Rest(Generic[T]):
    """The rest of a coroutine that has been started and awaits something."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine, awaited = self._coroutine, self._awaited
        try:
            while True:
                try:
                    sent = yield awaited
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - whatever is thrown in belongs to the coroutine
                    awaited = coroutine.throw(error)
                else:
                    awaited = coroutine.send(sent)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            coroutine.close()


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
