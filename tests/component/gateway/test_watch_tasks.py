"""Kind `task` of GET /api/v1/watch: the same objects as in the list of tasks, of the caller's tenant alone."""

import json

from gateway_script import serving
from task_script import ScriptedTasks
from watch_script import QUICK, watching

NEW = json.dumps(
    {"endpoint": "/v1/chat/completions", "body": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}}
).encode()
TASKS = "/api/v1/inference-tasks"


async def test_watched_tasks_match_the_list_format() -> None:
    async with serving(config=QUICK, tasks=ScriptedTasks()) as gateway:
        before = (await gateway.request("POST", TASKS, NEW)).json
        async with watching(gateway, "task") as stream:
            assert await stream.next() == {"kind": "task", "change": "put", "name": before["id"], "object": before}
            assert (await stream.next())["change"] == "synced"
            after = (await gateway.request("POST", TASKS, NEW)).json
            assert (await stream.next())["object"] == after
        (_, listed) = (await gateway.request("GET", TASKS)).json["data"][::-1]
    assert listed == after


async def test_tasks_of_another_tenant_are_not_watched() -> None:
    async with serving(config=QUICK, tasks=ScriptedTasks()) as gateway:
        await gateway.request("POST", TASKS, NEW, {"X-Tenant-ID": "bob"})
        async with watching(gateway, "task") as stream:
            assert (await stream.next())["change"] == "synced"
