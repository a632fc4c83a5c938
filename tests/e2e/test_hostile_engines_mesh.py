"""Wrong answers of an engine, as the callers of every generating surface see them through a whole mesh.

The whole catalogue, beside an engine alone: tests/component/runner/test_hostile_engines.py.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from mesh_process import MeshProcess, running_mesh, write_config

from weft_testing.hostile_engine.catalogue import OF_CHATS, Row
from weft_testing.hostile_engine.server import Connection, Request, hostile_server, tidy

MAX_ANSWER_BYTES = 100_000
EVERY = 5
ROWS = {row.name: row for row in OF_CHATS[::EVERY] if len(row.answer) <= MAX_ANSWER_BYTES}
WELL = "well"
ENDINGS = ("[DONE]", "message_stop", "response.completed", "response.incomplete")
"""How the streams of the surfaces end where the answer is complete."""


@dataclass(frozen=True)
class TaskApi:
    """One way to ask."""

    path: str
    streams: bool

    def body(self, words: str) -> dict[str, Any]:
        """A request with these words."""
        said = {"model": "m", "stream": self.streams}
        if self.path.endswith("responses"):
            return {**said, "input": words, "store": False}
        return {**said, "messages": [{"role": "user", "content": words}], "max_tokens": 99}


SURFACES = [
    TaskApi(f"/v1/{path}", streams)
    for path in ("chat/completions", "responses", "messages")
    for streams in (True, False)
]


async def _handle(connection: Connection, request: Request) -> None:
    row = ROWS.get(request.words)
    if row is None:
        await connection.send(tidy(WELL))
    elif not row.answer:
        connection.reset()
    else:
        await connection.send(row.answer)
        if row.ends:
            await connection.close()


@contextmanager
def _engine() -> Iterator[str]:
    """A hostile engine on an event loop of its own; its address."""
    address: list[str] = []
    loop, ending, listens = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        async with hostile_server(_handle) as server:
            address.append(server.url)
            listens.set()
            await ending.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    listens.wait()
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("hostile")
    with _engine() as url:
        model = {"name": "m", "url": url, "upstream_model": "m"}
        config = write_config(folder, {"name": "a", "runtime": "openai_http", "models": [model]})
        with running_mesh(folder / "home", "--config", str(config)) as running:
            yield running


async def _ask(http: aiohttp.ClientSession, mesh: MeshProcess, surface: TaskApi, words: str) -> tuple[int, str]:
    async with http.post(mesh.url + surface.path, json=surface.body(words)) as response:
        return response.status, await response.text()


def _payloads(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def faults(row: Row, surface: TaskApi, status: int, text: str) -> list[str]:
    """What a caller got that the row does not say."""
    if "Traceback" in text.replace("<html>Traceback", "") or "internal error" in text:
        return [f"the inside of the mesh: {text[:200]}"]
    payloads = _payloads(text) if surface.streams and status == 200 else []
    ends = [word for word in ENDINGS if any(word in payload for payload in payloads)]
    if row.sees is None:
        is_right = status == 200 and (bool(ends) or not surface.streams)
        return [] if is_right else [f"no good answer: {status} {text[-200:]}"]
    if status != 200:
        return (
            []
            if (status, "error" in json.loads(text)) == (row.status, True)
            else [f"{status}, not {row.status}: {text}"]
        )
    if not surface.streams:
        return [f"a tidy answer: {text[:200]}"]
    found = [f"a tidy end, {word}" for word in ends]
    if '"finish_reason":"' in text or '"stop_reason":"' in text:
        found.append("a finish reason")
    if not payloads or "error" not in payloads[-1]:
        found.append(f"no error at the end: {text[-200:]}")
    return found


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: f"{surface.path} {surface.streams}")
async def test_through_the_gateway_a_wrong_answer_is_an_error_on_every_surface(
    mesh: MeshProcess, surface: TaskApi
) -> None:
    found: list[str] = []
    async with aiohttp.ClientSession() as http:
        for row in ROWS.values():
            found += [
                f"{row.name}: {fault}" for fault in faults(row, surface, *await _ask(http, mesh, surface, row.name))
            ]
            status, text = await _ask(http, mesh, surface, "a good one")
            if status != 200 or WELL not in text:
                found.append(f"after {row.name}: {status} {text[:200]}")
    assert found == []
    assert mesh.process.poll() is None


_STREAM, _WHOLE = SURFACES[0], SURFACES[1]
_BAD = next(row for row in ROWS.values() if row.sees is not None)


@pytest.mark.parametrize(
    ("surface", "status", "text", "words"),
    [
        (_WHOLE, 200, '{"choices":[]}', "a tidy answer"),
        (_WHOLE, 500, '{"error":{}}', "500, not 502"),
        (_WHOLE, 502, '{"error":"an internal error"}', "the inside"),
        (_STREAM, 200, 'data: {"choices":[]}\n\ndata: [DONE]\n\n', "a tidy end"),
        (_STREAM, 200, 'data: {"choices":[{"finish_reason":"stop"}]}\n\ndata: {"error":{}}\n\n', "a finish reason"),
        (_STREAM, 200, 'data: {"choices":[]}\n\n', "no error at the end"),
    ],
)
def test_the_checker_finds_what_no_caller_may_see(surface: TaskApi, status: int, text: str, words: str) -> None:
    """The negative control."""
    assert any(words in fault for fault in faults(_BAD, surface, status, text))
