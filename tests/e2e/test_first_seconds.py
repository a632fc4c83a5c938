"""Requests from the moment at which the HTTP port opens, before the runners of the configuration have come."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any

import aiohttp
import pytest
from mesh_process import STOP_SECONDS, WEFT, fake_runner, running_mesh, user_environment, write_config

from weft_testing.free_port import free_port

START_SECONDS = 60.0
ANSWERED = 200
LOAD_SECONDS = 2.0
NAMES = ("m-a", "pool", "agent/greeter")
MOST_WAITING = 30
"""Of more requests, on a machine that starts slowly, the last would wait for longer than a queue lets them."""


def configured(folder: Path, port: int) -> Path:
    # Long enough that requests of the first moment are told of it.
    runner = fake_runner("a", slots=8, load_seconds=LOAD_SECONDS)
    runner["agents"] = [{"name": "greeter", "model": "m-a", "system_prompt": "Greet."}]
    return write_config(folder, runner, port=port, router={"queue_depth_per_runner": 1000})


@contextmanager
def starting(home: Path, config: Path) -> Iterator[None]:
    """`weft up` that has only been started."""
    with (home.parent / "starting.out").open("wb") as output:
        process = Popen(
            [*WEFT, "up", "--home", str(home), "--config", str(config)],
            env=user_environment(),
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
        )
        try:
            yield
        finally:
            process.terminate()
            assert process.wait(STOP_SECONDS) == 0


async def until_open(port: int) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.005)
                continue
            writer.close()
            return


async def ask(http: aiohttp.ClientSession, model: str, *, stream: bool = False) -> tuple[int, str]:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    async with http.post("/v1/chat/completions", json=body | {"stream": stream}) as response:
        return response.status, await response.text()


@pytest.mark.parametrize(
    "is_new",
    [True, pytest.param(False, marks=pytest.mark.nightly("repeats a start"))],
    ids=["a new home", "a home that ran before"],
)
async def test_configured_model_is_awaited_during_startup_and_unknown_ones_are_rejected_immediately(
    tmp_path: Path, is_new: bool
) -> None:
    """They were answered with 404, and then with 503."""
    port, home = free_port(), tmp_path / "home"
    config = configured(tmp_path, port)
    if not is_new:
        with running_mesh(home, "--config", str(config)):
            pass
    with starting(home, config):
        await until_open(port)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            async with http.get("/health") as response:
                first_health = response.status
            asked = [asyncio.create_task(ask(http, name)) for name in NAMES for _ in range(2)]
            streamed = asyncio.create_task(ask(http, "m-a", stream=True))
            unknown = await ask(http, "nobody")
            assert unknown[0] == 404, unknown
            while not streamed.done():
                if len(asked) < MOST_WAITING:
                    asked.append(asyncio.create_task(ask(http, NAMES[len(asked) % len(NAMES)])))
                await asyncio.wait([streamed], timeout=0.1)
            answers = await asyncio.gather(*asked)
            assert [answer for answer in answers if answer[0] != ANSWERED] == []
            status, told = await streamed
            assert (first_health, status) == (503, ANSWERED)
            assert ": loading" in told, told
            assert "[DONE]" in told
            assert (await ask(http, "nobody"))[0] == 404
            async with http.get("/health") as response:
                assert response.status == ANSWERED
