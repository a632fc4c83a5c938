"""Ending a request from outside: the caller hung up, reads too slowly, or its time is over."""

from starlette.types import Receive

from gateway.errors import ClientGoneError
from weft.kernel.errors import WeftError
from weft.kernel.interrupt import Interruptible
from weft.kernel.reasons import Reason


async def interrupt_on_disconnect(receive: Receive, block: Interruptible) -> None:
    """Wait until the caller hangs up, then end `block` with ClientGoneError. Run it as a task beside the block."""
    while (await receive())["type"] != "http.disconnect":
        pass
    block.interrupt(ClientGoneError())


def deadline_passed(block: Interruptible) -> None:
    """End `block` with DEADLINE_EXCEEDED: a last resort, for a request whose own deadline did not end it."""
    block.interrupt(WeftError(Reason.DEADLINE_EXCEEDED, "the request's deadline passed"))
