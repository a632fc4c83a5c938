"""The slots of a server over a library: requests have one each, an erasure has all."""

import threading
from typing import cast

import pytest

from runner_svc.engine_host.http_server import Caller, GoneError, Turn, _Turns

SECONDS = 10.0


class _Caller:
    def __init__(self) -> None:
        self.left = False

    def raise_if_gone(self) -> None:
        if self.left:
            raise GoneError


def _caller() -> Caller:
    return cast("Caller", _Caller())


def test_request_for_all_slots_goes_before_later_requests() -> None:
    turns, order = _Turns(2), list[str]()
    asks = threading.Event()

    def erase() -> None:
        class Asking(_Caller):
            def raise_if_gone(self) -> None:
                asks.set()  # it waits for the slot of the running request

        with turns.hold(Turn.ALL, cast("Caller", Asking())):
            order.append("erased")

    def request() -> None:
        with turns.hold(Turn.ONE, _caller()):
            order.append("request")

    threads = [threading.Thread(target=erase), threading.Thread(target=request)]
    with turns.hold(Turn.ONE, _caller()):
        threads[0].start()
        assert asks.wait(SECONDS)
        threads[1].start()
        threads[1].join(0.1)
        assert not order, "a slot is free, but it is not this request's turn"
    for thread in threads:
        thread.join(SECONDS)
    assert order == ["erased", "request"]


def test_departing_caller_frees_its_place() -> None:
    turns, gone = _Turns(1), _Caller()
    gone.left = True
    for turn in (Turn.ONE, Turn.ALL):
        with turns.hold(Turn.ONE, _caller()), pytest.raises(GoneError), turns.hold(turn, cast("Caller", gone)):
            pass
    with turns.hold(Turn.ALL, _caller()):
        pass
    with turns.hold(Turn.ONE, _caller()):
        pass
