"""A mesh of two gateways and two runners whose processes may be of different releases, and its callers."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
from apart_mesh import Apart
from mesh_process import POOL, WEFT, eventually, fake_runner, write_config

from weft.kernel.values.names import new_id

READY_SECONDS = 30.0
ANSWER_SECONDS = 60.0
TASK_SECONDS = 60.0
TOKENS = 12
CALLERS = 4
HEARTBEAT_SECONDS = 0.5
REGISTRY = {"heartbeat_interval_seconds": HEARTBEAT_SECONDS, "inactive_after_seconds": 6 * HEARTBEAT_SECONDS}
"""Section `registry`: a runner without heartbeats is inactive within seconds."""
PAUSE_SECONDS = 0.02
UNAVAILABLE = 503
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
GATEWAYS = ("gateway-1", "gateway-2")
RUNNERS = ("runner-a", "runner-b")
ORDER = ("registry", "router", *GATEWAYS, *RUNNERS)
"""The order in which a mesh is upgraded: docs/deploy.md."""


class MixedMesh:
    """Registry, router, gateways and runners under one home, each started by a command of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        runners = [fake_runner(name, answer_tokens=0, tokens_per_second=40) for name in ("a", "b")]
        self.apart = Apart(folder / "home", write_config(folder, *runners, registry=REGISTRY))
        self.urls: dict[str, str] = {}

    def start(self, name: str, weft: tuple[str, ...] = WEFT) -> None:
        """Starts a process of ORDER by the command line of its release."""
        service, _, which = name.partition("-")
        arguments: tuple[str, ...] = ()
        if service == "runner":
            arguments = ("--runner", which)
        if service == "gateway":
            # Each has a socket and a key of results of its own.
            run = f"unix:{self.apart.home}/run"
            arguments = ("--home", str(self.folder / name), "--registry", f"{run}/registry.sock")
            arguments += ("--router", f"{run}/router.sock")
        address = self.apart.start(service, *arguments, weft=weft, name=name)
        if service == "gateway":
            self.urls[name] = address

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends a process; callers use the other gateway meanwhile."""
        self.urls.pop(name, None)
        return self.apart.end(name, number)

    async def replace(self, name: str, weft: tuple[str, ...] = WEFT) -> None:
        """Ends a process in order and starts it again."""
        assert await asyncio.to_thread(self.end, name) == 0, name
        await asyncio.to_thread(self.start, name, weft)


@contextmanager
def running_mixed(folder: Path) -> Iterator[MixedMesh]:
    """A mesh of which nothing runs yet; what runs in the end ends with exit code 0."""
    mesh = MixedMesh(folder)
    try:
        yield mesh
    finally:
        codes = mesh.apart.end_all()
    assert set(codes) <= {0}, codes


class Callers:
    """Callers that send one request after the other to whichever gateway takes it, and count what became of them."""

    def __init__(self, mesh: MixedMesh, http: aiohttp.ClientSession) -> None:
        self._mesh = mesh
        self._http = http
        self.served = 0
        self.lost: list[str] = []

    async def chat(self) -> str:
        """One streamed chat; what was wrong with its answer, empty for a whole one."""
        body = {
            "model": POOL,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": TOKENS,
            "stream": True,
        }
        response = await self._taken("/v1/chat/completions", body)
        async with response:
            if response.status != 200:
                return f"{response.status} {await response.text()}"
            lines = [line[5:].strip().decode() async for line in response.content if line.startswith(b"data:")]
        if not lines or lines[-1] != "[DONE]":
            return f"cut off after {lines[-1:]}"
        text = "".join(
            choice["delta"].get("content") or ""
            for line in lines[:-1]
            for choice in json.loads(line).get("choices", ())
        )
        return "" if text.count("tok") == TOKENS else f"another answer: {text!r}"

    async def task(self) -> dict[str, Any]:
        """One task to its end. A submission that is not acknowledged is sent again, with its key: docs/durable.md."""
        body = {
            "model": POOL,
            "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS},
        }
        key = {"Idempotency-Key": new_id("k")}

        async def submitted() -> dict[str, Any] | None:
            async with await self._taken("/api/v1/inference-tasks", body, key) as response:
                return None if response.status == UNAVAILABLE else await response.json()

        task = await eventually(submitted, TASK_SECONDS, "the task is not accepted")

        async def ended() -> dict[str, Any] | None:
            try:
                document = await self.find_task(task["id"])
            except aiohttp.ClientError:
                return None  # its gateway was ended; a poll is sent again
            return document if document.get("state") in ("completed", "failed", "cancelled") else None

        found: dict[str, Any] = await eventually(ended, TASK_SECONDS, "the task does not end")
        return found

    async def find_task(self, task: str) -> dict[str, Any]:
        """The document of a task, or of the error."""
        url = next(iter(self._mesh.urls.values()))
        async with self._http.get(f"{url}/api/v1/inference-tasks/{task}") as response:
            document: dict[str, Any] = await response.json()
        return document

    async def keep_calling(self) -> None:
        """Chats until it is cancelled."""
        while True:
            try:
                fault = await self.chat()
            except (aiohttp.ClientError, TimeoutError) as error:
                fault = repr(error)
            if fault:
                self.lost.append(fault)
            else:
                self.served += 1

    async def wait_served(self) -> None:
        """Until four further requests have been answered."""
        wanted = self.served + 4
        await eventually(lambda: self.served >= wanted, ANSWER_SECONDS, f"no answers; lost: {self.lost[-3:]}")

    async def _taken(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] = NO_HEADERS
    ) -> aiohttp.ClientResponse:
        """Sends a request to the first gateway that accepts its connection, as a balancer does."""
        while True:
            for url in list(self._mesh.urls.values()):
                try:
                    return await self._http.post(f"{url}{path}", json=body, headers=headers)
                except aiohttp.ClientConnectorError:
                    continue
            await asyncio.sleep(PAUSE_SECONDS)


@asynccontextmanager
async def calling(mesh: MixedMesh) -> AsyncIterator[Callers]:
    """Callers of a mesh that is ready."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as http:
        callers = Callers(mesh, http)

        async def is_ready() -> bool:
            async with http.get(f"{next(iter(mesh.urls.values()))}/readyz") as response:
                return response.status == 200 and not await callers.chat()

        await eventually(is_ready, READY_SECONDS, "the mesh does not serve")
        yield callers


@asynccontextmanager
async def under_load(mesh: MixedMesh) -> AsyncIterator[Callers]:
    """Callers that send requests all the time."""
    async with calling(mesh) as callers:
        tasks = [asyncio.create_task(callers.keep_calling()) for _ in range(CALLERS)]
        try:
            yield callers
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
