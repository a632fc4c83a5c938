"""Certificates that are replaced while calls run: no call fails, and the new ones count from then on."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from tls_stage import ECHO, SECONDS, count, refusal_of, say, say_to, serving

from weft.kernel.channels.rpc import open_channel
from weft.kernel.channels.tls import ServerTls
from weft.kernel.channels.tls_channel import MAX_RETIRED, ChannelSecurity
from weft_testing.certificates import Authority

CALLERS = 8
CALLS = 40
ROTATIONS = 5


def security(folder: Path, ca: Authority) -> ChannelSecurity:
    files = ca.issue("weft://mesh/caller-0").write(folder, ca, name="caller")
    return ChannelSecurity(files=files, reload_interval_seconds=0.0)


async def test_server_presents_its_new_certificate_to_new_connections(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    files = old.issue("127.0.0.1").write(tmp_path, name="server")
    trusting_new = new.issue("caller").write(tmp_path, new, name="caller")
    async with serving(ServerTls(files=files)) as (address, _):
        assert "trusted authority" in await refusal_of(address, trusting_new)
        new.issue("127.0.0.1").write(tmp_path, name="server")
        assert await say_to(address, trusting_new) == b"hello"


async def test_server_trusts_new_roots_without_a_restart(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    own = old.issue("127.0.0.1")
    tls = ServerTls(files=own.write(tmp_path, old, name="server"), requires_clients=True)
    caller = new.issue("caller").write(tmp_path, old, name="caller")
    async with serving(tls) as (address, _):
        await refusal_of(address, caller)
        own.write(tmp_path, new, name="server")
        assert await say_to(address, caller) == b"hello"


async def test_client_presents_its_new_certificate_at_the_next_call(
    ca: Authority, mutual: ServerTls, tmp_path: Path
) -> None:
    tls = replace(mutual, allowed_clients=("weft://mesh/caller-0",))
    async with serving(tls) as (address, _), open_channel(address, security(tmp_path, ca)) as channel:
        method: Any = channel.unary_unary(ECHO)
        assert await method(b"hello", timeout=SECONDS) == b"hello"
        ca.issue("weft://mesh/other").write(tmp_path, ca, name="caller")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await method(b"hello", timeout=SECONDS)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        ca.issue("weft://mesh/caller-0").write(tmp_path, ca, name="caller")
        assert await method(b"hello", timeout=SECONDS) == b"hello"


async def test_calls_survive_certificate_rotation_at_both_ends_under_load(
    ca: Authority, mutual: ServerTls, tmp_path: Path
) -> None:
    async with serving(mutual) as (address, _), open_channel(address, security(tmp_path, ca)) as channel:

        async def call_again_and_again() -> int:
            return sum([await say(channel) == b"hello" for _ in range(CALLS)])

        async def rotate() -> None:
            for number in range(ROTATIONS):
                ca.issue("127.0.0.1").write(tmp_path, ca, name="server")
                ca.issue(f"weft://mesh/caller-{number}").write(tmp_path, ca, name="caller")
                await say(channel)

        answered = await asyncio.gather(*(call_again_and_again() for _ in range(CALLERS)), rotate())
    assert answered[:CALLERS] == [CALLS] * CALLERS


async def test_stream_survives_client_certificate_rotation_and_its_connection_closes_afterwards(
    ca: Authority, mutual: ServerTls, tmp_path: Path
) -> None:
    async with serving(mutual) as (address, echo), open_channel(address, security(tmp_path, ca)) as channel:
        stream = count(channel)
        assert await stream.read() == b"1"
        ca.issue("weft://mesh/caller-1").write(tmp_path, ca, name="caller")
        assert await say(channel) == b"hello"
        (retired,) = channel.connections.retired  # type: ignore[attr-defined]
        assert retired.channel.get_state() is grpc.ChannelConnectivity.READY
        echo.go_on.set()
        assert [await stream.read(), await stream.read()] == [b"2", grpc.aio.EOF]
        await asyncio.gather(*channel.closing)  # type: ignore[attr-defined]
        assert channel.connections.retired == []  # type: ignore[attr-defined]
        assert retired.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_connections_with_old_certificates_do_not_accumulate(
    ca: Authority, mutual: ServerTls, tmp_path: Path
) -> None:
    async with serving(mutual) as (address, _), open_channel(address, security(tmp_path, ca)) as channel:
        streams = []
        for number in range(MAX_RETIRED + 2):
            stream = count(channel)
            assert await stream.read() == b"1"
            streams.append(stream)
            ca.issue(f"weft://mesh/caller-{number}").write(tmp_path, ca, name="caller")
        await say(channel)
        assert len(channel.connections.retired) == MAX_RETIRED  # type: ignore[attr-defined]
        assert await streams[0].code() is grpc.StatusCode.CANCELLED
        assert not streams[-1].done()


async def test_unusable_files_keep_the_old_ones_and_raise_one_alarm(ca: Authority, tmp_path: Path) -> None:
    files = ca.issue("127.0.0.1").write(tmp_path, name="server")
    caller = ca.issue("caller").write(tmp_path, ca, name="caller")
    assert files.certificate_file is not None
    async with serving(ServerTls(files=files)) as (address, _):
        for broken in (b"", b"no PEM", ca.issue("127.0.0.1").certificate, ca.issue_expired("127.0.0.1").certificate):
            with capture_logs() as logs:
                files.certificate_file.write_bytes(broken)
                assert await say_to(address, caller) == b"hello"
                assert await say_to(address, caller) == b"hello"
            assert [line["log_level"] for line in logs] == ["error"]
        ca.issue("127.0.0.2").write(tmp_path, name="server")
        assert await refusal_of(address, caller) == "the peer's certificate is for another name"
