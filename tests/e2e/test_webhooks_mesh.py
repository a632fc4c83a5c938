"""Webhooks on a whole mesh, declared and shown by commands, with OpenAI's client on both ends."""

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web
from kit.http_server import http_server
from mesh_process import POOL, MeshProcess, eventually
from openai import AsyncOpenAI

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
WAIT_SECONDS = 30.0
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}


async def test_ends_of_a_background_response_a_batch_and_a_task_are_sent(
    common_mesh: MeshProcess, tmp_path: Path
) -> None:
    mesh, events = common_mesh, dict[str, Any]()
    client = AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="unused", max_retries=0, webhook_secret=SECRET)

    async def receive(got: web.BaseRequest) -> web.StreamResponse:
        event: Any = client.webhooks.unwrap(await got.read(), dict(got.headers))
        events[event.type] = event
        return web.Response(status=204)

    async with client, http_server(receive) as url, asyncio.timeout(2 * WAIT_SECONDS):
        await mesh.weft("keys", "secret", "create", "hooks", "-", stdin=SECRET)
        tenant = {"kind": "tenant", "name": "default", "webhook": {"url": url, "secretRef": "secret/hooks"}}
        await mesh.weft("apply", "-f", "-", stdin=json.dumps(tenant))
        try:
            await declared_webhook(mesh, client, tmp_path, events)
        finally:
            await mesh.weft("delete", "tenant", "default")
            await mesh.weft("delete", "secret", "hooks")


async def declared_webhook(mesh: MeshProcess, client: AsyncOpenAI, folder: Path, events: dict[str, Any]) -> None:
    response = await client.responses.create(model=POOL, input="Hello", background=True, max_output_tokens=4)
    await eventually(
        lambda: "response.incomplete" in events or "response.completed" in events, WAIT_SECONDS, "no event"
    )
    ended = events.get("response.incomplete") or events["response.completed"]
    assert ended.data.id == response.id
    assert ended.type == f"response.{(await client.responses.retrieve(response.id)).status}"
    lines = folder / "lines.jsonl"
    body = {"model": POOL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    lines.write_text(json.dumps(LINE | {"body": body}) + "\n")
    with lines.open("rb") as opened:
        file = await client.files.create(file=opened, purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    await eventually(lambda: "batch.completed" in events, WAIT_SECONDS, "no event of the batch")
    assert events["batch.completed"].data.id == batch.id
    assert "task.completed" not in events, "a line of a batch has no event"
    task = (await mesh.weft("chat", POOL, "--async", "-m", "Hello")).strip()
    await eventually(lambda: "task.completed" in events, WAIT_SECONDS, "no event of the task")
    assert events["task.completed"].data.id == task
    shown = await eventually(lambda: delivered(mesh, task), WAIT_SECONDS, "it was not shown as delivered")
    assert ": accepted" in shown
    assert "Webhook: task.completed delivered" in await mesh.weft("explain", task)
    for words in (("get", "tenants", "-o", "yaml"), ("describe", "tenant", "default"), ("config", "show")):
        assert SECRET.removeprefix("whsec_") not in await mesh.weft(*words)
    (secret,) = json.loads(await mesh.weft("get", "secrets", "-o", "json"))["items"]
    assert secret["usedBy"] == ["tenant/default"]


async def delivered(mesh: MeshProcess, task: str) -> str:
    shown = await mesh.weft("describe", "task", task)
    return shown if "Webhook: task.completed delivered" in shown else ""
