import asyncio
import time

import pytest

from gateway.errors import ClientGoneError
from gateway.http.disconnect import interrupt_on_disconnect
from weft.kernel.time.cancellation import Interruptible
from weft.kernel.time.deadlines import Deadlines


async def test_interrupt_becomes_its_error_and_not_a_cancellation() -> None:
    async def work() -> None:
        with Interruptible() as block:
            asyncio.get_running_loop().call_soon(block.interrupt, ClientGoneError())
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    with pytest.raises(ClientGoneError):
        await task
    assert not task.cancelled()


async def test_external_cancellation_is_kept() -> None:
    began = asyncio.Event()

    async def work() -> None:
        with Interruptible():
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancellation_takes_precedence_over_a_concurrent_interrupt() -> None:
    began = asyncio.Event()
    blocks: list[Interruptible] = []

    async def work() -> None:
        with Interruptible() as block:
            blocks.append(block)
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await began.wait()
    blocks[0].interrupt(ClientGoneError())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_interrupt_after_the_block_has_no_effect() -> None:
    with Interruptible() as block:
        pass
    block.interrupt(ClientGoneError())
    await asyncio.sleep(0)


async def test_only_a_disconnect_interrupts() -> None:
    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0)
        return next(messages)

    with pytest.raises(ClientGoneError), Interruptible() as block:  # noqa: PT012 - the block is under test
        listener = asyncio.create_task(interrupt_on_disconnect(receive, block))
        await asyncio.Event().wait()
    assert listener.done()


async def test_deadlines_pass_in_their_order_not_early_and_a_removed_one_never() -> None:
    start, passed, done = time.monotonic(), dict[str, float](), asyncio.Event()

    def expire(name: str) -> None:
        passed[name] = time.monotonic() - start
        if name == "last":
            done.set()

    deadlines, seconds = Deadlines[str](expire), {"late": 0.04, "early": 0.01, "removed": 0.02, "last": 0.06}
    for name, after in seconds.items():
        deadlines.add(name, after)
    deadlines.remove("removed")
    deadlines.remove("unknown")
    await done.wait()
    assert list(passed) == ["early", "late", "last"]
    assert all(passed[name] >= seconds[name] for name in passed)
