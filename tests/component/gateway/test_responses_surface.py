"""Responses as tasks of other APIs: each without a conversation."""

import json
from typing import Any

from background_script import long_answer, pieces
from gateway_script import serving
from response_script import MemoryResponses
from task_script import ScriptedTasks

PATH = "/api/v1/inference-tasks"


def asking(**fields: object) -> bytes:
    body = {"model": "chat", "input": "Say hello", **fields}
    return json.dumps({"endpoint": "/v1/responses", "body": body}).encode()


async def result_of(tasks: ScriptedTasks, **fields: object) -> dict[str, Any]:
    async with serving(tasks=tasks, responses=MemoryResponses()) as gateway:
        made = (await gateway.request("POST", PATH, asking(**fields))).json
        answer = await gateway.request("GET", f"{PATH}/{made['id']}")
        elsewhere = await gateway.request("GET", f"/v1/responses/{made['id'].replace('task-', 'resp_')}")
    assert elsewhere.status == 404
    result: dict[str, Any] = answer.json["result"]
    return result


async def test_result_items_match_a_normal_response() -> None:
    result = await result_of(ScriptedTasks(at_once=pieces(long_answer())))
    assert [item["type"] for item in result["output"]] == ["reasoning", "message", "function_call"]


async def test_fields_that_reference_another_response_are_rejected() -> None:
    tasks = ScriptedTasks()
    async with serving(tasks=tasks, responses=MemoryResponses()) as gateway:
        for fields, field in (
            ({"background": True}, "background"),
            ({"store": True}, "store"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
            ({"input": None}, "input"),
        ):
            answer = await gateway.request("POST", PATH, asking(**fields))
            assert (answer.status, answer.error["param"]) == (400, f"body.{field}")
    assert tasks.kept == {}
