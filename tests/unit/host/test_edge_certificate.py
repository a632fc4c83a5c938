"""The certificate that the HTTP edge makes for itself: when it is issued anew, and what clients keep meanwhile."""

import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from gateway.gateway_config import EdgeTls
from gateway.http.tls import following_context
from weft.kernel.channels.tls import TlsSource
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.machine.file_replacement import lock_file
from weft_app.compose import authority
from weft_app.compose.authority import (
    EdgeCertificate,
    IssuedCertificate,
    issue,
    read_issued,
    self_signed_certificate,
)
from weft_app.compose.certificate import fingerprint_of_pem
from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.edge_certificate import (
    RENEWAL_CHECK_SECONDS,
    checked_edge_certificate,
    own_edge_certificate,
    with_edge_certificate,
)
from weft_app.compose.home import WeftHome
from weft_app.compose.machine import certifiable, local_url, ordered_addresses, reachable_name
from weft_app.compose.up import UpHost
from weft_app.config.loader import parse_config
from weft_testing.fake_clock import FakeClock

WAIT_SECONDS = 10.0
NOW = datetime.now(UTC)
HELD = issue("weft", ("box", "192.168.1.5"), now=NOW, valid_until=NOW + timedelta(days=300))


def _relay(folder: Path) -> str:
    return self_signed_certificate(folder, []).fingerprint


def _edge(folder: Path) -> str:
    own = EdgeCertificate(folder=folder)
    own.prepare((), NOW)
    return own.fingerprint


@pytest.mark.parametrize("prepared", [_relay, _edge])
def test_processes_that_start_concurrently_issue_one_certificate(
    prepared: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wrote its own files; the next start could find the key of one and the certificate of the other."""
    begun, other_waits_or_ended = Event(), Event()
    others = list[Future[str]]()

    def locked(*arguments: Any, **details: Any) -> None:
        if begun.is_set():
            other_waits_or_ended.set()
        lock_file(*arguments, **details)

    def issued(*arguments: Any, **details: Any) -> IssuedCertificate:
        if not begun.is_set():
            begun.set()
            others.append(pool.submit(prepared, tmp_path))
            others[0].add_done_callback(lambda _: other_waits_or_ended.set())
            assert other_waits_or_ended.wait(WAIT_SECONDS)
        return issue(*arguments, **details)

    monkeypatch.setattr(authority, "lock_file", locked)
    monkeypatch.setattr(authority, "issue", issued)
    with ThreadPoolExecutor(1) as pool:
        own = prepared(tmp_path)
        assert own == others[0].result() == prepared(tmp_path)


@pytest.mark.parametrize(
    ("names", "days", "why"),
    [
        (("box",), 0, ""),
        (("box", "192.168.1.5"), 269, ""),
        (("box",), 271, "it expires soon"),
        (("box",), -2, "it is not valid yet"),
        (("box", "10.0.0.7"), 0, "this machine is now also called 10.0.0.7"),
    ],
)
def test_certificate_is_reissued_before_it_expires_and_for_new_names(
    names: tuple[str, ...], days: int, why: str
) -> None:
    assert HELD.why_due(names, NOW + timedelta(days=days)) == why


def _handshake(certificate: EdgeCertificate, name: str, roots: Path) -> None:
    """Connects to a server of this certificate as `name`, trusting `roots`. Raises SSLError where that fails."""
    context = following_context(TlsSource(certificate.files.files))
    client = ssl.create_default_context(cafile=roots)
    # As Python 3.13 and newer check: an authority must say that it is one.
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    with _serving(context) as port, socket.create_connection(("127.0.0.1", port), 5) as plain:
        client.wrap_socket(plain, server_hostname=name).close()


@contextmanager
def _serving(context: ssl.SSLContext) -> Iterator[int]:
    def serve() -> None:
        connection, _ = listener.accept()
        connection.settimeout(5)
        try:
            context.wrap_socket(connection, server_side=True).close()
        except OSError:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = Thread(target=serve)
        serving.start()
        try:
            yield listener.getsockname()[1]
        finally:
            serving.join()


def test_clients_trusting_the_authority_accept_a_renewed_certificate(tmp_path: Path) -> None:
    certificate = EdgeCertificate(folder=tmp_path / "edge")
    assert certificate.prepare(("192.168.1.5",), NOW) == "there is none yet"
    roots = tmp_path / "roots.pem"
    roots.write_bytes(certificate.authority_file.read_bytes())
    fingerprint, served = certificate.fingerprint, (tmp_path / "edge" / "cert.pem").read_bytes()
    _handshake(certificate, "192.168.1.5", roots)
    assert certificate.prepare(("192.168.1.5",), NOW) == ""
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        _handshake(certificate, "10.0.0.7", roots)
    key = (tmp_path / "edge" / "key.pem").read_bytes()
    assert "10.0.0.7" in certificate.prepare(("192.168.1.5", "10.0.0.7"), NOW)
    assert (tmp_path / "edge" / "cert.pem").read_bytes() != served
    assert (tmp_path / "edge" / "key.pem").read_bytes() == key
    assert certificate.fingerprint == fingerprint
    _handshake(certificate, "10.0.0.7", roots)
    other = EdgeCertificate(folder=tmp_path / "other")
    other.prepare(("10.0.0.7",), NOW)
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed"):
        _handshake(other, "10.0.0.7", roots)


def test_keys_are_private_and_the_authority_is_for_clients(tmp_path: Path) -> None:
    certificate = EdgeCertificate(folder=tmp_path / "edge")
    certificate.prepare((), NOW)
    for name in ("ca.key", "key.pem"):
        assert stat.S_IMODE((certificate.folder / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(certificate.folder.stat().st_mode) == 0o700
    assert b"PRIVATE" not in certificate.authority_file.read_bytes()
    assert fingerprint_of_pem(certificate.authority_file.read_bytes()) == certificate.fingerprint


@pytest.mark.parametrize("damaged", ["cert.pem", "key.pem"])
def test_damaged_certificate_is_reissued(tmp_path: Path, damaged: str) -> None:
    certificate = EdgeCertificate(folder=tmp_path)
    certificate.prepare(("box",), NOW)
    fingerprint = certificate.fingerprint
    (tmp_path / damaged).write_bytes(b"garbage")
    assert certificate.prepare(("box",), NOW) == "there is none yet"
    assert certificate.fingerprint == fingerprint
    _handshake(certificate, "box", certificate.authority_file)


@pytest.mark.parametrize("damaged", ["ca.pem", "ca.key"])
def test_damaged_authority_is_refused_at_start_and_by_doctor(tmp_path: Path, damaged: str) -> None:
    home, config = WeftHome(tmp_path), parse_config({"host": "0.0.0.0"})
    with_edge_certificate(config, home)
    own = own_edge_certificate(config, home)
    assert own is not None
    (own.folder / damaged).write_bytes(b"garbage")
    for refuse in (with_edge_certificate, checked_edge_certificate):
        with pytest.raises(WeftError, match=r"ca\.pem and ca\.key cannot be used: .* restore both from a backup"):
            refuse(config, home)


@pytest.mark.parametrize(
    ("document", "makes_one"),
    [
        ({}, False),
        ({"host": "127.1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"gateway": {"tls": {"self_signed": True}}}, True),
        ({"host": "0.0.0.0", "gateway": {"insecure": True}}, False),
        ({"host": "0.0.0.0", "gateway": {"tls_terminated_elsewhere": True}}, False),
        ({"host": "0.0.0.0", "gateway": {"tls": {"self_signed": False}}}, False),
        ({"host": "0.0.0.0", "gateway": {"tls": {"certificate_file": "/c.pem", "key_file": "/k.pem"}}}, False),
    ],
)
def test_gateway_creates_a_certificate_beyond_loopback_if_none_is_configured(
    tmp_path: Path, document: dict[str, object], makes_one: bool
) -> None:
    assert (own_edge_certificate(parse_config(document), WeftHome(tmp_path)) is not None) is makes_one


@pytest.mark.parametrize(
    "gateway",
    [
        {"insecure": True, "tls": {"self_signed": True}},
        {"insecure": True, "tls": {"certificate_file": "/c.pem", "key_file": "/k.pem"}},
        {"tls": {"self_signed": True, "certificate_file": "/c.pem", "key_file": "/k.pem"}},
    ],
)
def test_conflicting_settings_are_refused(tmp_path: Path, gateway: dict[str, object]) -> None:
    with pytest.raises(WeftError, match="cannot be combined"):
        own_edge_certificate(parse_config({"gateway": gateway}), WeftHome(tmp_path))


def test_gateway_certificate_has_the_names_of_its_machine(tmp_path: Path) -> None:
    config = with_edge_certificate(parse_config({"host": "0.0.0.0"}), WeftHome(tmp_path))
    assert socket.gethostname().lower() in config.gateway.allowed_hosts
    assert isinstance(config.gateway.tls, EdgeTls)
    assert config.gateway.tls.is_set


async def test_renewed_certificate_has_names_that_a_reload_allowed(tmp_path: Path) -> None:
    home, source, clock = WeftHome(tmp_path), ConfigurationSource(), FakeClock()
    read = source.of_document({"host": "0.0.0.0"}, ())
    with_edge_certificate(read.config, home)
    host = UpHost(source, read, home)
    host._clock = clock  # type: ignore[assignment]  # as fast as the test
    host._note_addresses("https://0.0.0.0:8080")
    gateway = {"allowed_hosts": ["mesh.example"]}
    host._note_reload(source.of_document({"host": "0.0.0.0", "gateway": gateway}, ()))
    (tmp_path / "state" / "edge" / "cert.pem").unlink()
    await clock.advance(RENEWAL_CHECK_SECONDS, sleepers=1)
    held = read_issued(tmp_path / "state" / "edge" / "cert.pem", tmp_path / "state" / "edge" / "key.pem")
    assert "mesh.example" in held.names
    await host.stop()


def test_reachable_addresses_come_first_and_loopback_is_excluded() -> None:
    found = [
        ("lo", "127.0.0.1"),
        ("docker0", "172.17.0.1"),
        ("eth0", "fe80::1%eth0"),
        ("eth0", "fd00::5"),
        ("wlan0", "192.168.7.2"),
        ("eth0", "10.0.0.5"),
        ("eth0", "no address"),
    ]
    assert ordered_addresses(found, "10.0.0.5") == ("10.0.0.5", "192.168.7.2", "fd00::5", "172.17.0.1")


def test_only_valid_certificate_names_are_included() -> None:
    assert certifiable(["box", "my_box", "a b", "-x", "", "192.168.1.5", "FD00::1", "x" * 64]) == (
        "box",
        "192.168.1.5",
        "fd00::1",
    )


def test_wildcard_listener_has_a_loopback_url_on_its_own_machine() -> None:
    assert local_url("https://0.0.0.0:8080") == "https://127.0.0.1:8080"
    assert local_url("https://[::]:8080") == "https://[::1]:8080"
    assert local_url("https://192.168.1.5:8080") == "https://192.168.1.5:8080"


def test_machine_whose_name_is_beyond_ascii_gets_certificates_and_is_reached_by_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "zürich-1")
    _relay(tmp_path)
    assert read_issued(tmp_path / "cert.pem", tmp_path / "key.pem").names >= {"localhost", "127.0.0.1"}
    assert reachable_name().isascii()
