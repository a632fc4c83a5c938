"""Synchronous functions on threads that may hang without holding up the end of the process."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress

from runner_svc.tools.outcomes import described
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class DaemonThreads:
    """A bounded number of threads, one per call.

    Not an executor: a thread that hangs cannot be ended, and executors wait for theirs when the process exits.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._running = 0

    async def run(self, function: Callable[[], str]) -> str:
        """What the function returns or raises. Raises TOO_MANY_RESOURCES when all threads are at work, or hang.

        A cancelled call lets the thread go on; it counts until it has ended.
        """
        if self._running >= self._max_threads:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"{self._running} earlier calls of {self._name} are still running; it was not run again",
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            try:
                result = context.run(function)
            except BaseException as error:  # noqa: BLE001 - a tool that says sys.exit() must not end the thread unheard
                settle = _settled(future, error=error)
            else:
                settle = _settled(future, result=result)
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._end, settle)

        self._running += 1
        threading.Thread(target=work, name=f"tool {self._name}", daemon=True).start()
        return await future

    def _end(self, settle: Callable[[], None]) -> None:
        self._running -= 1
        settle()


def _settled(
    future: asyncio.Future[str], *, result: str = "", error: BaseException | None = None
) -> Callable[[], None]:
    def settle() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:  # what asyncio would not carry, or would stop for
            future.set_exception(RuntimeError(described(error)))

    return settle
