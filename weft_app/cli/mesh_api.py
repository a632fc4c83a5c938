"""Client of a mesh's HTTP API: over the socket of a home's gateway, or at the address in WEFT_URL.

Imports no service, no gRPC and no protobuf.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import chain
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlencode, urlsplit

from typing_extensions import override

from weft.client._home import (
    ADDRESS_VARIABLES,
    KEY_VARIABLE,
    URL_VARIABLE,
    FoundHome,
    home_folder,
    is_served,
    mesh_address,
    mesh_ca_file,
    mesh_url,
    require_key,
)
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import addresses_of

Document = dict[str, Any]
CALL_TIMEOUT_SECONDS = 10.0
PAGE_SIZE = 1000
SOCKET_NAME = "http.sock"
_HOST = "localhost"
_REASON_OF_STATUS = {
    400: Reason.INVALID_ARGUMENT,
    401: Reason.UNAUTHENTICATED,
    403: Reason.PERMISSION_DENIED,
    404: Reason.NOT_FOUND,
    409: Reason.RESOURCE_IN_USE,
    413: Reason.REQUEST_TOO_LARGE,
    429: Reason.RATE_LIMIT_EXCEEDED,
}
"""Reasons of errors without a code, such as those of proxies."""
_CHUNK_BYTES = 256 * 1024
_REASONS = {"invalid_api_key": Reason.UNAUTHENTICATED}
"""Reasons by error codes with other names."""


class MeshApi:
    """Calls the HTTP API over one connection. Every failure is a WeftError with a reason."""

    def __init__(self, connection: HTTPConnection, address: str, key: str | None = None) -> None:
        """`address` is for errors without an answer; `key` defaults to WEFT_API_KEY. Raises INVALID_ARGUMENT."""
        self._connection = connection
        self._address = address
        key = require_key(os.environ.get(KEY_VARIABLE, "").strip() if key is None else key)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def get(self, path: str, **query: Any) -> Any:
        """Returns the document at a path."""
        return self.ask("GET", path, query)

    def post(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None, **query: Any
    ) -> Any:
        """Posts a document to a path. Returns the response's document. Omits empty headers."""
        return self.ask("POST", path, query, body, headers)

    def put(self, path: str, body: dict[str, Any]) -> Any:
        """Puts a document at a path. Returns the response's document."""
        return self.ask("PUT", path, {}, body)

    def delete(self, path: str, **query: Any) -> Any:
        """Sends DELETE for a path."""
        return self.ask("DELETE", path, query)

    def upload(self, path: str, file: Path, content_type: str, **fields: str) -> Any:
        """Posts a file and form fields. Returns the response's document.

        Raises INVALID_ARGUMENT naming FILE if it cannot be read.
        """
        boundary = os.urandom(16).hex()
        form = "form-data; name="
        parts = [f'--{boundary}\r\nContent-Disposition: {form}"{k}"\r\n\r\n{v}\r\n' for k, v in fields.items()]
        # A quote or control character would end the name.
        name = "".join(
            char if char.isprintable() and char not in '"\\' else quote(char, errors="replace") for char in file.name
        )
        head = f'{"".join(parts)}--{boundary}\r\nContent-Disposition: {form}"file"; filename="{name}"\r\n'
        before, after = f"{head}Content-Type: {content_type}\r\n\r\n".encode(), f"\r\n--{boundary}--\r\n".encode()
        try:
            content = file.open("rb")
        except OSError as error:
            raise invalid_field("FILE", f"{file} cannot be read: {error.strerror}") from error
        with content:
            length = len(before) + os.fstat(content.fileno()).st_size + len(after)
            pieces = chain([before], iter(partial(content.read, _CHUNK_BYTES), b""), [after])
            headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": str(length)}
            with self._open("POST", path, {}, pieces, headers) as answer:
                return self._document(answer)

    def content(self, path: str) -> Iterator[bytes]:
        """Yields the content at a path in chunks. Raises SERVICE_UNAVAILABLE if it breaks off."""
        with self._open("GET", path, {}, None, {}) as answer:
            try:
                yield from iter(partial(answer.read, _CHUNK_BYTES), b"")
            except (OSError, HTTPException) as error:
                raise self._away(error) from error
            # A read of a limited size does not report that the connection broke.
            if answer.length:
                raise self._away(HTTPException(f"the connection broke with {answer.length} bytes missing"))

    def pages(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yields the items of all pages of a list."""
        while True:
            page = self.get(path, **query)
            yield from page["items"]
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    def newest(self, path: str, page_size: int) -> Iterator[Document]:
        """Yields the items of all pages of a list of OpenAI's API, newest first."""
        after, has_more = "", True
        while has_more:
            page = self.get(path, limit=page_size, after=after)
            yield from page["data"]
            after, has_more = page["data"][-1]["id"] if page["data"] else "", page["has_more"] and page["data"]

    def documents(self, kind: ResourceKind) -> list[Document]:
        """Returns the resources of a kind, sorted by name."""
        return list(self.pages(f"/api/v1/{kind.plural}", pageSize=PAGE_SIZE))

    def document(self, kind: ResourceKind, name: str) -> Document:
        """Returns one resource. Raises NOT_FOUND or MODEL_NOT_FOUND."""
        found: Document = self.get(f"/api/v1/{kind.plural}/{name}")
        return found

    def names(self, kind: ResourceKind) -> Iterator[str]:
        """Yields the names of the resources of one kind; none if the mesh has no such kind, whose extension is off."""
        try:
            yield from (each["name"] for each in self.pages(f"/api/v1/{kind.plural}", pageSize=PAGE_SIZE))
        except WeftError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise

    def events(self, kind: ResourceKind | None, name: str, limit: int) -> list[Document]:
        """Returns recent events of one resource, one kind, or all, oldest first."""
        return list(self.get("/api/v1/events", kind=kind and kind.value, name=name, limit=limit)["items"])

    def stream(self, path: str, deadline: float | None = None, **query: Any) -> Iterator[Any]:
        """Yields the documents of a stream of server-sent events; None: a keepalive.

        Raises the error of a failed stream, and SERVICE_UNAVAILABLE if it breaks off or reaches the `deadline`.
        """
        answer = self._open("GET", path, query, None, {})
        try:
            while line := self._line(answer, deadline):
                if line.startswith(b"data: {"):
                    document = json.loads(line.removeprefix(b"data: "))
                    if "error" in document and "kind" not in document:
                        raise _error_of(0, line.removeprefix(b"data: ")) from HTTPException()
                    yield document
                elif line.startswith(b":"):
                    yield None
        except (OSError, HTTPException, ValueError) as error:
            raise self._away(error) from error
        finally:
            # Unread data of a stream would be parsed as the next response.
            answer.close()
            self._connection.close()

    def _line(self, answer: HTTPResponse, deadline: float | None) -> bytes:
        """Returns the next line of a response; empty at its end."""
        if deadline is not None and self._connection.sock is not None:
            self._connection.sock.settimeout(max(0.001, deadline - time.monotonic()))
        return answer.readline()

    def ask(
        self,
        method: str,
        path: str,
        query: dict[str, Any],
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Returns the response's document; None if it has none. Omits empty parameters."""
        with self._open(method, path, query, body, headers or {}) as answer:
            return self._document(answer)

    def _document(self, answer: HTTPResponse) -> Any:
        try:
            content = answer.read()
            return json.loads(content) if content else None
        except (OSError, HTTPException, ValueError) as error:  # ValueError: invalid JSON
            raise self._away(error) from error

    def _open(
        self,
        method: str,
        path: str,
        query: dict[str, Any],
        body: dict[str, Any] | Iterator[bytes] | None,
        headers: dict[str, str],
    ) -> HTTPResponse:
        """Sends a request and returns the response once its head has arrived. Raises the error of a failed request."""
        given = {name: 1 if value is True else value for name, value in query.items() if value not in ("", None, 0)}
        target = f"{quote(path)}?{urlencode(given)}" if given else quote(path)
        headers = self._headers | {name: value for name, value in headers.items() if value}
        data: Any = body
        if isinstance(body, dict):
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        try:
            try:
                self._connection.request(method, target, data, headers)
            except (BrokenPipeError, ConnectionResetError):
                # The mesh may have rejected the request before it had read all of it.
                if self._connection.sock is None:
                    raise
            answer = self._connection.getresponse()
            if answer.status >= 400:
                raise _error_of(answer.status, answer.read()) from HTTPException(answer.status)
        except (OSError, HTTPException, UnicodeError) as error:  # UnicodeError: the host is no name
            raise self._away(error) from error
        return answer

    def _away(self, error: Exception) -> WeftError:
        self._connection.close()
        message = f"the mesh at {self._address} does not answer: {_words_of(error)}"
        return WeftError(Reason.SERVICE_UNAVAILABLE, message)


def connect(home: Path, timeout_seconds: float = CALL_TIMEOUT_SECONDS) -> MeshApi:
    """Connects to the mesh for a home's commands: that of WEFT_URL, or the home's gateway.

    Raises SERVICE_UNAVAILABLE, naming what to set, if none is known.
    """
    url = gateway_url(home)
    if url == own_url(home) and (path := api_socket(home)) is not None:
        return MeshApi(SocketConnection(path, timeout_seconds), f"unix:{path}")
    return MeshApi(connection_to(url, mesh_ca_file(url, home), timeout_seconds), url)


def gateway_url(home: Path) -> str:
    """Returns the URL of the mesh for a home's commands, see `mesh_url`.

    Raises SERVICE_UNAVAILABLE, naming what to set, if it is unknown: a variable with a gRPC address of another mesh
    contains no URL.
    """
    folder = home_folder(home)
    is_by_variable = bool(os.environ.get(URL_VARIABLE)) and isinstance(folder, FoundHome)
    if not is_by_variable and (named := _named_elsewhere(folder)):
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE,
            f"{named[0]} names a mesh elsewhere, but its HTTP address is not known. Set it in {URL_VARIABLE}, or use "
            f"the mesh of this machine with --home {home}",
        )
    return mesh_url(folder)


def _named_elsewhere(folder: Path) -> list[str]:
    """Returns the variables with gRPC addresses other than those of the mesh on a home."""
    if not isinstance(folder, FoundHome):
        return []
    found = []
    for service, variable in ADDRESS_VARIABLES.items():
        named = os.environ.get(variable, "").strip()
        # A plain path counts as a named home, which ignores variables.
        own = _known(partial(mesh_address, Path(folder), service))
        if named and not set(addresses_of(named)) <= set(addresses_of(own)):
            found.append(variable)
    return found


def api_socket(home: Path) -> Path | None:
    """Returns the socket of the HTTP API of a home's gateway; None if there is none or it was killed."""
    path = home_folder(home) / "run" / SOCKET_NAME
    return path if is_served(path) else None


def own_url(home: Path) -> str:
    """Returns the URL of the mesh that runs on a home; empty if none does."""
    return _known(partial(mesh_url, Path(home)))


def _known(find: Callable[[], str]) -> str:
    try:
        return find()
    except WeftError:
        return ""


def connection_to(url: str, ca_file: Path | None, timeout_seconds: float) -> HTTPConnection:
    """Returns a connection to a URL. `ca_file` has the roots; None: the system's. Raises INVALID_ARGUMENT."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        return HTTPConnection(parts.netloc, timeout=timeout_seconds)
    import ssl  # noqa: PLC0415 - a socket of a home needs none

    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one, too
        raise invalid_field("WEFT_CA_FILE", f"{ca_file} cannot be read as PEM certificates") from error
    return HTTPSConnection(parts.netloc, timeout=timeout_seconds, context=context)


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
        return "timeout"
    remedy = " (set WEFT_CA_FILE to the root certificates of the mesh)" if hasattr(error, "verify_message") else ""
    return f"{getattr(error, 'strerror', '') or error}{remedy}"


def _error_of(status: int, body: bytes) -> WeftError:
    try:
        told = json.loads(body)["error"]
        message, code, field = str(told["message"]), told.get("code"), told.get("param")
    except (ValueError, KeyError, TypeError):
        message, code, field = f"the gateway returned status {status}", None, None
    reason = _REASON_OF_STATUS.get(status, Reason.SERVICE_UNAVAILABLE)
    if code is not None:
        reason = _REASONS.get(code) or Reason.__members__.get(str(code).upper(), Reason.INTERNAL)
    if field and message.startswith(f"{field}: "):
        return FieldError(field, message.removeprefix(f"{field}: "), reason)
    return WeftError(reason, message, metadata={"field": field} if field else {})
