"""Where a gRPC server may listen, and by what address others find it."""

import socket
from pathlib import Path

import pytest
from tls_stage import say_to, serving

from weft.kernel.channels.tls import ServerTls
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import needs_tls
from weft_app.compose.grpc_host import GrpcHost
from weft_testing.certificates import Authority

ELSEWHERE = ("0.0.0.0:0", "[::]:0", "192.0.2.77:0", "mesh.example:0")


async def _bound(host: GrpcHost, address: str) -> str:
    """The address that it announces; it listens no more."""
    announced = host.bind(address)
    # gRPC keeps the socket of a server that was never started.
    await host.start([])
    await host.stop(0.0)
    return announced


@pytest.mark.parametrize("address", ["unix:/run/weft/x.sock", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_loopback_is_plaintext_unless_the_address_requires_tls(address: str) -> None:
    assert not needs_tls(address)
    assert needs_tls(f"tls:{address}")


@pytest.mark.parametrize("address", [*ELSEWHERE, "dns:///mesh.example:1", "127.evil.example:1", "localhost.example:1"])
def test_other_addresses_use_tls(address: str) -> None:
    assert needs_tls(address)
    assert needs_tls(f"tls:{address}")


@pytest.mark.parametrize("address", ELSEWHERE)
async def test_binding_elsewhere_without_a_certificate_is_rejected_and_error_names_what_is_missing(
    address: str,
) -> None:
    with pytest.raises(FieldError, match="is not on this machine") as refused:
        GrpcHost().bind(address)
    for setting in ("tls.certificate_file", "tls.key_file", "tls.ca_file", "auth.required"):
        assert setting in refused.value.message
    with pytest.raises(FieldError) as refused:
        GrpcHost(has_keys=True).bind(address)
    assert "tls.certificate_file" in refused.value.message
    assert "auth.required" not in refused.value.message


async def test_binding_elsewhere_without_client_authentication_is_rejected(ca: Authority, tmp_path: Path) -> None:
    files = ca.issue("host").write(tmp_path)
    with pytest.raises(FieldError, match=r"tls\.ca_file\) or by keys \(auth\.required") as refused:
        GrpcHost(tls=ServerTls(files=files)).bind("0.0.0.0:0")
    assert "certificate_file" not in refused.value.message
    assert await _bound(GrpcHost(tls=ServerTls(files=files), has_keys=True), "0.0.0.0:0")


async def test_loopback_with_tls_is_rejected_without_a_certificate(mutual: ServerTls) -> None:
    with pytest.raises(FieldError, match=r"asks for TLS, which needs a certificate \(tls\.certificate_file"):
        GrpcHost(has_keys=True).bind("tls:127.0.0.1:0")
    assert (await _bound(GrpcHost(tls=mutual), "tls:127.0.0.1:0")).startswith("tls:127.0.0.1:")


async def test_address_with_certificates_and_client_authentication_is_bound(mutual: ServerTls) -> None:
    assert (await _bound(GrpcHost(tls=mutual), "0.0.0.0:0")).startswith(f"{socket.gethostname()}:")


@pytest.mark.parametrize(
    ("configured", "announced"),
    [
        ("mesh.example", "mesh.example"),
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8::7", "[2001:db8::7]"),
        ("localhost", "tls:localhost"),
        ("127.0.0.2", "tls:127.0.0.2"),
    ],
)
async def test_wildcard_listener_is_announced_by_the_configured_name(
    ca: Authority, tmp_path: Path, configured: str, announced: str
) -> None:
    files = ca.issue("localhost").write(tmp_path, ca)
    tls = ServerTls(files=files, requires_clients=True, announced_host=configured)
    async with serving(tls, "0.0.0.0:0") as (address, _):
        name, _, port = address.rpartition(":")
        assert (name, needs_tls(address)) == (announced, True)
        assert await say_to(f"tls:localhost:{port}", files) == b"hello"


async def test_loopback_needs_no_certificate() -> None:
    async with serving(None, "127.0.0.1:0") as (address, _):
        assert await say_to(address) == b"hello"


async def test_foreign_address_is_not_reported_as_in_use(mutual: ServerTls) -> None:
    with pytest.raises(FieldError, match=r"cannot listen on 192\.0\.2\.77:0: Cannot assign") as refused:
        GrpcHost(tls=mutual).bind("192.0.2.77:0")
    assert refused.value.field == "--listen", "and not `host`, the address of the HTTP API"


async def test_port_of_another_server_is_reported_as_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(WeftError, match=f"--listen: cannot listen on {address}: it is in use; choose") as refused:
            GrpcHost().bind(address)
    assert refused.value.reason is Reason.ALREADY_EXISTS


async def test_unix_socket_of_another_server_is_kept_and_reported_as_in_use(tmp_path: Path) -> None:
    """A second `weft serve runner` replaced the socket of the first one, and removed its own when it ended."""
    path = tmp_path / "x.sock"
    first = GrpcHost()
    first.bind(f"unix:{path}")
    await first.start([])
    kept = path.stat().st_ino
    try:
        with pytest.raises(WeftError, match=r"x\.sock: it is in use") as refused:
            GrpcHost().bind(f"unix:{path}")
        assert refused.value.reason is Reason.ALREADY_EXISTS
        assert path.stat().st_ino == kept
    finally:
        await first.stop(0.0)


async def test_unix_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert await _bound(GrpcHost(), f"unix:{path}") == f"unix:{path}"
