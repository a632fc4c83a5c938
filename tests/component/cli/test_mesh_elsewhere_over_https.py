"""Commands of a machine without a mesh, on one whose address, roots and key are in the environment."""

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import trustme
from typer.testing import CliRunner, Result

from weft_app.cli.main import app

KEY = "weft_admin_secret"
ROUTERS = {"kind": "RouterList", "items": [{"kind": "router", "name": "r-1", "address": "a:1", "leading": True}]}


class _Gateway(BaseHTTPRequestHandler):
    asked: list[tuple[str, str, str]] = []  # noqa: RUF012 - of one test, which empties it

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        self.asked.append((self.command, self.path, self.rfile.read(size).decode()))
        is_known = self.headers["Authorization"] == f"Bearer {KEY}"
        body = b"" if self.command == "DELETE" else json.dumps(ROUTERS if "routers" in self.path else {}).encode()
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_DELETE = do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextmanager
def _serving(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the URL of a gateway over TLS, and the file of its authority."""
    authority, roots = trustme.CA(), folder / "roots.pem"
    authority.cert_pem.write_to_path(str(roots))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://localhost:{server.server_port}", roots
        server.shutdown()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment that names the mesh."""
    _Gateway.asked.clear()
    with _serving(tmp_path) as (url, roots):
        names = {"WEFT_URL": f"{url}/", "WEFT_CA_FILE": str(roots), "WEFT_API_KEY": KEY}
        yield names | {"WEFT_HOME": str(tmp_path / "none")}


def _weft(environment: dict[str, str], *words: str) -> Result:
    return CliRunner().invoke(app, words, env={"WEFT_REGISTRY": None, "WEFT_ROUTER": None, **environment})


def test_reads_and_writes_go_to_the_configured_mesh(elsewhere: dict[str, str]) -> None:
    shown = _weft(elsewhere, "get", "routers")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.splitlines()[1].split()[:3] == ["r-1", "leader", "a:1"]
    assert _weft(elsewhere, "keys", "revoke", "3k9x0a7bq2mz").stdout == "key 3k9x0a7bq2mz revoked\n"
    assert _weft(elsewhere, "delete", "secret", "s", "--force").stdout == "secret/s deleted\n"
    assert _Gateway.asked == [
        ("GET", "/api/v1/routers", ""),
        ("DELETE", "/api/v1/keys/3k9x0a7bq2mz", ""),
        ("DELETE", "/v1/admin/secrets/s?force=1", ""),
    ]


def test_unknown_ca_wrong_key_and_unreadable_roots_are_reported(elsewhere: dict[str, str], tmp_path: Path) -> None:
    refused = _weft(elsewhere | {"WEFT_API_KEY": "weft_other"}, "get", "routers")
    assert "the gateway returned status 401" in refused.stderr
    untrusted = _weft({name: value for name, value in elsewhere.items() if name != "WEFT_CA_FILE"}, "get", "routers")
    assert "set WEFT_CA_FILE to the root certificates of the mesh" in untrusted.stderr
    (tmp_path / "bad.pem").write_text("no certificate")
    unreadable = _weft(elsewhere | {"WEFT_CA_FILE": str(tmp_path / "bad.pem")}, "get", "routers")
    assert (unreadable.exit_code, "cannot be read as PEM certificates" in unreadable.stderr) == (2, True)


def test_home_option_overrides_the_url(elsewhere: dict[str, str]) -> None:
    assert _weft(elsewhere, "get", "routers", "--home", elsewhere["WEFT_HOME"]).exit_code == 1
    assert _Gateway.asked == []
