"""The engines that are asked through the mesh and directly: their table, their turns, and the way over a socket."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench import measures
from bench.engines import DIRECT, ENGINES, MissingEngineError, _in_turn, _note
from bench.load import Generator, Job, Result
from bench.scenarios import Options

RESULT = Result(
    requests=2,
    events=8,
    tokens=8,
    failures={},
    reconnects=0,
    wall_seconds=1.0,
    cpu_seconds=0.1,
    latency_p50=1.0,
    latency_p99=1.0,
    first_p50=1.0,
    first_p99=1.0,
)


@dataclass(frozen=True)
class OneSide:
    name: str

    def run(self, *, streams: int, requests: int, max_tokens: int) -> Result:
        raise NotImplementedError


def test_every_engine_has_a_way_and_rows_in_the_table() -> None:
    assert tuple(ENGINES) == measures.ENGINES
    rows = {(engine, streams) for engine in ENGINES for streams in measures.ENGINE_STREAMS}
    assert measures.ENGINE_RATIO.keys() == measures.ENGINE_TOKENS.keys() == rows
    assert measures.ENGINE_FIRST.keys() == measures.ENGINE_ADDED_FIRST.keys() == set(ENGINES)


def test_every_second_turn_begins_with_the_other_way() -> None:
    mesh, direct = OneSide("mesh"), OneSide("direct")
    assert [name for name, _ in _in_turn(mesh, direct, 0)] == [DIRECT, "weft"]
    assert [name for name, _ in _in_turn(mesh, direct, 1)] == ["weft", DIRECT]


def test_an_answer_that_is_too_short_or_fails_is_in_the_note(tmp_path: Path) -> None:
    options = Options(root=tmp_path, real_tokens=4)
    assert _note(RESULT, 2, options) == ""
    assert _note(RESULT, 3, options) == "8 of 12 tokens"


def test_an_engine_that_is_not_installed_names_what_installs_it(tmp_path: Path) -> None:
    for name in ("vllm", "ctranslate2"):
        with pytest.raises(MissingEngineError, match="make test-runtimes"):
            ENGINES[name].runner(tmp_path)


async def test_a_job_asks_over_a_unix_socket(tmp_path: Path) -> None:
    async def answer(http: web.Request) -> web.Response:
        asked.append(await http.json())
        return web.Response(text='data: {"content":"a"}\n\ndata: {"usage":{"completion_tokens":3}}\n\n')

    asked: list[Any] = []
    app = web.Application()
    app.router.add_post("/chat", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(tmp_path / "engine.sock")).start()
        job = Job(port=0, socket=str(tmp_path / "engine.sock"), path="/chat", body={"a": 1}, max_requests=2)
        async with asyncio.timeout(10.0):
            result = await Generator(job).run()
    finally:
        await runner.cleanup()
    assert (result.requests, result.tokens, result.failures) == (2, 6, {})
    assert asked == [{"a": 1}] * 2
