"""Calls of the client's search for tools, as Codex reads them."""

from typing import Any

from background_script import events_in, made_whole, pieces
from gateway_script import ScriptedDispatcher, delta, finished, serving, started, usage
from response_script import PATH, MemoryResponses
from task_script import ScriptedTasks

from weft.api.common.v1 import event_pb2

SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools", "parameters": {"type": "object"}}


def searching() -> list[Any]:
    parts = [{"id": "s1", "name": "tool_search", "arguments_text": '{"query":'}, {"arguments_text": '"files"}'}]
    calls = [[delta(tool_calls=[event_pb2.ToolCallDelta(index=0, **part)])] for part in parts]  # type: ignore[arg-type]
    return [[started()], *calls, [delta(finish="TOOL_CALLS"), usage(), finished()]]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "Hi", "tools": [SEARCH], **fields}


def shown(item: dict[str, Any]) -> list[Any]:
    return [item["type"], item["call_id"], item["execution"], item["arguments"], item["status"]]


EXPECTED = ["tool_search_call", "s1", "client", {"query": "files"}, "completed"]


async def test_call_of_the_search_is_an_item_with_an_object() -> None:
    async with serving(ScriptedDispatcher(steps=searching()), responses=MemoryResponses()) as gateway:
        answer = (await gateway.request("POST", PATH, body())).of(200)
        (item,) = answer["output"]
        assert (shown(item), item["id"][:4]) == (EXPECTED, "tsc_")
        found = {"type": "tool_search_output", "call_id": "s1", "tools": [{"type": "function", "name": "ls"}]}
        await gateway.request("POST", PATH, body(input=[found], previous_response_id=answer["id"]))
        await gateway.request("POST", PATH, body(tools=[{"type": "function", "name": "tool_search"}]))
    then = gateway.dispatcher.payloads[1]
    assert [tool.function.name for tool in then.tools] == ["tool_search", "ls"]
    assert then.messages[-1].content[0].text == "Found tools: ls"


async def test_streamed_call_has_no_deltas_and_a_function_of_that_name_is_one() -> None:
    async with serving(ScriptedDispatcher(steps=searching())) as gateway:
        events = events_in((await gateway.request("POST", PATH, body(stream=True))).body)
        plain = await gateway.request("POST", PATH, body(tools=[{"type": "function", "name": "tool_search"}]))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    assert events[2]["item"]["arguments"] == {}
    assert shown(events[3]["item"]) == EXPECTED
    assert [event["sequence_number"] for event in events] == list(range(5))
    assert plain.json["output"][0]["type"] == "function_call"


async def test_background_response_has_the_same_item() -> None:
    tasks = ScriptedTasks(at_once=pieces(searching()))
    async with serving(responses=MemoryResponses(), tasks=tasks) as gateway:
        made = await made_whole(gateway, tools=[SEARCH])
    assert shown(made["output"][0]) == EXPECTED
