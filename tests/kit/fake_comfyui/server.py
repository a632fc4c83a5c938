"""The fake's HTTP API and websocket."""

import asyncio
import json
import struct
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlparse

from aiohttp import BodyPartReader, WSMsgType, web

from kit.fake_comfyui.nodes import validated
from kit.fake_comfyui.worker import VRAM_TOTAL, Item, Worker

MAX_QUEUED_MESSAGES = 10_000
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeComfyUi:
    """A listening server; use it as a context manager."""

    def __init__(self, folder: Path, *, port: int = 0, host: str = "127.0.0.1") -> None:
        """`folder` contains input, output and temp."""
        self.folder = folder
        self.host, self.port = host, port
        self.worker = Worker(folder=folder, send=self._send)
        self.requests: list[tuple[str, str, Any]] = []
        """Method, path and JSON body of each request except reads."""
        self.origins: list[str] = []
        """Received Origin headers."""
        self.is_stuck = False
        """Whether requests are accepted but never answered."""
        self._number = 0
        self._sockets: dict[str, web.WebSocketResponse] = {}
        self._messages: asyncio.Queue[tuple[str | int, Any, str | None]] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{self.host}:{self.port}"

    @property
    def sockets(self) -> frozenset[str]:
        """Clients whose websocket is open."""
        return frozenset(self._sockets)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts listening and working."""
        for name in ("input", "output", "temp"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._runner = web.AppRunner(self._application(), handle_signals=False, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._tasks = [asyncio.create_task(self.worker.work()), asyncio.create_task(self._publish())]

    async def stop(self) -> None:
        """Stops it; the queue and the history are lost, as with a process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.drop_sockets()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self) -> None:
        """Restarts it on the same port, with empty queue and history."""
        await self.stop()
        self.worker = Worker(folder=self.folder, send=self._send, pace=self.worker.pace)
        self._messages = asyncio.Queue(MAX_QUEUED_MESSAGES)
        await self.start()

    async def drop_sockets(self) -> None:
        """Closes all websockets."""
        for socket in list(self._sockets.values()):
            with suppress(ConnectionError, RuntimeError):
                await socket.close()
        self._sockets.clear()

    def _send(self, kind: str | int, data: Any, client: str | None) -> None:
        with suppress(asyncio.QueueFull):
            self._messages.put_nowait((kind, data, client))

    async def _publish(self) -> None:
        while True:
            kind, data, client = await self._messages.get()
            sockets = list(self._sockets.values()) if client is None else [self._sockets.get(client)]
            for socket in sockets:
                if socket is None:
                    continue
                with suppress(ConnectionError, RuntimeError):
                    if isinstance(kind, int):
                        await socket.send_bytes(struct.pack(">I", kind) + data)
                    else:
                        await socket.send_json({"type": kind, "data": data})

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=100 * 1024 * 1024, middlewares=[self._guard])
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/ws", self._websocket),
            ("POST", "/prompt", self._post_prompt),
            ("GET", "/queue", self._get_queue),
            ("POST", "/queue", self._post_queue),
            ("POST", "/interrupt", self._interrupt),
            ("POST", "/free", self._free),
            ("GET", "/history", self._get_history),
            ("GET", "/history/{prompt_id}", self._get_history),
            ("POST", "/history", self._post_history),
            ("GET", "/view", self._view),
            ("POST", "/upload/image", self._upload),
            ("GET", "/system_stats", self._system_stats),
        ]
        for method, path, handler in routes:
            application.router.add_route(method, path, handler)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Rejects other origins, like ComfyUI on loopback, and records requests."""
        origin, host = request.headers.get("Origin"), request.headers.get("Host", "")
        if origin is not None:
            self.origins.append(origin)
            if host.partition(":")[0] in LOOPBACK and urlparse(origin).netloc.lower() != host.lower():
                return web.Response(status=403)
        if self.is_stuck:
            await asyncio.Event().wait()
        if request.method == "POST" and request.content_type == "application/json":
            self.requests.append((request.method, request.path, await _json(request)))
        return await handler(request)

    async def _websocket(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        client = request.query.get("clientId") or uuid.uuid4().hex
        self._sockets[client] = socket
        try:
            status = {"exec_info": {"queue_remaining": self.worker.remaining}}
            await socket.send_json({"type": "status", "data": {"status": status, "sid": client}})
            running = self.worker.running
            if running is not None and running.client_id == client and self.worker.last_node is not None:
                await socket.send_json({"type": "executing", "data": {"node": self.worker.last_node}})
            async for message in socket:
                if message.type is WSMsgType.ERROR:
                    break
        finally:
            if self._sockets.get(client) is socket:
                del self._sockets[client]
        return socket

    async def _post_prompt(self, request: web.Request) -> web.Response:
        body = await _json(request)
        if "prompt" not in body:
            return web.json_response({"error": "no prompt", "node_errors": []}, status=400)
        number, self._number = float(self._number), self._number + 1
        verdict = validated(body["prompt"], self._input_files())
        if verdict.error is not None:
            return web.json_response({"error": verdict.error, "node_errors": verdict.node_errors}, status=400)
        extra = {name: body[name] for name in ("client_id",) if name in body}
        item = Item(number, str(uuid.uuid4()), body["prompt"], extra, verdict.outputs)
        self.worker.put(item)
        return web.json_response({"prompt_id": item.prompt_id, "number": number, "node_errors": {}})

    def _input_files(self) -> frozenset[str]:
        folder = self.folder / "input"
        return frozenset(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    async def _get_queue(self, request: web.Request) -> web.Response:
        del request
        running = [] if self.worker.running is None else [self.worker.running.listed()]
        pending = [item.listed() for item in self.worker.pending]
        return web.json_response({"queue_running": running, "queue_pending": pending})

    async def _post_queue(self, request: web.Request) -> web.Response:
        body = await _json(request)
        for prompt_id in body.get("delete", []):
            self.worker.delete(prompt_id)
        return web.Response()

    async def _interrupt(self, request: web.Request) -> web.Response:
        body = await _json(request)
        self.worker.interrupt(body.get("prompt_id"))
        return web.Response()

    async def _free(self, request: web.Request) -> web.Response:
        body = await _json(request)
        self.worker.free({name for name in ("unload_models", "free_memory") if body.get(name)})
        return web.Response()

    async def _get_history(self, request: web.Request) -> web.Response:
        history, prompt_id = self.worker.history, request.match_info.get("prompt_id")
        if prompt_id is not None:
            return web.json_response({prompt_id: history[prompt_id]} if prompt_id in history else {})
        most = int(request.query.get("max_items", len(history)))
        return web.json_response(dict(list(history.items())[-most:] if most else []))

    async def _post_history(self, request: web.Request) -> web.Response:
        body = await _json(request)
        for prompt_id in body.get("delete", []):
            self.worker.history.pop(prompt_id, None)
        return web.Response()

    async def _view(self, request: web.Request) -> web.StreamResponse:
        name, place = request.query.get("filename", ""), request.query.get("type", "output")
        if not name or place not in ("input", "output", "temp"):
            return web.Response(status=404)
        if name.startswith("/") or ".." in name:
            return web.Response(status=400)
        root = (self.folder / place).resolve()
        file = (root / request.query.get("subfolder", "") / name).resolve()
        if not file.is_relative_to(root):
            return web.Response(status=403)
        return web.FileResponse(file) if file.is_file() else web.Response(status=404)

    async def _upload(self, request: web.Request) -> web.Response:
        fields: dict[str, str] = {}
        data, name = b"", ""
        async for part in await request.multipart():
            assert isinstance(part, BodyPartReader)
            if part.name == "image":
                data, name = bytes(await part.read()), part.filename or ""
            else:
                fields[part.name or ""] = (await part.read()).decode()
        if not name:
            return web.Response(status=400)
        place = fields.get("type", "input")
        root = (self.folder / place).resolve()
        file = (root / fields.get("subfolder", "") / name).resolve()
        if not file.is_relative_to(root):
            return web.Response(status=400)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        shown = {"name": file.name, "subfolder": fields.get("subfolder", ""), "type": place}
        return web.json_response(shown)

    async def _system_stats(self, request: web.Request) -> web.Response:
        del request
        device = {
            "name": "cuda:0 Fake",
            "type": "cuda",
            "index": 0,
            "vram_total": VRAM_TOTAL,
            "vram_free": self.worker.vram_free,
            "torch_vram_total": VRAM_TOTAL - self.worker.vram_free,
            "torch_vram_free": 0,
        }
        system = {"os": "posix", "ram_total": 2**34, "ram_free": 2**33, "comfyui_version": "0.0.0", "argv": ["main.py"]}
        return web.json_response({"system": system, "devices": [device]})


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        found = json.loads(await request.read() or b"{}")
    except ValueError:
        raise web.HTTPBadRequest from None
    return found if isinstance(found, dict) else {}
