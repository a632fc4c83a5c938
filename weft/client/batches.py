"""An asynchronous client of files and batches, over HTTP: their lines are in the words of OpenAI's API.

from weft.client.batches import connect_batches

async with connect_batches() as batches:
    batch = await batches.submit(Path("requests.jsonl"), "/v1/chat/completions")
"""

import json
import os
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from weft.client._channel import KEY_VARIABLE, URL_VARIABLE, mesh_url
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

CONNECT_TIMEOUT_SECONDS = 10.0
SILENCE_SECONDS = 900.0
"""How long nothing may come: a batch is acknowledged when all its lines are on disk, and 50,000 take a while."""
UPLOAD_TIMEOUT_SECONDS = 3600.0
"""How long a file may take on its way; as `gateway.batches.upload_timeout_seconds`."""
MAX_ERROR_BYTES = 64 * 1024
_PIECE_BYTES = 256 * 1024
_BASE = re.compile(r"https?://[^/?#\s]+/?")
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
"""Of an error's status."""

Document = dict[str, Any]


@asynccontextmanager
async def connect_batches(url: str | None = None, *, home: Path | str | None = None) -> AsyncGenerator["Batches"]:
    """The batches of the gateway at a base URL, or of the mesh that runs on `home`. WEFT_API_KEY is sent along.

    Raises SERVICE_UNAVAILABLE when none runs, INVALID_ARGUMENT for what is no such URL.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # Not of a call as a whole: results may be long, and so may the way to them.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=SILENCE_SECONDS)
    base = url or mesh_url(home)
    if _BASE.fullmatch(base) is None:
        raise invalid_field(URL_VARIABLE, f"must be http:// or https:// with a host, and no path: {base[:200]!r}")
    async with aiohttp.ClientSession(base, headers=headers, timeout=timeout) as session:
        yield Batches(session)


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
        """Keep a file of lines and make a batch of it; once this returns all lines are durable, or say what is wrong.

        `window_seconds`: how long lines may wait to be begun; None: 24 hours. `wait_for_model`: whether they may name
        what nothing has yet. Raises INVALID_ARGUMENT.
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
                # It is refused: the file would only take the room of others.
                with suppress(WeftError):
                    await self._json("DELETE", f"/v1/files/{kept['id']}")
            raise

    async def get(self, batch_id: str) -> Document:
        """One batch. Raises NOT_FOUND."""
        return await self._json("GET", f"/v1/batches/{batch_id}")

    async def newest(self, limit: int) -> list[Document]:
        """The newest batches."""
        found: list[Document] = []
        after: dict[str, str] = {}
        while len(found) < limit:
            page = await self._json("GET", "/v1/batches", params={"limit": str(min(100, limit - len(found))), **after})
            found += page["data"]
            if not page["has_more"] or not page["data"]:
                break
            after = {"after": page["data"][-1]["id"]}
        return found

    async def cancel(self, batch_id: str) -> Document:
        """End every line that is not at its end. Raises NOT_FOUND."""
        return await self._json("POST", f"/v1/batches/{batch_id}/cancel")

    async def content(self, file_id: str) -> AsyncGenerator[bytes]:
        """What is in a file, in pieces. Raises NOT_FOUND."""
        try:
            async with self._session.get(f"/v1/files/{file_id}/content") as response:
                await _require_well(response)
                async for piece in response.content.iter_chunked(_PIECE_BYTES):
                    yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(error) from error

    async def _upload(self, file: Path) -> Document:
        try:
            with file.open("rb") as content:
                form = aiohttp.FormData()
                form.add_field("purpose", "batch")
                form.add_field("file", content, filename=file.name, content_type="application/jsonl")
                # Nothing comes back until all of it is there.
                timeout = aiohttp.ClientTimeout(total=UPLOAD_TIMEOUT_SECONDS, sock_connect=CONNECT_TIMEOUT_SECONDS)
                return await self._json("POST", "/v1/files", data=form, timeout=timeout)
        except OSError as error:
            if isinstance(error, aiohttp.ClientError | TimeoutError):
                raise
            raise invalid_field("FILE", f"{file} cannot be read: {error.strerror}") from error

    async def _json(self, method: str, path: str, **request: Any) -> Document:
        try:
            async with self._session.request(method, path, **request) as response:
                await _require_well(response)
                document: Document = await response.json()
                return document
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(error) from error


async def _require_well(response: aiohttp.ClientResponse) -> None:
    """Raises what an answer that is no success says."""
    if response.status < 400:
        return
    raw = await response.content.read(MAX_ERROR_BYTES)
    try:
        told = json.loads(raw)["error"]
        message, field = str(told["message"]), told.get("param")
    except (ValueError, KeyError, TypeError):
        message, field = f"the gateway answered {response.status}", None
    default = Reason.SERVICE_UNAVAILABLE if response.status >= 500 else Reason.INVALID_ARGUMENT
    metadata = {"field": str(field)} if field else {}
    raise WeftError(_REASONS.get(response.status, default), message, metadata=metadata)


def _unreachable(error: Exception) -> WeftError:
    if isinstance(error, TimeoutError):
        return WeftError(Reason.SERVICE_UNAVAILABLE, "the gateway does not answer in time")
    return WeftError(Reason.SERVICE_UNAVAILABLE, "the gateway cannot be reached, or broke off; is the mesh running?")
