"""The HTTP API of a mesh: over the socket of a home's gateway, or at the address in WEFT_URL.

It imports no service, no gRPC and no protobuf.
"""

import json
import os
import socket
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import quote, urlencode, urlsplit

from typing_extensions import override

from weft.client._home import (
    ADDRESS_VARIABLES,
    KEY_VARIABLE,
    FoundHome,
    home_folder,
    is_served,
    mesh_url,
)
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason

CALL_TIMEOUT_SECONDS = 10.0
SOCKET_NAME = "http.sock"
_HOST = "localhost"
_REASON_OF_STATUS = {401: Reason.UNAUTHENTICATED, 403: Reason.PERMISSION_DENIED}
"""Reasons of refusals without a body, as proxies answer."""
_REASONS = {"invalid_api_key": Reason.UNAUTHENTICATED}
"""Reasons whose code in an error has another name."""


class Api(Protocol):
    """Calls of the HTTP API by their paths. Every failure is a WeftError with a reason."""

    def ask(
        self, method: str, path: str, query: dict[str, Any], body: dict[str, Any] | None = None, tenant: str = ""
    ) -> Any:
        """Returns the document of an answer; None: it has none. Parameters that are empty are left out."""
        ...

    def get(self, path: str, **query: Any) -> Any:
        """Returns the document at a path."""
        return self.ask("GET", path, query)

    def post(self, path: str, body: dict[str, Any] | None = None, *, tenant: str = "", **query: Any) -> Any:
        """Posts a document to a path, as a tenant; returns that of the answer."""
        return self.ask("POST", path, query, body, tenant)

    def put(self, path: str, body: dict[str, Any]) -> Any:
        """Puts a document at a path; returns that of the answer."""
        return self.ask("PUT", path, {}, body)

    def delete(self, path: str, **query: Any) -> Any:
        """Deletes what is at a path."""
        return self.ask("DELETE", path, query)

    def pages(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yields the items of a list, from all its pages."""
        while True:
            page = self.get(path, **query)
            yield from page["items"]
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]


def api_socket(home: Path) -> Path | None:
    """Returns the socket of the HTTP API of the `weft up` of a home.

    None: it serves none, was killed, or a variable names a mesh.
    """
    folder = home_folder(home)
    if isinstance(folder, FoundHome) and any(os.environ.get(name) for name in ADDRESS_VARIABLES.values()):
        return None
    path = folder / "run" / SOCKET_NAME
    return path if is_served(path) else None


def own_url(home: Path) -> str:
    """Returns the URL of the mesh that runs on a home; empty: none does."""
    try:
        return mesh_url(Path(home))
    except WeftError:
        return ""


def connection_to(url: str, ca_file: Path | None, timeout_seconds: float) -> HTTPConnection:
    """Returns a connection to a URL; `ca_file`: roots, None: the system's. Raises INVALID_ARGUMENT for wrong ones."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        return HTTPConnection(parts.netloc, timeout=timeout_seconds)
    import ssl  # noqa: PLC0415 - a socket of a home needs none

    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one, too
        raise invalid_field("WEFT_CA_FILE", f"{ca_file} cannot be read as PEM certificates") from error
    return HTTPSConnection(parts.netloc, timeout=timeout_seconds, context=context)


class MeshApi(Api):
    """Calls over one connection."""

    def __init__(self, connection: HTTPConnection, address: str, key: str | None = None) -> None:
        """`address` is named where it does not answer; `key`: None: that of WEFT_API_KEY."""
        self._connection = connection
        self._address = address
        key = os.environ.get(KEY_VARIABLE, "").strip() if key is None else key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    @override
    def ask(
        self, method: str, path: str, query: dict[str, Any], body: dict[str, Any] | None = None, tenant: str = ""
    ) -> Any:
        given = {name: 1 if value is True else value for name, value in query.items() if value not in ("", None, 0)}
        target = f"{quote(path)}?{urlencode(given)}" if given else quote(path)
        headers = self._headers | ({"X-Tenant-ID": tenant} if tenant else {})
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        try:
            self._connection.request(method, target, data, headers)
            with self._connection.getresponse() as answer:
                content = answer.read()
                if answer.status >= 400:
                    raise _error_of(answer.status, content) from HTTPException(answer.status)
                return json.loads(content) if content else None
        except (OSError, HTTPException, ValueError) as error:  # no JSON is a ValueError
            self._connection.close()
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE, f"the mesh at {self._address} does not answer: {_words_of(error)}"
            ) from error


class SocketConnection(HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: Path, timeout_seconds: float) -> None:
        super().__init__(_HOST, timeout=timeout_seconds)
        self._path = path

    @override
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _words_of(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it takes too long"
    remedy = " (WEFT_CA_FILE names the roots of its certificate)" if hasattr(error, "verify_message") else ""
    return f"{getattr(error, 'strerror', '') or error}{remedy}"


def _error_of(status: int, body: bytes) -> WeftError:
    """Returns the error in the body of an answer."""
    try:
        told = json.loads(body)["error"]
        message, code, field = str(told["message"]), str(told["code"]), told.get("param")
    except (ValueError, KeyError, TypeError):
        reason = _REASON_OF_STATUS.get(status, Reason.SERVICE_UNAVAILABLE)
        return WeftError(reason, f"the gateway answered {status}")
    reason = _REASONS.get(code) or Reason.__members__.get(code.upper(), Reason.INTERNAL)
    if field and message.startswith(f"{field}: "):
        return FieldError(field, message.removeprefix(f"{field}: "), reason)
    return WeftError(reason, message, metadata={"field": field} if field else {})
