"""An event for what there are thousands of."""

import asyncio


class LightEvent(asyncio.Event):
    """An asyncio.Event in 100 bytes instead of 800: its waiters, of which there are few, are in a list.

    `weft.kernel.wakeup.Wakeup` is lighter still, for one waiter that looks itself at what it waits for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiters = []  # type: ignore[assignment]  # all that an event does with its deque, a list does too
