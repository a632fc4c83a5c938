"""Ports that tests give to servers."""

import socket

import pytest

from weft_testing import free_port as module
from weft_testing.free_port import FIRST_PORT, LAST_PORT, free_port, free_ports


def test_a_port_is_below_those_that_the_kernel_gives_to_connections() -> None:
    assert all(FIRST_PORT <= free_port() <= LAST_PORT for _ in range(20))


def test_ports_in_a_row_are_all_free() -> None:
    first = free_ports(5)
    sockets = [socket.create_server(("127.0.0.1", port)) for port in range(first, first + 5)]
    for each in sockets:
        each.close()


def test_a_port_on_which_somebody_listens_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_ports(3)
    monkeypatch.setattr(module, "FIRST_PORT", first)
    monkeypatch.setattr(module, "LAST_PORT", first + 2)
    monkeypatch.setattr(module, "MAX_TRIES", 3)
    with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", first + 2)):
        assert free_port() == first + 1
        with socket.create_server(("127.0.0.1", first + 1)), pytest.raises(OSError, match="3 times"):
            free_port()
