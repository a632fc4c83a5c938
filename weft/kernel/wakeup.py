"""A wake-up of one waiter, for what is waited for rarely and held often."""

import asyncio


class Wakeup:
    """Wakes the task that waits for it; it remembers nothing.

    An asyncio.Event takes 800 bytes, this one 50: idle streams have several, and there may be thousands. Who waits
    looks first whether there is something to wait for, and again afterwards.
    """

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Return at the next `wake`. At most one task may wait."""
        assert self._waiter is None, "one task waits already"
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Wake the waiter, if there is one."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
