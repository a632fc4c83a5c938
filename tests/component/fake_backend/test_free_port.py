"""Ports that tests give to servers."""

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from weft_testing import free_port as module
from weft_testing.free_port import FIRST_PORT, LAST_PORT, free_port, free_ports


def test_port_is_below_the_ephemeral_range() -> None:
    assert all(FIRST_PORT <= free_port() <= LAST_PORT for _ in range(20))


def test_unbound_reserved_port_is_not_given_to_another_process() -> None:
    """Two servers of one test were given the same port: the second to start found it taken."""
    program = "from weft_testing.free_port import free_port\nprint([free_port() for _ in range(100)])"
    asked = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    given = [free_port() for _ in range(100)]
    for each in asked:
        given += json.loads(each.communicate()[0])
    assert len(set(given)) == len(given) == 300


def test_consecutive_ports_are_all_free() -> None:
    first = free_ports(5)
    sockets = [socket.create_server(("127.0.0.1", port)) for port in range(first, first + 5)]
    for each in sockets:
        each.close()


def test_port_in_use_is_not_returned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = free_ports(3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "FIRST_PORT", first)
    monkeypatch.setattr(module, "LAST_PORT", first + 2)
    monkeypatch.setattr(module, "MAX_TRIES", 3)
    with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", first + 2)):
        assert free_port() == first + 1
        with socket.create_server(("127.0.0.1", first + 1)), pytest.raises(OSError, match="3 times"):
            free_port()
