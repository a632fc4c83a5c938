"""What commands ask of the HTTP API, and what they make of unusual answers."""

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from kit.failures import fails
from typer.testing import CliRunner

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli import records, secrets, status
from weft_app.cli.main import app
from weft_app.cli.mesh_api import MeshApi, SocketConnection
from weft_app.cli.options import EXIT_OK


class _Api:
    """Answers each read, and refuses each deletion with NOT_FOUND."""

    def __init__(self, answer: dict[str, Any] | WeftError) -> None:
        self.reads: list[tuple[str, dict[str, Any]]] = []
        self._answer = answer

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        self.reads.append((path, query))
        if isinstance(self._answer, WeftError):
            raise self._answer
        return self._answer

    def delete(self, path: str, **_: Any) -> None:
        raise WeftError(Reason.NOT_FOUND, f"there is no {path}")

    def connect(self) -> Callable[[Path], AbstractContextManager["_Api"]]:
        @contextmanager
        def connect(_: Path) -> Iterator[_Api]:
            yield self

        return connect


def test_missing_secret_is_ignored_without_permission_to_list_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    api = _Api(WeftError(Reason.PERMISSION_DENIED, "this key may not list secrets"))
    monkeypatch.setattr(secrets, "connect", api.connect())
    deleted = CliRunner().invoke(app, ["delete", "secret", "gone", "--ignore-not-found"])
    assert (deleted.exit_code, deleted.output) == (EXIT_OK, "")
    assert api.reads == []


@pytest.mark.parametrize(("tenants", "asked"), [({"acme"}, "acme"), ({"acme", "other"}, ""), (set[str](), "")])
def test_limits_of_one_tenant_are_read_without_those_of_others(
    monkeypatch: pytest.MonkeyPatch, tenants: set[str], asked: str
) -> None:
    api = _Api({"items": [{"tenant": "acme"}]})
    monkeypatch.setattr(records, "connect", api.connect())
    assert records.read_uses(Path(), tenants) == [{"tenant": "acme"}]
    assert api.reads == [("/v1/admin/limit-uses", {"tenant": asked})]


@pytest.mark.parametrize(
    ("answer", "components"),
    [({}, []), ({"components": [{}]}, [{"name": "", "state": "", "reason": "", "message": "", "since": ""}])],
)
def test_health_without_fields_of_this_release_is_shown(
    answer: dict[str, Any], components: list[dict[str, str]]
) -> None:
    found = status._health("mesh", lambda: answer)
    assert found == {"process": "mesh", "status": "", "message": "", "components": components}


@contextmanager
def _answering(folder: Path, head: str, body: bytes) -> Iterator[MeshApi]:
    """A mesh that reads the beginning of one request, sends an answer, and closes the connection."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "s"))
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(f"HTTP/1.1 {head}\r\n\r\n".encode() + body)

        server = Thread(target=answer)
        server.start()
        try:
            with MeshApi(SocketConnection(folder / "s", 10.0), "unix:s", "") as api:
                yield api
        finally:
            server.join()


@pytest.mark.parametrize(
    ("lines", "head", "body", "reason", "words"),
    [
        (10**6, "413 X", b'{"error": {"message": "it is too large"}}', Reason.REQUEST_TOO_LARGE, "it is too large"),
        (1, "200 OK", b"<html>", Reason.SERVICE_UNAVAILABLE, "the mesh at unix:s does not answer"),
    ],
    ids=["before the whole file is sent", "without a document"],
)
def test_upload_reports_an_unusual_answer(
    tmp_path: Path, lines: int, head: str, body: bytes, reason: Reason, words: str
) -> None:
    """It reported a broken pipe, or ended with a traceback."""
    file = tmp_path / "requests.jsonl"
    file.write_bytes(b"{}\n" * lines)
    length = f"content-length: {len(body)}"
    with _answering(tmp_path, f"{head}\r\n{length}", body) as api, fails(reason, words):
        api.upload("/v1/files", file, "application/jsonl", purpose="batch")


def test_content_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    with _answering(tmp_path, "200 OK\r\ncontent-length: 10", b"half") as api:
        content = api.content("/v1/files/file-1/content")
        assert next(content) == b"half"
        with fails(Reason.SERVICE_UNAVAILABLE, "6 bytes missing"):
            next(content)


@pytest.mark.parametrize("key", ["weft_k_ab\u2026", "weft_k_ab\nweft_k_cd", "weft k"])
def test_invalid_key_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("WEFT_API_KEY", key)
    done = CliRunner().invoke(app, ["get", "models"], env={"WEFT_URL": "http://127.0.0.1:1", "WEFT_HOME": ""})
    assert (done.exit_code, done.stderr) == (2, "weft: WEFT_API_KEY: is not a key: it contains invalid characters\n")


def test_host_that_is_no_name_is_reported_as_unreachable() -> None:
    done = CliRunner().invoke(app, ["get", "models"], env={"WEFT_URL": "http://a..b", "WEFT_HOME": ""})
    assert done.exit_code == 1
    assert "weft: the mesh at http://a..b does not answer: " in done.stderr


@pytest.mark.parametrize(
    "url",
    [
        *("http://box:80x", "http://ann:hunter2@box", "http://[::1", "http://box:80:81", "http://"),
        *("127.0.0.1:8080", "ftp://host", "http://127.0.0.1:8080/v1"),
    ],
)
def test_invalid_address_of_a_mesh_is_a_usage_error(url: str) -> None:
    done = CliRunner().invoke(app, ["get", "models"], env={"WEFT_URL": url, "WEFT_HOME": ""})
    assert done.exit_code == 2
    assert "WEFT_URL: must be http:// or https://" in done.stderr
    assert "hunter2" not in done.stderr
