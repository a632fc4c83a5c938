"""Notification of a request about its caller's disconnect."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive

from gateway.answers.sse_writer import EventStream, SlowReaderError
from gateway.errors import ClientGoneError
from gateway.gateway_config import GatewayConfig
from gateway.http.disconnect import (
    ABORT_KEY,
    DISCONNECT_KEY,
    DisconnectNotifier,
    WhileConnected,
    cut_off,
    watch_for_disconnect,
)
from gateway.http.event_watches import EventWatches
from gateway.request_facts import FACTS_KEY, RequestFacts
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.cancellation import Interruptible
from weft.kernel.time.clock import SystemClock
from weft.kernel.time.deadlines import Deadlines


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


async def test_client_disconnect_ends_the_request() -> None:
    asked: list[str] = []
    hang_up = DisconnectNotifier(lambda: asked.append("read on"))
    request = asyncio.create_task(_waits(hang_up))
    await asyncio.sleep(0)
    hang_up.happen()
    with pytest.raises(ClientGoneError):
        await request
    assert asked == ["read on"]


async def test_disconnect_before_listening_ends_the_request() -> None:
    hang_up = DisconnectNotifier(lambda: None)
    hang_up.happen()
    with pytest.raises(ClientGoneError):
        await _waits(hang_up)


async def test_removed_listener_is_not_notified() -> None:
    hang_up, told = DisconnectNotifier(lambda: None), list[str]()
    hang_up.listen(lambda: told.append("gone"))
    hang_up.ignore()
    hang_up.happen()
    assert told == []


async def test_disconnect_is_detected_by_receive_without_a_server_notification() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        await _waits(None, receive)


async def test_deadline_ends_the_block_even_after_its_guards_are_dismissed() -> None:
    hang_up = DisconnectNotifier(lambda: None)
    scope = {"state": {DISCONNECT_KEY: hang_up}, "app": SimpleNamespace(cut_offs=Deadlines(cut_off))}

    async def work() -> None:
        with WhileConnected(scope, _never, cut_off_seconds=0) as block:
            block.dismiss_guards()
            hang_up.happen()
            await asyncio.Event().wait()

    with pytest.raises(WeftError, match="deadline") as ended:
        await work()
    assert ended.value.reason is Reason.DEADLINE_EXCEEDED


async def test_reader_that_ignores_the_last_event_of_a_failed_watch_is_disconnected() -> None:
    """The connection of a watch that failed was left open to a caller that did not read why."""
    gone = asyncio.Event()

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: {}\n\n"
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry is gone")

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if b"the registry is gone" in message.get("body", b""):
            await asyncio.Event().wait()

    config = GatewayConfig(port=0, write_timeout_seconds=0.01)
    fleet = SimpleNamespace(view=FleetView())
    deps: Any = SimpleNamespace(config=config, clock=SystemClock(), watches=EventWatches(1), fleet=fleet)
    facts = RequestFacts(request_id="r", arrived=0)
    scope = {"type": "http", "headers": [], "state": {ABORT_KEY: gone.set}, FACTS_KEY: facts}
    with pytest.raises(SlowReaderError):
        await EventStream(deps, events())(scope, receive, send)
    assert gone.is_set()
