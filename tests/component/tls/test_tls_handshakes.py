"""Who may talk to whom: every wrong certificate is refused in words, and the right one is not."""

from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from tls_stage import count, refusal_of, say, say_to, serving

from weft.kernel.channels.rpc import open_channel
from weft.kernel.channels.tls import ServerTls, TlsFiles
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.certificates import Authority, Pair

CLOSED = "the peer closed the connection immediately; it may ask for TLS, or for another certificate"


def caller(folder: Path, pair: Pair, ca: Authority) -> TlsFiles:
    return pair.write(folder, ca, name="caller")


async def test_client_with_a_certificate_of_the_right_ca_is_answered(
    ca: Authority, mutual: ServerTls, tmp_path: Path
) -> None:
    async with serving(mutual) as (address, _):
        assert address.startswith("tls:127.0.0.1:")
        assert await say_to(address, caller(tmp_path, ca.issue("caller"), ca)) == b"hello"


async def test_client_without_a_certificate_is_rejected(ca: Authority, mutual: ServerTls, tmp_path: Path) -> None:
    files = caller(tmp_path, ca.issue("caller"), ca)
    async with serving(mutual) as (address, _):
        assert await refusal_of(address, TlsFiles(ca_file=files.ca_file)) == CLOSED
        assert await say_to(address, files) == b"hello"


async def test_client_with_a_certificate_of_another_ca_is_rejected(
    ca: Authority, mutual: ServerTls, tmp_path: Path
) -> None:
    async with serving(mutual) as (address, _):
        assert await refusal_of(address, caller(tmp_path, Authority().issue("caller"), ca)) == CLOSED


async def test_plaintext_client_is_rejected_at_a_tls_port(mutual: ServerTls) -> None:
    async with serving(mutual) as (address, _):
        assert await refusal_of(address.removeprefix("tls:")) == CLOSED


async def test_tls_client_at_a_plaintext_port_fails_with_an_explanation(ca: Authority, tmp_path: Path) -> None:
    """The control: were the channel plaintext after all, this call would be answered."""
    async with serving(None, "127.0.0.1:0") as (address, _):
        assert await say_to(address) == b"hello"
        files = caller(tmp_path, ca.issue("caller"), ca)
        assert await refusal_of(f"tls:{address}", files) == "the peer does not speak TLS"


async def test_server_of_another_ca_is_rejected_and_reported(ca: Authority, mutual: ServerTls, tmp_path: Path) -> None:
    async with serving(mutual) as (address, _):
        files = ca.issue("caller").write(tmp_path, Authority(), name="caller")
        assert await refusal_of(address, files) == "the peer's certificate is not from a trusted authority"


async def test_system_roots_are_used_without_configured_roots(mutual: ServerTls) -> None:
    async with serving(mutual) as (address, _):
        assert await refusal_of(address) == "the peer's certificate is not from a trusted authority"


async def test_server_with_a_certificate_for_another_name_is_rejected_and_reported(
    ca: Authority, tmp_path: Path
) -> None:
    tls = ServerTls(files=ca.issue("127.0.0.2", "other.example").write(tmp_path, ca, name="server"))
    async with serving(tls) as (address, _):
        files = caller(tmp_path, ca.issue("caller"), ca)
        assert await refusal_of(address, files) == "the peer's certificate is for another name"


@pytest.mark.parametrize(
    ("begins", "ends", "words"),
    [
        (timedelta(days=-2), timedelta(days=-1), "the peer's certificate has expired"),
        (timedelta(days=1), timedelta(days=2), "the peer's certificate is not valid yet"),
    ],
)
async def test_server_with_an_expired_or_future_certificate_is_rejected_and_reported(
    ca: Authority, tmp_path: Path, begins: timedelta, ends: timedelta, words: str
) -> None:
    """One of weft would not start with it; it may expire while it runs."""
    pair = ca.issue("127.0.0.1", begins=begins, ends=ends)
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(pair.key, pair.certificate)]))
    await server.start()
    try:
        files = caller(tmp_path, ca.issue("caller"), ca)
        assert await refusal_of(f"tls:127.0.0.1:{port}", files) == words
    finally:
        await server.stop(0)


async def test_client_with_an_expired_certificate_is_rejected(ca: Authority, mutual: ServerTls) -> None:
    pair = ca.issue_expired("caller")
    async with serving(mutual) as (address, _):
        credentials = grpc.ssl_channel_credentials(ca.root, pair.key, pair.certificate)
        async with grpc.aio.secure_channel(address.removeprefix("tls:"), credentials) as channel:
            with pytest.raises(WeftError) as refused:
                await say(channel)
    assert (refused.value.reason, refused.value.message) == (Reason.SERVICE_UNAVAILABLE, CLOSED)


async def test_clients_are_authorized_by_certificate_uris(ca: Authority, tmp_path: Path) -> None:
    tls = ServerTls(
        files=ca.issue("127.0.0.1").write(tmp_path, ca, name="server"),
        requires_clients=True,
        allowed_clients=("weft://mesh/router-*", "weft://mesh/gateway"),
    )
    names = {"weft://mesh/router-7": True, "weft://mesh/gateway": True, "weft://mesh/gateway-2": False, "router": False}
    async with serving(tls) as (address, _):
        for name, is_allowed in names.items():
            files = caller(tmp_path, ca.issue(name), ca)
            async with open_channel(address, ChannelSecurity(files=files)) as channel:
                if is_allowed:
                    assert await say(channel) == b"hello"
                    continue
                with pytest.raises(WeftError) as refused:
                    await say(channel)
                assert refused.value.reason is Reason.PERMISSION_DENIED
                with pytest.raises(grpc.aio.AioRpcError) as streamed:
                    await anext(aiter(count(channel)))
                assert streamed.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_client_certificate_check_does_not_apply_to_the_unix_socket(ca: Authority, tmp_path: Path) -> None:
    files = ca.issue("127.0.0.1").write(tmp_path, ca, name="server")
    tls = ServerTls(files=files, requires_clients=True, allowed_clients=("weft://nobody",))
    async with serving(tls, f"unix:{tmp_path}/echo.sock") as (address, _):
        assert await say_to(address) == b"hello"


async def test_api_key_is_sent_over_tls_and_unix_sockets(ca: Authority, tmp_path: Path) -> None:
    files = ca.issue("127.0.0.1").write(tmp_path, ca, name="server")
    security = ChannelSecurity(files=TlsFiles(ca_file=files.ca_file), api_key="wk_secret")
    assert "wk_secret" not in repr(security)
    for address in ("tls:127.0.0.1:0", f"unix:{tmp_path}/echo.sock"):
        async with serving(ServerTls(files=files), address) as (bound, _), open_channel(bound, security) as channel:
            assert await say(channel, b"") == b"Bearer wk_secret"
