"""The socket that is cut: what passes, what waits, and what ends."""

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from weft_testing.cut_socket import CutSocket, cut_socket

WAIT_SECONDS = 5.0
SILENCE_SECONDS = 0.3


@pytest.fixture
def target(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "target"))
        server.listen()
        server.settimeout(WAIT_SECONDS)
        yield server


@pytest.fixture
def network(tmp_path: Path) -> Iterator[CutSocket]:
    with cut_socket(tmp_path / "front", tmp_path / "target") as found:
        yield found


def _connected(folder: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(WAIT_SECONDS)
    client.connect(str(folder / "front"))
    return client


def _is_silent(end: socket.socket) -> bool:
    end.settimeout(SILENCE_SECONDS)
    try:
        return end.recv(100) is None
    except TimeoutError:
        return True
    finally:
        end.settimeout(WAIT_SECONDS)


def test_what_was_held_up_passes_when_it_heals(tmp_path: Path, target: socket.socket, network: CutSocket) -> None:
    with closing(_connected(tmp_path)) as client, closing(target.accept()[0]) as server:
        client.sendall(b"before")
        assert server.recv(100) == b"before"
        network.cut()
        client.sendall(b"held up")
        assert _is_silent(server)
        network.heal()
        assert server.recv(100) == b"held up"
        server.sendall(b"answer")
        assert client.recv(100) == b"answer"


def test_what_was_held_up_is_lost_with_its_connection_where_that_is_forgotten(
    tmp_path: Path, target: socket.socket, network: CutSocket
) -> None:
    with closing(_connected(tmp_path)) as client, closing(target.accept()[0]) as server:
        client.sendall(b"before")
        assert server.recv(100) == b"before"
        network.cut()
        client.sendall(b"lost")
        assert _is_silent(server)
        network.heal(forgets=True)
        assert server.recv(100) == b""
        with pytest.raises(ConnectionError):
            _end_of(client)
    with closing(_connected(tmp_path)) as client, closing(target.accept()[0]) as server:
        client.sendall(b"after")
        assert server.recv(100) == b"after"


@pytest.mark.usefixtures("network")
def test_a_target_that_is_not_there_ends_the_connection_and_is_found_when_it_is_back(tmp_path: Path) -> None:
    with closing(_connected(tmp_path)) as client:
        assert client.recv(100) == b""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "target"))
        server.listen()
        with closing(_connected(tmp_path)) as client, closing(server.accept()[0]) as end:
            client.sendall(b"back")
            assert end.recv(100) == b"back"


def _end_of(client: socket.socket) -> None:
    """Raises ConnectionError at the end of a connection, whether it was closed or reset."""
    if client.recv(100) == b"":
        raise ConnectionResetError
