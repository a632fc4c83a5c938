"""Which addresses processes of the mesh connect to for others."""

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from weft.kernel.channels.outbound import (
    MESH_PROCESS,
    ForbiddenAddressError,
    Outbound,
    is_link_local,
    listeners_of,
    own_listeners,
)

ANY, PUBLIC = Outbound(own_listeners=tuple), Outbound(is_public_only=True, own_listeners=tuple)
LINK_LOCAL = (
    "169.254.169.254",
    "169.254.0.1",
    "168.63.129.16",
    "100.100.100.200",
    "fe80::1",
    "fe80::1%1",
    "fd00:ec2::254",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
)
PRIVATE = ("127.0.0.1", "::1", "10.0.0.1", "192.168.1.20", "100.64.0.7", "fd12::1", "::ffff:10.0.0.1")
OPEN = ("8.8.8.8", "2606:4700:4700::1111")


@pytest.mark.parametrize("address", LINK_LOCAL)
def test_nobody_may_name_link_local_addresses(address: str) -> None:
    assert is_link_local(address)
    for rules in (ANY, PUBLIC):
        with pytest.raises(ForbiddenAddressError, match="is link-local"):
            rules.require(address, 80)


@pytest.mark.parametrize("address", PRIVATE)
def test_only_those_who_may_use_any_address_reach_private_ones(address: str) -> None:
    ANY.require(address, 80)
    with pytest.raises(ForbiddenAddressError, match="is not public"):
        PUBLIC.require(address, 80)


@pytest.mark.parametrize("address", OPEN)
def test_everybody_reaches_public_addresses(address: str) -> None:
    ANY.require(address, 80)
    PUBLIC.require(address, 80)


@pytest.mark.parametrize("host", ["localhost", "box.local", "", "2852039166"])
def test_names_are_not_link_local_before_they_are_resolved(host: str) -> None:
    assert not is_link_local(host)


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"])
def test_nobody_may_name_the_meshs_own_listeners(address: str, host: str) -> None:
    rules = Outbound(own_listeners=lambda: [(host, 8080)])
    with pytest.raises(ForbiddenAddressError, match="is a port of the mesh itself"):
        rules.require(address, 8080)
    rules.require(address, 8081)
    rules.require("192.0.2.1", 8080)


def test_another_program_may_listen_on_the_meshs_port_at_another_address() -> None:
    rules = Outbound(own_listeners=lambda: [("192.168.1.5", 8080)])
    rules.require("127.0.0.1", 8080)
    rules.require("0.0.0.0", 8080)
    with pytest.raises(ForbiddenAddressError):
        rules.require("192.168.1.5", 8080)


def test_listeners_are_those_of_the_process(listener: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Those of other tests are too old. Not time.monotonic itself, by which tests are limited.
    monkeypatch.setattr("weft.kernel.channels.outbound.time", SimpleNamespace(monotonic=lambda: listener * 1e4))
    assert ("0.0.0.0", listener) in listeners_of(os.getpid())


def test_runner_knows_the_listeners_of_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.kernel.channels.outbound.listeners_of", lambda process: {("::", process)})
    assert not own_listeners()
    monkeypatch.setenv(MESH_PROCESS, str(os.getpid()))
    assert not own_listeners()
    monkeypatch.setenv(MESH_PROCESS, str(os.getppid()))
    assert own_listeners() == {("::", os.getppid())}


def found(*addresses: str) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in addresses]


def test_name_resolves_to_the_addresses_that_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of the local network has link-local addresses beside others."""
    answers = iter([found("169.254.1.2", "10.0.0.1"), found("169.254.1.2")])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: next(answers))
    assert [info[4][0] for info in ANY.resolve("box.local", 80)] == ["10.0.0.1"]
    with pytest.raises(ForbiddenAddressError):
        ANY.resolve("box.local", 80)


def test_address_in_another_notation_is_checked_as_what_it_is() -> None:
    for host in ("0xa9fea9fe", "2852039166", "169.254.43518"):
        with pytest.raises(ForbiddenAddressError):
            ANY.resolve(host, 80)


def test_socket_for_a_forbidden_address_is_refused_as_unreachable() -> None:
    with pytest.raises(PermissionError):
        ANY.open_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("169.254.169.254", 80)))
    ANY.open_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))).close()
