"""A publisher of tests: in the test itself, where each step is the test's, and as a process that can be killed."""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp

ROOT = "/publisher/v1"
SESSION = "weft-publisher-session"
LIMIT_SECONDS = 20.0


def text_chunk(text: str = "", *, finish: str | None = None) -> dict[str, Any]:
    """A line of a result with a chunk of a chat."""
    delta = {"content": text} if text else {}
    return {"chunk": {"data": {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}}}


DONE: dict[str, Any] = {"chunk": {"done": True}}


class Publisher:
    """A publisher whose answers the test gives."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str) -> None:
        self.http = http
        self.url = f"{url}{ROOT}"
        self.token = token
        self.secret = ""
        self.facts: dict[str, Any] = {}
        self.tasks: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.cancelled: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.ends: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None
        self._opened = asyncio.Event()

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer."""
        sent = {SESSION: self.secret} if self.secret else {}
        data = body if isinstance(body, (bytes, AsyncIterator)) else json.dumps(body or {}).encode()
        async with self.http.post(f"{self.url}/{path}", data=data, headers={**sent, **headers}) as answer:
            raw = await answer.read()
            return answer.status, json.loads(raw) if raw else {}

    async def register(self, name: str, *models: dict[str, Any], token: str = "", **more: Any) -> int:
        """Registers; returns the status."""
        body = {"name": name, "models": list(models), **more}
        status, self.facts = await self.post("register", body, authorization=f"Bearer {token or self.token}")
        self.secret = self.facts.get("session", self.secret)
        return status

    async def listen(self) -> None:
        """Opens the event stream, which is read until `hang_up`."""
        self._opened.clear()
        self._reading = asyncio.create_task(self._read())
        async with asyncio.timeout(LIMIT_SECONDS):
            await self._opened.wait()

    async def hang_up(self) -> None:
        """Closes the event stream."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def next_task(self) -> dict[str, Any]:
        """The next task that it is given."""
        async with asyncio.timeout(LIMIT_SECONDS):
            return await self.tasks.get()

    async def result(self, task: dict[str, Any], *lines: Any) -> int:
        """Posts lines of a result, each by itself; the status of the last one."""
        status = 0
        for line in lines:
            status, _ = await self.post(f"tasks/{task['task']}/result", line)
        return status

    async def say(self, task: dict[str, Any], *texts: str) -> int:
        """Answers a chat with these texts, to its end."""
        return await self.result(task, *map(text_chunk, texts), text_chunk(finish="stop"), DONE)

    async def _read(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        name = ""
        async with self.http.get(f"{self.url}/stream", headers={SESSION: self.secret}, timeout=timeout) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                self._opened.set()
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    queues = {"task": self.tasks, "cancel": self.cancelled, "end": self.ends}
                    queues[name].put_nowait(json.loads(line[6:]))


@asynccontextmanager
async def publishing(url: str, token: str, name: str = "", *models: dict[str, Any]) -> AsyncIterator[Publisher]:
    """A publisher, registered under `name` with its stream open; empty: not registered yet."""
    async with aiohttp.ClientSession() as http:
        publisher = Publisher(http, url, token)
        try:
            if name:
                assert await publisher.register(name, *models) == 201, publisher.facts
                await publisher.listen()
            yield publisher
        finally:
            if publisher.secret:
                await publisher.post("leave", {"grace_seconds": 0})
            await publisher.hang_up()


@contextmanager
def publisher_process(url: str, token: str, name: str, model: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A publisher as a process, which prints "listening" once its stream is open, and the id of each task."""
    command = [sys.executable, __file__, url, name, model, *arguments]
    process = subprocess.Popen(command, env={**os.environ, "TOKEN": token}, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate(timeout=LIMIT_SECONDS)


async def _main(options: argparse.Namespace) -> None:
    async with aiohttp.ClientSession() as http:
        publisher = Publisher(http, options.url, os.environ["TOKEN"])
        status = await publisher.register(options.name, {"name": options.model, "pool": options.pool, "slots": 4})
        assert status == 201, publisher.facts
        await publisher.listen()
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        while True:
            task = await publisher.tasks.get()
            sys.stdout.write(f"{task['task']}\n")
            sys.stdout.flush()
            for number in range(options.chunks):
                await publisher.result(task, text_chunk(f"tok{number} "))
            await asyncio.sleep(options.pause)
            await publisher.say(task, "end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("name")
    parser.add_argument("model")
    parser.add_argument("--pool", default="")
    parser.add_argument("--chunks", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0)
    asyncio.run(_main(parser.parse_args()))
