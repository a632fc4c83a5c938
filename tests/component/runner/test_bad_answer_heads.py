"""An answer that is not HTTP fails its own request only."""

import asyncio

import pytest
from restart_stage import Repaving, repaving

from runner_svc.policy.lifecycle import Phase
from weft.kernel.reasons import Reason

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
