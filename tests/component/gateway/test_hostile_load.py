"""Many hostile connections to a gateway at once: its memory stays bounded, and normal callers get their answers.

The times of normal callers, which are a process of their own, are printed, and not judged: attacker and gateway share
the processors here.

    python test_hostile_load.py PORT      # prints the 99th percentile of the callers' times in milliseconds
"""

import asyncio
import gzip
import json
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from time import perf_counter

import pytest
from bad_inputs_stage import ENDPOINTS, HERE, Victim, good_body, victim

from gateway.gateway_config import ConnectionLimits

pytestmark = pytest.mark.timeout(300)

MEBIBYTE = 1024 * 1024
CALLERS = 4
CALLS = 250
"""Of each caller, one after the other on its connection."""
FEW_CALLS = 50
IDLE = min(9_900, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 - 100)
AT_ONCE = 64
MAX_GROWTH_BYTES = 160 * MEBIBYTE
MAX_REPEATED_BYTES = 48 * MEBIBYTE
"""What the same attack leaves behind when it comes twice more."""
HOLD_SECONDS = 5.0
_BODY = good_body(ENDPOINTS[0])
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Victim]:
    with victim(tmp_path, patient=True) as found:
        yield found


@asynccontextmanager
async def _opened(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _called(port: int, calls: int = CALLS) -> list[float]:
    """The seconds of the calls of one caller, all of which succeed."""
    times = []
    async with _opened(port) as (reader, writer):
        for _ in range(calls):
            began = perf_counter()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            json.loads(await reader.readexactly(size))
            times.append(perf_counter() - began)
    return times


async def _p99_ms(port: int) -> float:
    """Of callers in another process."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.getcwd()])  # noqa: PTH109
    callers = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, str(port)), stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    printed, _ = await callers.communicate()
    assert callers.returncode == 0
    return float(printed)


async def _call(port: int) -> None:
    times = sorted(chain.from_iterable(await asyncio.gather(*(_called(port) for _ in range(CALLERS)))))
    sys.stdout.write(f"{times[len(times) * 99 // 100] * 1000}\n")


@asynccontextmanager
async def _idle(port: int) -> AsyncIterator[None]:
    """Each has made one request, and is kept for another."""
    async with AsyncExitStack() as held:

        async def use() -> None:
            reader, writer = await held.enter_async_context(_opened(port))
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

        for first in range(0, IDLE, AT_ONCE):
            await asyncio.gather(*(use() for _ in range(min(AT_ONCE, IDLE - first))))
        yield


@asynccontextmanager
async def _slow_readers(port: int) -> AsyncIterator[None]:
    """Hundreds that ask for a large page, again and again, and read nothing."""
    async with AsyncExitStack() as held:
        for _ in range(200):
            _, writer = await held.enter_async_context(_opened(port))
            transport = writer.transport
            assert isinstance(transport, asyncio.ReadTransport)
            transport.pause_reading()
            writer.write(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
        yield


Attack = Callable[[int], AbstractAsyncContextManager[None]]


def _repeating(attack: Callable[[int], Awaitable[None]]) -> Attack:
    @asynccontextmanager
    async def repeated(port: int) -> AsyncIterator[None]:
        async def again() -> None:
            while True:
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    await attack(port)

        attackers = [asyncio.create_task(again()) for _ in range(AT_ONCE)]
        await asyncio.sleep(1)
        yield
        for each in attackers:
            each.cancel()
        ended = await asyncio.gather(*attackers, return_exceptions=True)
        assert not [each for each in ended if not isinstance(each, asyncio.CancelledError)]

    return repeated


async def _send_headers(port: int) -> None:
    """Headers without an end."""
    async with _opened(port) as (reader, writer):
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n")
        for number in range(200):
            writer.write(b"X-%d: %s\r\n" % (number, b"a" * 1000))
        assert (await reader.read(12)) in (b"HTTP/1.1 431", b"")


@cache
def _bomb() -> bytes:
    """64 KiB that are 64 MiB of zeros."""
    return gzip.compress(b'{"a":"' + bytes(64 * MEBIBYTE))


async def _send_bomb(port: int) -> None:
    async with _opened(port) as (reader, writer):
        writer.write(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(_bomb()) + _bomb())
        assert (await reader.read(12)) in (b"HTTP/1.1 413", b"")


ATTACKS: Mapping[str, Attack] = {
    "idle connections": _idle,
    "slow readers": _slow_readers,
    "header floods": _repeating(_send_headers),
    "decompression bombs": _repeating(_send_bomb),
}


@pytest.mark.nightly("floods a gateway")
@pytest.mark.parametrize("name", ATTACKS)
async def test_memory_is_bounded_and_normal_callers_are_answered_under_an_attack(name: str, gateway: Victim) -> None:
    alone, before = await _p99_ms(gateway.port), gateway.resident_bytes()
    held, left = [], []
    # Without normal callers: they would free what fragments the memory between two attacks.
    for _ in range(3):
        async with ATTACKS[name](gateway.port):
            await asyncio.sleep(HOLD_SECONDS)
            held.append(gateway.resident_bytes())
        await asyncio.sleep(1)
        left.append(gateway.resident_bytes())
    async with ATTACKS[name](gateway.port):
        attacked = await _p99_ms(gateway.port)
    sys.stdout.write(
        f"{name}: p99 {alone:.1f} ms alone, {attacked:.1f} ms under attack; memory {before // MEBIBYTE} MiB, "
        f"{[each // MEBIBYTE for each in held]} under attack, then {[each // MEBIBYTE for each in left]}\n"
    )
    assert max(held) - before < MAX_GROWTH_BYTES
    assert left[-1] - left[0] < MAX_REPEATED_BYTES


FLOODERS = 1_000
"""Connections of a header flood, which stay open."""
CONNECTION_BYTES = 24 * 1024
"""Maximum memory of a connection itself, and of its refusal."""
SLACK_BYTES = 8 * MEBIBYTE
"""Memory that the allocator keeps for the heads that were just read."""
_LINE = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
_LIMIT = ConnectionLimits().max_header_bytes
FLOODS: Mapping[str, tuple[bytes, bytes, int]] = {
    "one header that goes on": (_LINE + b"X-A: " + b"a" * (_LIMIT - 100), b"", 2 * _LIMIT),
    "many headers that go on": (
        _LINE + b"".join(b"X-%d: %b\r\n" % (n, b"a" * 300) for n in range(98)),
        b"",
        2 * _LIMIT,
    ),
    "one header that is too large": (_LINE + b"X-A: " + b"a" * 250_000, b"HTTP/1.1 431", 0),
    "headers that are too many": (
        _LINE + b"".join(b"X-%d: %b\r\n" % (n, b"a" * 1000) for n in range(200)),
        b"HTTP/1.1 431",
        0,
    ),
}
"""What each connection sends, how it is answered (empty: not yet), and the most that is held of it."""


@asynccontextmanager
async def _flood(port: int, head: bytes, answer: bytes) -> AsyncIterator[None]:
    async with AsyncExitStack() as held:

        async def send() -> None:
            reader, writer = await held.enter_async_context(_opened(port))
            writer.write(head)
            with suppress(ConnectionError):
                await writer.drain()
                assert await reader.read(len(answer)) == answer

        for _ in range(FLOODERS // AT_ONCE):
            await asyncio.gather(*(send() for _ in range(AT_ONCE)))
        yield


@pytest.mark.slow("opens a thousand connections to a process")
@pytest.mark.parametrize("name", FLOODS)
async def test_header_flood_holds_at_most_the_head_limit_of_each_connection(name: str, gateway: Victim) -> None:
    head, answer, most_bytes = FLOODS[name]
    await _called(gateway.port, FEW_CALLS)
    before = gateway.resident_bytes()
    async with _flood(gateway.port, head, answer):
        held = gateway.resident_bytes() - before
        await _called(gateway.port, FEW_CALLS)
    sys.stdout.write(f"{name}: holds {held // FLOODERS} bytes of each\n")
    assert held < FLOODERS * (most_bytes + CONNECTION_BYTES) + SLACK_BYTES


if __name__ == "__main__":
    asyncio.run(_call(int(sys.argv[1])))
