"""A gateway without keys: other users of the machine infer and read, and change nothing."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from gateway_script import serving
from starlette.types import Scope

from gateway.auth.authentication import Gate
from gateway.gateway_config import GatewayConfig
from gateway.http import protocol
from weft.kernel.access.peer_user import End
from weft.kernel.access.principal import OTHER_USER, Principal

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CHANGES = [
    ("PUT", "/api/v1/models/x", {}),
    ("DELETE", "/api/v1/models/tiny", None),
    ("POST", "/api/v1/apply", {}),
    ("POST", "/api/pull", {"model": "x"}),
]
LOOKUPS: list[tuple[End, End]] = []


@pytest.fixture(autouse=True)
def _other_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def is_own_user(peer: End, local: End) -> bool:
        LOOKUPS.append((peer, local))
        return False

    monkeypatch.setattr(protocol, "is_own_user", is_own_user)
    yield
    LOOKUPS.clear()


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_change_of_another_user_is_refused_with_what_to_do(method: str, path: str, body: object) -> None:
    async with serving() as gateway:
        answer = await gateway.request(method, path, body)
    assert answer.status == 403
    message = answer.error if isinstance(answer.error, str) else answer.error["message"]
    assert "weft keys create" in message
    assert "group weft" in message


async def test_other_user_infers_and_reads() -> None:
    async with serving() as gateway:
        chat = await gateway.request("POST", "/v1/chat/completions", CHAT)
        (context,) = gateway.dispatcher.contexts
        for path in ("/v1/models", "/api/v1/models", "/metrics", "/health", "/ui/"):
            assert (await gateway.request("GET", path)).status == 200, path
    assert chat.status == 200
    assert context.caller == "other-user"


async def test_user_is_looked_up_once_per_connection_with_its_ends() -> None:
    async with serving() as gateway, gateway.connection() as (reader, writer):
        for _ in range(3):
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.partition(b":")[2]))
        ends = writer.get_extra_info("sockname")[:2], writer.get_extra_info("peername")[:2]
    assert [ends] == LOOKUPS


async def test_probe_needs_no_look_up() -> None:
    async with serving() as gateway:
        assert (await gateway.request("GET", "/livez")).status == 200
    assert LOOKUPS == []


@pytest.mark.parametrize(
    "config",
    [GatewayConfig(port=0, public_scheme="http"), GatewayConfig(port=0, tls_terminated_elsewhere=True)],
    ids=["Envoy of the mesh", "proxy of the operator"],
)
async def test_callers_behind_a_proxy_are_unknown_users(monkeypatch: pytest.MonkeyPatch, config: GatewayConfig) -> None:
    """A proxy of the same user would lend its rights to everyone."""
    monkeypatch.setattr(protocol, "is_own_user", lambda *_: True)
    async with serving(config=config) as gateway:
        changes = await gateway.request("DELETE", "/api/v1/models/nope")
        reads = await gateway.request("GET", "/v1/models")
    assert (changes.status, reads.status) == (403, 200)


CALLS = """
import encodings.idna, os, socket, sys
os.setgroups([]); os.setgid(65533); os.setuid(65533)
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as opened:
    opened.sendall(b"DELETE /api/v1/models/nope HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\n\\r\\n")
    print(opened.recv(64).split()[1].decode())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
async def test_process_of_another_user_is_told_from_one_of_the_same_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    async with serving() as gateway:
        own = await gateway.request("DELETE", "/api/v1/models/nope")
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CALLS, str(gateway.service.port)), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await program.communicate()
    assert out.decode().strip() == "403"
    assert own.status != 403


LEAVES = """
import encodings.idna, os, socket, struct, sys
os.setgroups([]); os.setgid(65533); os.setuid(65533)
opened = socket.socket()
opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
opened.bind(("127.0.0.1", int(sys.argv[2])))
opened.connect(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
sys.stdin.readline()
opened.sendall(b"DELETE /api/v1/models/nope HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n")
opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
opened.close()
"""


def _program(*arguments: object) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", LEAVES, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
async def test_request_does_not_count_as_that_of_the_user_who_has_its_port_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy gateway reads it after its sender has gone and a process of this user has connected from there."""
    monkeypatch.undo()
    callers: list[str] = []
    admit = Gate.admit

    def noted(gate: Gate, scope: Scope) -> Principal:
        callers.append(admit(gate, scope).name)
        return OTHER_USER

    monkeypatch.setattr(Gate, "admit", noted)
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    async with serving() as gateway:
        with _program(gateway.service.port, port) as program, socket.socket() as own:
            assert program.stdout is not None
            await asyncio.to_thread(program.stdout.readline)
            await asyncio.sleep(0.1)
            # From here on the gateway's loop is busy.
            program.communicate(b"\n")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(("127.0.0.1", port))
            own.connect(("127.0.0.1", gateway.service.port))
            await asyncio.sleep(0.2)
    assert callers in ([], ["other-user"])
