"""Notification of a request about its caller's disconnect."""

import asyncio
from typing import Any

import pytest
from starlette.types import Receive

from gateway.errors import ClientGoneError
from gateway.http.disconnect import DISCONNECT_KEY, DisconnectNotifier, watch_for_disconnect
from weft.kernel.interrupt import Interruptible


async def _never() -> dict[str, Any]:
    raise AssertionError("where the server tells, nobody waits to receive it")


async def _waits(hang_up: DisconnectNotifier | None, receive: Receive = _never) -> None:
    with Interruptible() as block:
        state = {} if hang_up is None else {"state": {DISCONNECT_KEY: hang_up}}
        stop = watch_for_disconnect(state, receive, block)
        try:
            await asyncio.Event().wait()
        finally:
            stop()


async def test_a_caller_that_goes_ends_the_request() -> None:
    asked: list[str] = []
    hang_up = DisconnectNotifier(lambda: asked.append("read on"))
    request = asyncio.create_task(_waits(hang_up))
    await asyncio.sleep(0)
    hang_up.happen()
    with pytest.raises(ClientGoneError):
        await request
    assert asked == ["read on"]


async def test_a_caller_that_went_before_anybody_listened_ends_the_request() -> None:
    hang_up = DisconnectNotifier(lambda: None)
    hang_up.happen()
    with pytest.raises(ClientGoneError):
        await _waits(hang_up)


async def test_nobody_is_told_who_does_not_listen_any_more() -> None:
    hang_up, told = DisconnectNotifier(lambda: None), list[str]()
    hang_up.listen(lambda: told.append("gone"))
    hang_up.ignore()
    hang_up.happen()
    assert told == []


async def test_without_a_word_of_the_server_the_request_waits_to_receive_the_hang_up() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        await _waits(None, receive)
