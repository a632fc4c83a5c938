"""Programs without an event loop: who they are, and their certificates, follow the files too."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from weft.kernel.channels.rpc import error_from_call, open_blocking_channel
from weft.kernel.channels.tls_channel import MAX_RETIRED, ChannelSecurity
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.certificates import Authority

SECONDS = 10.0


class Server:
    """Tells a caller by its certificate and its key; `Count` goes on when it is told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def who(self, _: bytes, context: Any) -> bytes:
        key = dict(context.invocation_metadata()).get("authorization", "nobody")
        uris = context.auth_context().get("peer_uri", [b"plaintext"])
        return bytes(uris[0]) + b" " + str(key).encode()

    def count(self, _: bytes, context: Any) -> Iterator[bytes]:
        yield b"1"
        self.go_on.wait(SECONDS)
        yield b"2"


@contextmanager
def serving(ca: Authority) -> Iterator[tuple[int, int, Server]]:
    """Its port with TLS, and the one without."""
    told, pair = Server(), ca.issue("127.0.0.1")
    with ThreadPoolExecutor(2 * MAX_RETIRED) as pool:
        server = grpc.server(pool)
        handlers: dict[str, Any] = {
            "Who": grpc.unary_unary_rpc_method_handler(told.who),
            "Count": grpc.unary_stream_rpc_method_handler(told.count),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("weft.test.Sync", handlers),))
        credentials = grpc.ssl_server_credentials([(pair.key, pair.certificate)], ca.root, True)
        secure, plain = server.add_secure_port("127.0.0.1:0", credentials), server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield secure, plain, told
        finally:
            told.go_on.set()
            server.stop(None).wait()


def who(channel: grpc.Channel) -> str:
    method: Any = channel.unary_unary("/weft.test.Sync/Who")
    return bytes(method(b"", timeout=SECONDS)).decode()


def count(channel: grpc.Channel) -> Any:
    method: Any = channel.unary_stream("/weft.test.Sync/Count")
    return method(b"", timeout=SECONDS)


def test_api_key_is_sent_over_tls_and_loopback(ca: Authority, tmp_path: Path) -> None:
    security = ChannelSecurity(files=ca.issue("weft://cli").write(tmp_path, ca), api_key="wk_secret")
    with serving(ca) as (secure, plain, _):
        with open_blocking_channel(f"tls:127.0.0.1:{secure}", security) as channel:
            assert who(channel) == "weft://cli Bearer wk_secret"
        with open_blocking_channel(f"127.0.0.1:{plain}", security) as channel:
            assert who(channel) == "plaintext Bearer wk_secret"
        with open_blocking_channel(f"127.0.0.1:{plain}") as channel:
            assert who(channel) == "plaintext nobody"


def test_new_certificate_applies_to_the_next_call_and_a_stream_continues(ca: Authority, tmp_path: Path) -> None:
    files = ca.issue("weft://first").write(tmp_path, ca)
    security = ChannelSecurity(files=files, reload_interval_seconds=0.0)
    with serving(ca) as (secure, _, server), open_blocking_channel(f"tls:127.0.0.1:{secure}", security) as channel:
        stream = count(channel)
        assert next(stream) == b"1"
        ca.issue("weft://second").write(tmp_path, ca)
        assert who(channel) == "weft://second nobody"
        assert len(channel.connections.retired) == 1  # type: ignore[attr-defined]
        server.go_on.set()
        assert list(stream) == [b"2"]
        assert who(channel) == "weft://second nobody"
        assert channel.connections.retired == []  # type: ignore[attr-defined]


def test_connections_with_old_certificates_do_not_accumulate(ca: Authority, tmp_path: Path) -> None:
    files = ca.issue("weft://first").write(tmp_path, ca)
    security = ChannelSecurity(files=files, reload_interval_seconds=0.0)
    with serving(ca) as (secure, _, server), open_blocking_channel(f"tls:127.0.0.1:{secure}", security) as channel:
        streams = []
        for _ in range(MAX_RETIRED + 1):
            streams.append(count(channel))
            assert next(streams[-1]) == b"1"
            ca.issue("weft://next").write(tmp_path, ca)
        assert who(channel) == "weft://next nobody"
        assert len(channel.connections.retired) == MAX_RETIRED  # type: ignore[attr-defined]
        with pytest.raises(grpc.RpcError):
            next(streams[0])
        server.go_on.set()
        assert next(streams[-1]) == b"2"


def test_untrusted_server_is_rejected_with_a_message(ca: Authority, tmp_path: Path) -> None:
    security = ChannelSecurity(files=ca.issue("weft://cli").write(tmp_path, Authority()))
    with serving(ca) as (secure, _, _), open_blocking_channel(f"tls:127.0.0.1:{secure}", security) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            who(channel)
        error = error_from_call(refused.value, Reason.SERVICE_UNAVAILABLE)
    assert isinstance(error, WeftError)
    assert error.message == "the peer's certificate is not from a trusted authority"
