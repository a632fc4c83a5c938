import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import split_address
from weft_app.compose.authority import self_signed_certificate
from weft_app.compose.certificate import certificate_from_files
from weft_app.compose.grpc_host import is_local, is_loopback
from weft_app.compose.home import WeftHome
from weft_app.compose.join_address import JoinAddress, Trust, open_join_channel, parse_join_address, parse_trust
from weft_app.compose.relay import known_endpoint
from weft_app.config.config import RelaySettings

PIN = "sha256:" + "ab" * 32
TLS = JoinAddress(host="mesh.example", port=7443, is_tls=True)


@pytest.mark.parametrize(
    ("url", "target", "is_tls"),
    [
        ("https://mesh.example:7443", "mesh.example:7443", True),
        ("https://mesh.example/", "mesh.example:443", True),
        ("https://[2001:db8::1]:7443", "[2001:db8::1]:7443", True),
        ("http://127.0.0.1:7443", "127.0.0.1:7443", False),
        ("http://[::1]:7443", "[::1]:7443", False),
        ("http://localhost", "localhost:80", False),
    ],
)
def test_relay_url_is_parsed(url: str, target: str, is_tls: bool) -> None:
    address = parse_join_address(url)
    assert (address.target, address.is_tls) == (target, is_tls)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "mesh.example:7443",
        "ftp://mesh.example",
        "https://",
        "https://mesh.example:x",
        "https://mesh.example:99999",
        "https://mesh.example/path",
        "https://mesh.example?q",
        "https://user@mesh.example",
        "https://[::1",
        "http://mesh.example:7443",
        "http://127.0.0.1.evil.example:7443",
        "http://0.0.0.0:7443",
        "https://" + "a" * 3000,
    ],
)
def test_invalid_relay_url_is_refused(url: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_join_address(url)
    assert caught.value.field == "URL"


def test_fingerprint_is_accepted_in_each_common_format() -> None:
    colons = ":".join(["AB"] * 32)
    for text in (PIN, "ab" * 32, colons, f"SHA256:{colons}"):
        assert parse_trust(TLS, None, text) == Trust(fingerprint=PIN)


@pytest.mark.parametrize(
    ("ca_file", "fingerprint", "field"),
    [
        (None, "sha256:ab", "--fingerprint"),
        (None, "", "--fingerprint"),
        (None, "md5:" + "ab" * 32, "--fingerprint"),
        (Path("/ca.pem"), PIN, "--fingerprint"),
        (Path("/nowhere/ca.pem"), None, "--ca-file"),
    ],
)
def test_contradictory_trust_is_refused(ca_file: Path | None, fingerprint: str | None, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_trust(TLS, ca_file, fingerprint)
    assert caught.value.field == field


@pytest.mark.parametrize("listen", ["", "7443", "0.0.0.0", ":7443", "0.0.0.0:x", "0.0.0.0:70000", "0.0.0.0:-1"])
def test_listen_address_needs_host_and_port(listen: str) -> None:
    with pytest.raises(FieldError) as caught:
        split_address(listen, "relay.listen")
    assert caught.value.field == "relay.listen"


def test_only_this_machine_is_loopback() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "127.evil.example", "")] == [False] * 5


def test_service_without_tls_listens_on_loopback_only() -> None:
    local = ("unix:/run/weft.sock", "127.0.0.1:0", "localhost:7070", "[::1]:7070")
    assert all(map(is_local, local))
    assert not any(map(is_local, ("0.0.0.0:7070", "127.evil.example:7070", "[::]:7070", "localhost.example:7070")))


def test_roots_file_must_contain_certificates(tmp_path: Path) -> None:
    self_signed_certificate(tmp_path, [])
    assert parse_trust(TLS, tmp_path / "cert.pem", None).ca == (tmp_path / "cert.pem").read_bytes()
    for content in (b"", b"garbage", b"\xff\xfe", (tmp_path / "key.pem").read_bytes()):
        (tmp_path / "roots.pem").write_bytes(content)
        with pytest.raises(FieldError) as caught:
            parse_trust(TLS, tmp_path / "roots.pem", None)
        assert caught.value.field == "--ca-file"


@pytest.mark.parametrize("days", [400, -5000])
async def test_wrong_clock_is_reported(days: int, tmp_path: Path) -> None:
    certificate = self_signed_certificate(tmp_path, [], datetime.now(UTC) + timedelta(days=days))
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", certificate.credentials())
    await server.start()
    try:
        address = JoinAddress(host="127.0.0.1", port=port, is_tls=True)
        with pytest.raises(WeftError) as caught:
            await open_join_channel(address, Trust(fingerprint=certificate.fingerprint))
        # Not for good: a clock may be set right by itself.
        assert caught.value.reason is Reason.CONNECT_FAILED
        assert "this machine's clock" in caught.value.message
    finally:
        await server.stop(None)


@pytest.mark.parametrize("host", ["a" * 64 + ".example", ".example", "127.0.0.1"])
async def test_unreachable_host_is_dialed_again(host: str) -> None:
    with pytest.raises(WeftError) as caught:
        await open_join_channel(JoinAddress(host=host, port=1, is_tls=True), Trust(fingerprint=PIN))
    assert caught.value.reason is Reason.CONNECT_FAILED


def test_self_signed_certificate_is_kept_and_its_key_is_private(tmp_path: Path) -> None:
    first = self_signed_certificate(tmp_path / "relay", ["203.0.113.1", "mesh.example"])
    again = self_signed_certificate(tmp_path / "relay", [])
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint.startswith("sha256:")
    assert stat.S_IMODE((tmp_path / "relay" / "key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "relay").stat().st_mode) == 0o700
    assert "PRIVATE" not in repr(first)


def test_invalid_certificate_files_are_reported(tmp_path: Path) -> None:
    made = self_signed_certificate(tmp_path, [])
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    assert certificate_from_files(cert, key).fingerprint == made.fingerprint
    wrong = "relay.certificate_file"
    for one, other, field in (
        (key, cert, wrong),
        (tmp_path / "none.pem", key, wrong),
        (cert, tmp_path, "relay.key_file"),
    ):
        with pytest.raises(FieldError) as caught:
            certificate_from_files(one, other)
        assert caught.value.field == field


def test_endpoint_is_unknown_without_a_running_relay(tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    assert known_endpoint(home) is None
    home.run.mkdir()
    (home.run / "relay.json").write_text('{"surprise": 1}')
    assert known_endpoint(home) is None
    assert RelaySettings().listen is None
