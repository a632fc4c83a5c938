"""Client of ComfyUI's HTTP API and websocket, with size limits and without redirects and an Origin header."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import aiohttp
from typing_extensions import override
from yarl import URL

from runner_svc.openai_upstream.answers import read_bounded
from runner_svc.openai_upstream.media import form
from runner_svc.supervise.peer_process import VerifyPeer
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_extensions.comfyui.messages import OutputFile, QueuedPrompt, read_queue, refused_prompt

CALL_SECONDS = 30.0
"""Timeout of a call other than an image download."""
VIEW_SECONDS = 300.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Maximum size of a JSON response, such as the queue with all its graphs."""
_OK, _BAD_REQUEST = 200, 400
UPLOAD_FOLDER = "weft"
"""Folder for uploaded images below the input folder."""
Json = dict[str, Any]


class ComfyUnreachableError(Exception):
    """ComfyUI did not respond; whether it executed the call is unknown."""


class _CheckedConnector(aiohttp.TCPConnector):
    """Connections whose other end is checked before anything is sent."""

    def __init__(self, verify: VerifyPeer) -> None:
        super().__init__()
        self._verify = verify

    @override
    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Any:
        protocol = await super()._create_connection(req, traces, timeout)
        try:
            assert protocol.transport is not None, "it was just connected"
            await self._verify(protocol.transport)
        except BaseException:
            protocol.close()
            raise
        return protocol


class ComfyApi:
    """Client of one ComfyUI. Errors do not contain its address."""

    def __init__(
        self,
        base_url: str,
        *,
        connect_seconds: float,
        max_message_bytes: int,
        max_image_bytes: int,
        verify: VerifyPeer | None = None,
    ) -> None:
        """`verify` checks the other end of each connection; None: it is trusted."""
        self._base_url = base_url.rstrip("/")
        self._max_message_bytes, self._max_image_bytes = max_message_bytes, max_image_bytes
        self._timeout = aiohttp.ClientTimeout(total=CALL_SECONDS, sock_connect=connect_seconds)
        # Proxies from the environment are not meant for engines.
        self._session = aiohttp.ClientSession(
            connector=None if verify is None else _CheckedConnector(verify),
            timeout=self._timeout,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        await self._session.close()

    async def submit(self, graph: Json, client: str) -> str:
        """Queues a prompt and returns its id. Raises BACKEND_REJECTED naming the node, ComfyUnreachableError."""
        async with self._request("POST", "/prompt", {"prompt": graph, "client_id": client}) as response:
            document = await self._json(response)
            if response.status != _OK:
                raise refused_prompt(response.status, document)
        prompt_id = document.get("prompt_id") if isinstance(document, dict) else None
        if not isinstance(prompt_id, str) or not prompt_id:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "ComfyUI returned no id for the prompt")
        return prompt_id

    async def queue(self) -> list[QueuedPrompt]:
        """Returns the running and pending prompts in execution order."""
        return read_queue(await self._get("/queue"))

    async def history(self, prompt_id: str) -> Json | None:
        """Returns the history entry of a finished prompt; None: there is none."""
        found = await self._get(f"/history/{URL.build(path=prompt_id).raw_path}")
        entry = found.get(prompt_id) if isinstance(found, dict) else None
        return entry if isinstance(entry, dict) else None

    async def ended_prompt_of(self, client: str) -> str | None:
        """Returns the id of a recently finished prompt of a client; None: there is none."""
        found = await self._get("/history?max_items=64")
        for prompt_id, entry in found.items() if isinstance(found, dict) else ():
            prompt = entry.get("prompt") if isinstance(entry, dict) else None
            extra = prompt[3] if isinstance(prompt, list) and len(prompt) > 3 else None
            if isinstance(extra, dict) and extra.get("client_id") == client:
                return str(prompt_id)
        return None

    async def forget(self, prompt_id: str) -> None:
        """Deletes the history entry of a finished prompt."""
        await self._post("/history", {"delete": [prompt_id]})

    async def delete_pending(self, prompt_id: str) -> None:
        """Deletes a pending prompt; does not affect a running one."""
        await self._post("/queue", {"delete": [prompt_id]})

    async def interrupt(self, prompt_id: str) -> None:
        """Interrupts a running prompt. Old versions interrupt any running prompt: check the queue just before."""
        await self._post("/interrupt", {"prompt_id": prompt_id})

    async def free(self) -> None:
        """Requests that models are unloaded, which happens once no prompt is running."""
        await self._post("/free", {"unload_models": True, "free_memory": True})

    async def devices(self) -> list[Json]:
        """Returns its devices with their memory."""
        stats = await self._get("/system_stats")
        found = stats.get("devices") if isinstance(stats, dict) else None
        return [device for device in found if isinstance(device, dict)] if isinstance(found, list) else []

    async def upload(self, part: chat_pb2.MediaPart, name: str) -> str:
        """Uploads an image; returns the input value for a node that loads it."""
        body = form({"subfolder": UPLOAD_FOLDER, "type": "input"}, [("image", part)])
        # The form gives every file the same name, but this one needs a unique name.
        data = body.data.replace(b'name="image"; filename="file.', f'name="image"; filename="{name}.'.encode(), 1)
        async with self._request("POST", "/upload/image", data, body.content_type) as response:
            document = await self._json(response)
            if response.status != _OK or not isinstance(document, dict) or not isinstance(document.get("name"), str):
                raise WeftError(Reason.BACKEND_REJECTED, f"ComfyUI did not accept the image (status {response.status})")
        subfolder = document.get("subfolder", "")
        return f"{subfolder}/{document['name']}" if subfolder else str(document["name"])

    async def view(self, file: OutputFile) -> bytes:
        """Downloads an image. Raises BACKEND_ERROR if it does not exist, BACKEND_PROTOCOL_ERROR if it is too large."""
        query = urlencode({"filename": file.name, "subfolder": file.subfolder, "type": file.place})
        async with self._request("GET", f"/view?{query}", seconds=VIEW_SECONDS) as response:
            if response.status != _OK:
                raise WeftError(Reason.BACKEND_ERROR, f"ComfyUI has no file of an image (status {response.status})")
            return await read_bounded(response.content.iter_any(), self._max_image_bytes)

    @asynccontextmanager
    async def socket(self, client: str) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Opens the websocket of a client. Raises ComfyUnreachableError."""
        url = f"{self._base_url}/ws?clientId={client}"
        try:
            socket = await self._session.ws_connect(
                url, max_msg_size=self._max_message_bytes, autoping=True, heartbeat=CALL_SECONDS
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ComfyUnreachableError(type(error).__name__) from error
        try:
            yield socket
        finally:
            await socket.close()

    async def _get(self, path: str) -> Any:
        async with self._request("GET", path) as response:
            document = await self._json(response)
            if response.status != _OK:
                raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"ComfyUI returned status {response.status}")
            return document

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        async with self._request("POST", path, dict(body)) as response:
            if response.status >= _BAD_REQUEST:
                message = f"ComfyUI answers {path} with status {response.status}"
                raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, message)

    @staticmethod
    async def _json(response: aiohttp.ClientResponse) -> Any:
        """Parses a response as JSON; None: it is not JSON, as in some error responses."""
        raw = await read_bounded(response.content.iter_any(), MAX_ANSWER_BYTES)
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            return None

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: Json | bytes | None = None,
        content_type: str = "application/json",
        *,
        seconds: float = CALL_SECONDS,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"Content-Type": content_type} if data is not None else {}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=self._timeout.sock_connect)
        try:
            async with self._session.request(
                method, f"{self._base_url}{path}", data=data, headers=headers, allow_redirects=False, timeout=timeout
            ) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ComfyUnreachableError(type(error).__name__) from error
