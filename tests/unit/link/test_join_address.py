import stat
from pathlib import Path

import pytest

from weft.host.config import RelaySection
from weft.host.grpc_host import is_loopback
from weft.host.home import WeftHome
from weft.host.join_address import JoinAddress, Trust, parse_join_address, parse_trust
from weft.host.relay import known_endpoint, split_address
from weft.host.relay_certificate import certificate_from_files, self_signed_certificate
from weft.kernel.errors import FieldError

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
def test_a_relay_is_named_by_its_url(url: str, target: str, is_tls: bool) -> None:
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
def test_what_is_no_such_url_is_refused(url: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_join_address(url)
    assert caught.value.field == "URL"


def test_a_fingerprint_may_be_written_in_each_usual_way() -> None:
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
def test_trust_that_makes_no_sense_is_refused(ca_file: Path | None, fingerprint: str | None, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_trust(TLS, ca_file, fingerprint)
    assert caught.value.field == field


@pytest.mark.parametrize("listen", ["", "7443", "0.0.0.0", ":7443", "0.0.0.0:x", "0.0.0.0:70000", "0.0.0.0:-1"])
def test_a_listen_address_needs_host_and_port(listen: str) -> None:
    with pytest.raises(FieldError) as caught:
        split_address(listen, "relay.listen")
    assert caught.value.field == "relay.listen"


def test_only_this_machine_is_loopback() -> None:
    assert [is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "127.evil.example", "")] == [False] * 5


def test_the_self_signed_certificate_is_kept_and_its_key_is_private(tmp_path: Path) -> None:
    first = self_signed_certificate(tmp_path / "relay", ["203.0.113.1", "mesh.example"])
    again = self_signed_certificate(tmp_path / "relay", [])
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint.startswith("sha256:")
    assert stat.S_IMODE((tmp_path / "relay" / "key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "relay").stat().st_mode) == 0o700
    assert "PRIVATE" not in repr(first)


def test_files_that_are_no_certificate_are_named(tmp_path: Path) -> None:
    made = self_signed_certificate(tmp_path, [])
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    assert certificate_from_files(cert, key).fingerprint == made.fingerprint
    for one, other in ((key, cert), (tmp_path / "none.pem", key), (cert, tmp_path)):
        with pytest.raises(FieldError) as caught:
            certificate_from_files(one, other)
        assert caught.value.field == "relay.certificate_file"


def test_where_no_relay_runs_no_endpoint_is_known(tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    assert known_endpoint(home) is None
    home.run.mkdir()
    (home.run / "relay.json").write_text('{"surprise": 1}')
    assert known_endpoint(home) is None
    assert RelaySection().listen is None
