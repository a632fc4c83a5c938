"""The HTTP API of the mesh of a home, over the socket of its gateway.

It imports no service, no gRPC and no protobuf.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlencode

from typing_extensions import override

from weft.client._home import ADDRESS_VARIABLES, KEY_VARIABLE, FoundHome, home_folder, is_served
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason

CALL_TIMEOUT_SECONDS = 10.0
SOCKET_NAME = "http.sock"
_HOST = "localhost"
_REASONS = {"invalid_api_key": Reason.UNAUTHENTICATED}
"""Reasons whose code in an error has another name."""


def api_socket(home: Path) -> Path | None:
    """Returns the socket of the HTTP API of the `weft up` of a home.

    None: it serves none, was killed, or a variable names a mesh.
    """
    folder = home_folder(home)
    if isinstance(folder, FoundHome) and any(os.environ.get(name) for name in ADDRESS_VARIABLES.values()):
        return None
    path = folder / "run" / SOCKET_NAME
    return path if is_served(path) else None


class MeshApi:
    """Calls over one connection. Every failure is a WeftError with a reason."""

    def __init__(self, path: Path, timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> None:
        """`path`: see `api_socket`."""
        self._path = path
        self._connection = _SocketConnection(path, timeout_seconds)
        key = os.environ.get(KEY_VARIABLE, "").strip()
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def get(self, path: str, **query: Any) -> Any:
        """Returns the document at a path; parameters that are empty are left out."""
        given = {name: value for name, value in query.items() if value not in ("", None, 0)}
        with self._answer("GET", f"{quote(path)}?{urlencode(given)}" if given else quote(path)) as answer:
            return json.loads(answer.read())

    def post(self, path: str, *, tenant: str = "", **query: Any) -> Any:
        """Posts to a path, as a tenant; returns the document of the answer."""
        headers = {"X-Tenant-ID": tenant} if tenant else {}
        with self._answer("POST", f"{quote(path)}?{urlencode(query)}" if query else quote(path), headers) as answer:
            return json.loads(answer.read())

    def pages(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yields the items of a list, from all its pages."""
        while True:
            page = self.get(path, **query)
            yield from page["items"]
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    @contextmanager
    def _answer(self, method: str, target: str, headers: Mapping[str, str] | None = None) -> Iterator[HTTPResponse]:
        try:
            self._connection.request(method, target, headers={**self._headers, **(headers or {})})
            with self._connection.getresponse() as answer:
                if answer.status >= 400:
                    raise _error_of(answer.status, answer.read()) from HTTPException(answer.status)
                yield answer
        except (OSError, HTTPException) as error:
            self._connection.close()
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE, f"the mesh at unix:{self._path} does not answer: {_words_of(error)}"
            ) from error


class _SocketConnection(HTTPConnection):
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
    return "it takes too long" if isinstance(error, TimeoutError) else getattr(error, "strerror", "") or str(error)


def _error_of(status: int, body: bytes) -> WeftError:
    """Returns the error in the body of an answer."""
    try:
        told = json.loads(body)["error"]
        message, code, field = str(told["message"]), str(told["code"]), told.get("param")
    except (ValueError, KeyError, TypeError):
        return WeftError(Reason.SERVICE_UNAVAILABLE, f"the gateway answered {status}")
    reason = _REASONS.get(code) or Reason.__members__.get(code.upper(), Reason.INTERNAL)
    if field and message.startswith(f"{field}: "):
        return FieldError(field, message.removeprefix(f"{field}: "), reason)
    return WeftError(reason, message, metadata={"field": field} if field else {})
