"""Ports from a range: each free port goes to one engine, and the end of the range is an error."""

import socket

import pytest
from kit.failures import fails

from runner_svc.backend.engine_process import EnginePorts, PortRange, parse_port_range
from weft.kernel.reasons import Reason


def _listen(port: int = 0) -> socket.socket:
    taken = socket.socket()
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
    except OSError:
        taken.close()
        raise
    return taken


def _free_neighbours(count: int) -> int:
    for first in range(42_000, 60_000, count):
        try:
            for port in range(first, first + count):
                _listen(port).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@pytest.mark.parametrize("text", ["41000-41099", "1024-1024", "65535-65535"])
def test_port_range_is_two_ports(text: str) -> None:
    assert str(parse_port_range(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "41000", "41000-", "-41000", "41099-41000", "80-90", "65000-65536", "1024-65535", "a-b", "1" * 5000 + "-2",
     "\u0664\u0661000-41000"],
)  # fmt: skip
def test_invalid_port_range_is_refused_by_name(text: str) -> None:
    with fails(field="runners.a.port_range"):
        parse_port_range(text, "runners.a.port_range")


def test_each_port_is_assigned_once_until_returned() -> None:
    first = _free_neighbours(3)
    ports = EnginePorts(PortRange(first=first, last=first + 2))
    assert [ports.take(), ports.take(), ports.take()] == [first, first + 1, first + 2]
    with fails(Reason.CONNECT_FAILED) as none_left:
        ports.take()
    assert f"{first}-{first + 2}" in none_left.value.message
    ports.give_back(first + 1)
    ports.give_back(first + 1)
    assert ports.take() == first + 1


def test_occupied_ports_are_skipped() -> None:
    first = _free_neighbours(3)
    with _listen(first), _listen(first + 1):
        assert EnginePorts(PortRange(first=first, last=first + 2)).take() == first + 2


def test_port_lost_to_another_process_is_not_retried() -> None:
    first = _free_neighbours(2)
    ports = EnginePorts(PortRange(first=first, last=first + 1))
    assert ports.take({first}) == first + 1
