"""What `weft doctor` says about central models, and what their providers get of it."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft_app.cli import doctor_checks
from weft_app.cli.doctor_checks import Verdict, central_model_findings, unreached_words
from weft_app.cli.mesh_api import Document
from weft_testing.certificates import Authority
from weft_testing.free_port import free_port

HOST = "127.0.0.1"


@contextmanager
def _provider(context: ssl.SSLContext | None = None) -> Iterator[tuple[int, list[bytes]]]:
    """A provider that keeps what it is sent, after TLS if `context` is given; its port."""
    got: list[bytes] = []
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            try:
                with connection if context is None else context.wrap_socket(connection, server_side=True) as taken:
                    got.append(taken.recv(4096))
            except OSError:
                got.append(b"")

    with socket.create_server((HOST, 0)) as listening:
        server = threading.Thread(target=serve)
        server.start()
        try:
            yield listening.getsockname()[1], got
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)
            server.join()


def _model(url: str, ref: str = "") -> Document:
    return {"kind": "model", "name": "m", "provider": {"url": url} | ({"apiKeyRef": ref} if ref else {})}


def test_provider_check_connects_and_sends_nothing() -> None:
    with _provider() as (port, got):
        models = [_model(f"http://{HOST}:{port}/v1", "secret/k")]
        assert [each.verdict for each in central_model_findings(models, {"k"})] == [Verdict.OK]
    assert b"".join(got) == b""


def test_secret_of_a_model_without_a_key_is_not_reported() -> None:
    with _provider() as (port, _):
        (found,) = central_model_findings([_model(f"http://{HOST}:{port}/v1")], set())
    assert (found.verdict, found.detail) == (Verdict.OK, "m: its provider can be reached")


def test_provider_beyond_the_maximum_is_reported_as_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "MAX_PROVIDERS", 0)
    (found,) = central_model_findings([_model(f"http://{HOST}:{free_port()}/v1")], set())
    assert found.detail == "m: not checked, as only 0 providers are"


def test_missing_secret_error_shows_the_command_that_creates_it() -> None:
    with _provider() as (port, _):
        (found,) = central_model_findings([_model(f"http://{HOST}:{port}/v1", "secret/gone")], {"k"})
    assert (found.detail, found.remedy) == ("m: there is no secret/gone", "weft keys secret create gone -")


def test_unreachable_provider_error_names_the_field() -> None:
    port = free_port()
    (found,) = central_model_findings([_model(f"http://{HOST}:{port}/v1")], set())
    assert f"{HOST}:{port} cannot be reached: Connection refused" in found.detail
    assert found.remedy == "check `provider.url`: weft get model m -o yaml"


def test_host_that_is_no_name_cannot_be_reached() -> None:
    assert unreached_words(("api..example", 443, True)).startswith("api..example:443 cannot be reached: ")


def test_untrusted_certificate_and_port_without_tls_give_different_errors(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    Authority().issue(HOST).write(tmp_path)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "own.key")
    with _provider(context) as (port, _):
        assert "certificate of" in unreached_words((HOST, port, True))
    with _provider() as (port, got):
        assert unreached_words((HOST, port, True))
    assert all(each[:1] in (b"", b"\x16") for each in got), "a handshake and no request"


def test_silent_provider_check_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "CONNECT_SECONDS", 0.05)
    with socket.create_server((HOST, 0)) as listening:
        words = unreached_words((HOST, listening.getsockname()[1], True))
    assert "does not answer within 0.05 s" in words
