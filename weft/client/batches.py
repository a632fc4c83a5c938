"""An asynchronous client of files and batches, over HTTP, because their lines are requests of OpenAI's API.

from weft.client.batches import connect_batches

async with connect_batches() as batches:
    batch = await batches.submit(Path("requests.jsonl"), "/v1/chat/completions")
"""

import json
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from weft.client._home import KEY_VARIABLE, mesh_ca_file, mesh_url, require_url
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

CONNECT_TIMEOUT_SECONDS = 10.0
SILENCE_SECONDS = 900.0
"""Read timeout: a batch is acknowledged when all its lines are on disk, and 50,000 take a while."""
UPLOAD_TIMEOUT_SECONDS = 3600.0
"""Timeout of an upload, as the gateway's own."""
MAX_ERROR_BYTES = 64 * 1024
_CHUNK_BYTES = 256 * 1024
_REASONS = {
    400: Reason.INVALID_ARGUMENT,
    401: Reason.UNAUTHENTICATED,
    403: Reason.PERMISSION_DENIED,
    404: Reason.NOT_FOUND,
    409: Reason.RESOURCE_IN_USE,
    413: Reason.REQUEST_TOO_LARGE,
    429: Reason.RATE_LIMIT_EXCEEDED,
    503: Reason.SERVICE_UNAVAILABLE,
}
"""Reasons by HTTP status."""

Document = dict[str, Any]


@asynccontextmanager
async def connect_batches(url: str | None = None, *, home: Path | str | None = None) -> AsyncGenerator["Batches"]:
    """Connects to the gateway at a base URL, or of the mesh that runs on `home`, with WEFT_API_KEY.

    Raises SERVICE_UNAVAILABLE when none runs, INVALID_ARGUMENT for an invalid URL.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # No total timeout: results may be long, and take long.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=SILENCE_SECONDS)
    base = require_url(url or mesh_url(home))
    connector = aiohttp.TCPConnector(ssl=_trust(mesh_ca_file(base, home)))
    async with aiohttp.ClientSession(base, headers=headers, timeout=timeout, connector=connector) as session:
        yield Batches(session)


def _trust(ca_file: Path | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # ssl.SSLError is one, too
        raise invalid_field("WEFT_CA_FILE", f"{ca_file} cannot be read as PEM certificates") from error


class Batches:
    """Calls on one gateway. Every failure is a WeftError with a reason."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def submit(
        self,
        file: Path,
        endpoint: str,
        *,
        metadata: Mapping[str, str] | None = None,
        window_seconds: int | None = None,
        wait_for_model: bool = False,
    ) -> Document:
        """Uploads a file of requests and creates a batch; when this returns, all of them are durable.

        `window_seconds`: how long requests may wait for their start; None: 24 hours. `wait_for_model`: whether they may
        name a model that does not exist yet. Raises INVALID_ARGUMENT.
        """
        kept = await self._upload(file)
        body: Document = {"input_file_id": kept["id"], "endpoint": endpoint, "completion_window": "24h"}
        if metadata:
            body["metadata"] = dict(metadata)
        if window_seconds is not None:
            body["window_seconds"] = window_seconds
        if wait_for_model:
            body["wait_for_model"] = True
        try:
            return await self._json("POST", "/v1/batches", json=body)
        except WeftError as error:
            if error.reason is not Reason.SERVICE_UNAVAILABLE:
                # The batch was rejected: its file would only use space.
                with suppress(WeftError):
                    await self._json("DELETE", f"/v1/files/{kept['id']}")
            raise

    async def get(self, batch_id: str) -> Document:
        """Returns one batch. Raises NOT_FOUND."""
        return await self._json("GET", f"/v1/batches/{batch_id}")

    async def newest(self, limit: int) -> list[Document]:
        """Returns the newest batches."""
        return await self._pages("/v1/batches", limit)

    async def newest_files(self, limit: int) -> list[Document]:
        """Returns the newest files: those that were uploaded, and the answers and errors of batches."""
        return await self._pages("/v1/files", limit)

    async def delete_file(self, file_id: str) -> Document:
        """Deletes a file. Raises NOT_FOUND."""
        return await self._json("DELETE", f"/v1/files/{file_id}")

    async def _pages(self, path: str, limit: int) -> list[Document]:
        found: list[Document] = []
        after: dict[str, str] = {}
        while len(found) < limit:
            page = await self._json("GET", path, params={"limit": str(min(100, limit - len(found))), **after})
            found += page["data"]
            if not page["has_more"] or not page["data"]:
                break
            after = {"after": page["data"][-1]["id"]}
        return found

    async def cancel(self, batch_id: str) -> Document:
        """Cancels every unfinished request of a batch. Raises NOT_FOUND."""
        return await self._json("POST", f"/v1/batches/{batch_id}/cancel")

    async def content(self, file_id: str) -> AsyncGenerator[bytes]:
        """Yields the content of a file in chunks. Raises NOT_FOUND."""
        try:
            async with self._session.get(f"/v1/files/{file_id}/content") as response:
                await _require_success(response)
                async for piece in response.content.iter_chunked(_CHUNK_BYTES):
                    yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(error) from error

    async def _upload(self, file: Path) -> Document:
        try:
            with file.open("rb") as content:
                form = aiohttp.FormData()
                form.add_field("purpose", "batch")
                form.add_field("file", content, filename=file.name, content_type="application/jsonl")
                # There is no response before the whole file was received.
                timeout = aiohttp.ClientTimeout(total=UPLOAD_TIMEOUT_SECONDS, sock_connect=CONNECT_TIMEOUT_SECONDS)
                return await self._json("POST", "/v1/files", data=form, timeout=timeout)
        except OSError as error:
            if isinstance(error, aiohttp.ClientError | TimeoutError):
                raise
            raise invalid_field("FILE", f"{file} cannot be read: {error.strerror}") from error

    async def _json(self, method: str, path: str, **request: Any) -> Document:
        try:
            async with self._session.request(method, path, **request) as response:
                await _require_success(response)
                document: Document = await response.json()
                return document
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(error) from error


async def _require_success(response: aiohttp.ClientResponse) -> None:
    """Raises the error of a failed response."""
    if response.status < 400:
        return
    raw = await response.content.read(MAX_ERROR_BYTES)
    try:
        error = json.loads(raw)["error"]
        message, field = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        message, field = f"the gateway answered {response.status}", None
    default = Reason.SERVICE_UNAVAILABLE if response.status >= 500 else Reason.INVALID_ARGUMENT
    metadata = {"field": str(field)} if field else {}
    raise WeftError(_REASONS.get(response.status, default), message, metadata=metadata)


def _unreachable(error: Exception) -> WeftError:
    if isinstance(error, TimeoutError):
        return WeftError(Reason.SERVICE_UNAVAILABLE, "the gateway does not answer in time")
    return WeftError(Reason.SERVICE_UNAVAILABLE, "the gateway cannot be reached, or broke off; is the mesh running?")
