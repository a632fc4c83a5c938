"""A followed server whose list has names of weft.yaml: the start returns, and what can be served is served."""

import json
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from chats import answers
from kit.http_server import http_server
from mesh_process import eventually, run_weft, running_mesh, write_config

pytestmark = pytest.mark.slow("starts a mesh with three runners")
LISTED = ("box", "att", "helper", "good", "bad\x01name", "other")


async def _answer(request: web.BaseRequest) -> web.StreamResponse:
    if request.path.endswith("/models"):
        return web.json_response({"object": "list", "data": [{"id": name, "owned_by": "x"} for name in LISTED]})
    message = {"role": "assistant", "content": "hi"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    body = json.loads(await request.read() or b"{}")
    if not body.get("stream"):
        return web.json_response({"id": "c", "object": "chat.completion", "choices": [choice], "usage": usage})
    chunk = {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": message}]}
    end = {
        "id": "c",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
    }
    text = "".join(f"data: {json.dumps(each)}\n\n" for each in (chunk, end | {"usage": usage})) + "data: [DONE]\n\n"
    return web.Response(text=text, content_type="text/event-stream")


async def test_list_with_names_of_runners_and_agents_takes_no_runner_down(tmp_path: Path) -> None:
    async with http_server(_answer) as url:
        agent = {"name": "helper", "model": "good"}
        own = {"name": "good", "url": url, "upstream_model": "good"}
        config = write_config(
            tmp_path,
            {"name": "att", "runtime": "openai_http", "models": [own], "agents": [agent]},
            {"name": "box", "url": url},
        )
        with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
            names = ("good", "agent/helper", "box-box", "box-att", "box-helper", "box-good", "other")
            for name in names:
                await eventually(partial(answers, mesh.url, name), 20.0, f"{name} does not answer")
            shown = (await run_weft("describe", "runner", "box", home=mesh.home))[1]
            assert "leaves out model bad name" in shown
            assert "not served: model bad name" in shown
