"""Who holds the other end of a connection within this machine: real sockets, and processes of another user."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest

from weft.kernel.access import peer_user
from weft.kernel.access.peer_user import UNKNOWN_UID, WEFT_GROUP, is_own_user

NOBODY = 65_533
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
CONNECTS = """
import encodings.idna, os, socket, sys
uid = int(sys.argv[1])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
with socket.create_connection((sys.argv[2], int(sys.argv[3]))) as opened:
    opened.recv(1)
"""


@contextmanager
def _of_another_user(address: str, server: socket.socket) -> Iterator[socket.socket]:
    port = str(server.getsockname()[1])
    with subprocess.Popen([sys.executable, "-c", CONNECTS, str(NOBODY), address, port]) as other:
        with closing(server.accept()[0]) as accepted:
            yield accepted
        assert other.wait(10) == 0


def _server(address: str) -> socket.socket:
    server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    server.settimeout(10)
    return server


def _is_own(accepted: socket.socket) -> bool:
    return is_own_user(accepted.getpeername()[:2], accepted.getsockname()[:2])


@pytest.fixture(params=["kernel", "processes"])
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What tells: the kernel, or, as on other systems, the list of this user's processes."""
    if request.param == "processes":
        monkeypatch.setattr(peer_user, "_kernel_reports", lambda: False)
        monkeypatch.setattr(peer_user, "_own_processes", lambda: [os.getpid()])
    elif not peer_user._kernel_reports():
        pytest.skip("this kernel does not tell")
    return str(request.param)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
@pytest.mark.usefixtures("source")
def test_end_of_this_user_is_recognized(address: str) -> None:
    with _server(address) as server, socket.create_connection(server.getsockname()[:2]), server.accept()[0] as accepted:
        assert _is_own(accepted)


@AS_ROOT
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.usefixtures("source")
def test_end_of_another_user_is_not_own(address: str) -> None:
    with _server(address) as server, _of_another_user(address, server) as accepted:
        assert not _is_own(accepted)


@pytest.mark.usefixtures("source")
def test_end_that_is_closed_is_of_nobody() -> None:
    """Its user would be 0, which is this one in a container."""
    with _server("127.0.0.1") as server:
        with socket.create_connection(server.getsockname()):
            accepted = server.accept()[0]
        with accepted:
            assert not _is_own(accepted)


def _group(gid: int, *members: str) -> SimpleNamespace:
    return SimpleNamespace(gr_gid=gid, gr_mem=list(members))


@pytest.mark.parametrize(
    ("uid", "own_gid", "is_trusted"),
    [(1000, 77, True), (1001, 77, False), (1000, 78, False), (UNKNOWN_UID, 77, False), (0, 77, False)],
    ids=["member", "no member", "weft runs with another group", "unknown user", "root, such as a proxy"],
)
def test_members_of_wefts_group_count_as_its_user(
    monkeypatch: pytest.MonkeyPatch, uid: int, own_gid: int, *, is_trusted: bool
) -> None:
    users = {"ann": 1000, "bob": 1001, "nobody": UNKNOWN_UID}
    monkeypatch.setattr(os, "geteuid", lambda: 990)
    monkeypatch.setattr(os, "getegid", lambda: own_gid)
    monkeypatch.setattr("grp.getgrnam", {WEFT_GROUP: _group(77, "ann", "nobody", "gone")}.__getitem__)
    monkeypatch.setattr("pwd.getpwnam", lambda name: SimpleNamespace(pw_uid=users[name]))
    assert peer_user._is_trusted(uid) is is_trusted
