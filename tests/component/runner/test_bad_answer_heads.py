"""An answer that is not HTTP fails its own request only."""

import asyncio

import pytest
from kit.engine_settings import engine_settings
from restart_stage import Repaving, living, repaving

from runner_svc.instance.settings import HibernationSettings
from runner_svc.policy.lifecycle import Phase
from runner_svc.runtimes.openai_http.backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel
from weft.kernel.reasons import Reason
from weft_testing.hostile_engine.server import Connection, Request, hostile_server, tidy

NEIGHBOUR_TOKENS = 60
BAD_HEADS = {
    "garbage": "\x16\x03\x01 nothing of HTTP\r\n\r\n",
    "a reset": "",
    "an over-long header": "HTTP/1.1 200 OK\r\nX-Long: " + "x" * 20_000 + "\r\n\r\n",
    "too many headers": "HTTP/1.1 200 OK\r\n" + "X-A: b\r\n" * 200 + "\r\n",
    "half a head": "HTTP/1.1 200 OK\r\nContent-Ty",
    "broken chunking": "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "two lengths": "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    "another protocol": "HTTP/2.0 200 OK\r\n\r\n",
    "a closed connection": "HTTP/1.1 ",
}


async def _neighbour(stage: Repaving) -> "tuple[asyncio.Task[object], list[str]]":
    """A concurrent request that runs to its own end."""
    text: list[str] = []
    task = asyncio.create_task(stage.ask("neighbour", text, max_tokens=NEIGHBOUR_TOKENS))
    await stage.until(lambda: bool("".join(text)) or task.done(), "no token")
    return task, text


@pytest.mark.slow("a stream beside each bad head")
async def test_bad_response_head_of_a_managed_engine_fails_one_request_and_the_engine_continues() -> None:
    async with repaving(answer_tokens=0, tokens_per_second=100) as stage:
        await stage.until_phase(Phase.READY)
        process_id = stage.backend.process_id
        for what, head in BAD_HEADS.items():
            neighbour, text = await _neighbour(stage)
            async with stage.control() as control:
                await control.set_behaviour(raw_answer=head)
                error = await stage.ask("bad")
                await control.set_behaviour(raw_answer=None)
            assert error is not None, what
            assert error.reason is Reason.BACKEND_PROTOCOL_ERROR, what
            assert stage.instance.phase is Phase.READY, what
            assert await stage.ask("next", max_tokens=2) is None, what
            assert await neighbour is None, what
            assert len("".join(text).split()) == NEIGHBOUR_TOKENS, what
        assert stage.backend.process_id == process_id
        assert stage.instance.restart_count == 0
        assert stage.phases.count(Phase.READY) == 1


async def test_bad_response_head_of_an_attached_server_fails_one_request_and_it_stays_attached() -> None:
    goes_on = asyncio.Event()

    async def handle(connection: Connection, request: Request) -> None:
        if b'"max_tokens":60' in request.body:
            head, _, rest = tidy("first and last").partition(b" and")
            await connection.send(head)
            await goes_on.wait()
            await connection.send(b" and" + rest)
        elif not heads:
            await connection.send(tidy("good"))
        elif not heads[0]:
            connection.reset()
        else:
            await connection.send(heads[0].encode("latin-1"))
            await connection.close()

    heads: list[str] = []
    async with hostile_server(handle) as server:
        config = engine_settings(OpenAiHttpModel, url=server.url, upstream_model="m")
        settings = HibernationSettings(attached=True, attach_retry_seconds=0.1)
        async with living(AttachedServer(*config), slots=4, hibernation=settings) as stage:
            await stage.until_phase(Phase.READY)
            text: list[str] = []
            neighbour = asyncio.create_task(stage.ask("neighbour", text, max_tokens=NEIGHBOUR_TOKENS))
            await stage.until(lambda: len(server.requests) == 1, "not asked")
            for what, head in BAD_HEADS.items():
                heads[:] = [head]
                error = await stage.ask("bad")
                heads.clear()
                assert error is not None, what
                assert error.reason is Reason.BACKEND_PROTOCOL_ERROR, what
                assert await stage.ask("next") is None, what
                assert not neighbour.done(), what
            goes_on.set()
            assert await neighbour is None
            assert "".join(text) == "first and last"
            assert stage.phases.count(Phase.READY) == 1


async def test_invalid_response_is_not_retried() -> None:
    """The server has taken the request, so it may have done the work."""

    async def handle(connection: Connection, _: Request) -> None:
        await connection.send(b"nothing of HTTP\r\n\r\n")
        await connection.close()

    async with hostile_server(handle) as server:
        config = engine_settings(OpenAiHttpModel, url=server.url, upstream_model="m")
        settings = HibernationSettings(attached=True)
        async with living(AttachedServer(*config), slots=1, hibernation=settings) as stage:
            await stage.until_phase(Phase.READY)
            error = await stage.ask()
            assert error is not None
            assert error.message == "the engine sent no HTTP answer: its head cannot be read"
            assert len(server.requests) == 1
