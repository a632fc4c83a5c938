"""Web search in the Responses API: the items, events and citations that clients read."""

import json
from pathlib import Path
from typing import Any

import pytest
from gateway_script import RunningGateway
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from response_script import MemoryResponses, router_store
from search_stage import HOSTED, LOOM, WEFT, FakeSearXng, Passes, called, said, searching
from task_script import ScriptedTasks

from weft.api.common.v1 import chat_pb2

FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def response_of(gateway: RunningGateway, *, tenant: str = "default", **fields: Any) -> Any:
    body = {"model": "tiny", "input": "What is weft?", "tools": [HOSTED], **fields}
    answer = await gateway.request("POST", "/v1/responses", json.dumps(body).encode(), {"X-Tenant-ID": tenant})
    if not fields.get("stream"):
        return answer.of(200)
    events = events_in(answer.body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert sorted(items, key=lambda item: item["id"]) == sorted(
        events[-1]["response"]["output"], key=lambda item: item["id"]
    )
    return events[-1]["response"]


def events_in(body: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("stream", [False, True])
async def test_search_is_an_item_and_its_pages_are_cited(stream: bool) -> None:
    text = "It is at https://weft.example/mesh, says é; not https://invented.example."
    passes = Passes(passes=[called(text="I look."), said(text)])
    async with searching(passes) as (gateway, service):
        answer = await response_of(gateway, stream=stream)
    Response.model_validate(answer)
    assert service.queries == ["weft mesh"]
    before, call, after = answer["output"]
    assert (before["content"][0]["text"], before["content"][0]["annotations"]) == ("I look.", [])
    assert (call["type"], call["status"], call["id"][:3]) == ("web_search_call", "completed", "ws_")
    assert call["action"] == {"type": "search", "query": "weft mesh", "queries": ["weft mesh"]}
    (part,) = after["content"]
    (citation,) = part["annotations"]
    assert (citation["type"], citation["url"], citation["title"]) == ("url_citation", WEFT["url"], "The mesh")
    assert part["text"][citation["start_index"] : citation["end_index"]] == WEFT["url"]
    assert (answer["status"], answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == ("completed", 17, 7)
    assert "warnings" not in answer
    assert [tool.function.name for tool in passes.seen[0].tools] == ["web_search"]
    assert answer["tools"] == [HOSTED]


async def test_events_of_a_search_are_those_of_the_api() -> None:
    passes = Passes(passes=[called(), said("At https://loom.example")])
    async with searching(passes) as (gateway, _):
        body = {"model": "tiny", "input": "Hi", "tools": [HOSTED], "stream": True}
        answer = await gateway.request("POST", "/v1/responses", json.dumps(body).encode())
    events = events_in(answer.body)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "web_search_call.in_progress",
        "web_search_call.searching",
        "web_search_call.completed",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.annotation.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    for event in events:
        EVENTS.validate_python(event)
    assert {event["item_id"] for event in events[3:6]} == {events[2]["item"]["id"]}
    assert events[10]["annotation"]["url"] == LOOM["url"]
    assert events[12]["part"]["annotations"] == [events[10]["annotation"]]


async def test_sources_and_results_are_shown_to_those_who_ask() -> None:
    include = ["web_search_call.action.sources", "web_search_call.results"]
    async with searching(Passes(passes=[called(), said("ok")])) as (gateway, _):
        call = (await response_of(gateway, include=include))["output"][0]
    assert call["action"]["sources"] == [{"type": "url", "url": WEFT["url"]}, {"type": "url", "url": LOOM["url"]}]
    assert call["results"][0] == {"url": WEFT["url"], "title": "The mesh", "text": "weft is a mesh."}


@pytest.mark.parametrize("is_stored", [False, True])
async def test_later_turn_reads_the_results_again_without_a_search(is_stored: bool) -> None:
    passes = Passes(passes=[called(text="I look."), called("again"), said("A mesh."), said("As I said.")])
    async with searching(passes, responses=MemoryResponses()) as (gateway, service):
        first = await response_of(gateway, stream=True)
        earlier = [{"role": "user", "content": "What is weft?"}, *first["output"]]
        asked = {"role": "user", "content": "So?"}
        if is_stored:
            again = await response_of(gateway, input=[asked], previous_response_id=first["id"])
        else:
            again = await response_of(gateway, input=[*earlier, asked])
    assert len(service.asked) == 2
    third, fourth = passes.seen[2:]
    # What the model read in its last pass, and what it answered.
    assert list(fourth.messages)[: len(third.messages)] == list(third.messages)
    assert [message.content[0].text for message in fourth.messages[-2:]] == ["A mesh.", "So?"]
    assert "warnings" not in again


async def test_search_in_a_conversation_is_rebuilt_as_the_model_read_it(tmp_path: Path) -> None:
    passes = Passes(passes=[called(text="I look."), called("again"), said("A mesh."), said("As I said.")])
    async with router_store(tmp_path) as store, searching(passes, responses=store) as (gateway, service):
        made = await gateway.sdk.conversations.create()
        first = await response_of(gateway, conversation=made.id, store=False)
        again = await response_of(gateway, input="So?", conversation=made.id)
        items = [item.to_dict() async for item in gateway.sdk.conversations.items.list(made.id, order="asc")]
    third, fourth = passes.seen[2:]
    assert list(fourth.messages)[: len(third.messages)] == list(third.messages)
    assert (len(service.asked), items[1:-2], "warnings" in again) == (2, first["output"], False)


async def test_search_of_another_tenant_or_service_keeps_its_query() -> None:
    passes = Passes(passes=[called(), said("ok"), said("ok"), said("ok"), said("ok")])
    async with searching(passes) as (gateway, _):
        (own, _) = (await response_of(gateway, tenant="acme"))["output"]
        foreign = [own, own | {"encrypted_content": "gAAAAA"}, {**own, "encrypted_content": None}]
        for item in foreign:
            history = [{"role": "user", "content": "x"}, item, {"role": "user", "content": "So?"}]
            answer = await response_of(gateway, input=history)
            _, asked, result, _ = passes.seen[-1].messages
            assert (asked.tool_calls[0].name, asked.tool_calls[0].arguments_text) == (
                "web_search",
                '{"query":"weft mesh"}',
            )
            assert (result.tool_call_id, "did not send them back" in result.content[0].text) == (
                asked.tool_calls[0].id,
                True,
            )
            assert "weft is a mesh" not in str(passes.seen[-1])
            assert "warnings" not in answer


@pytest.mark.parametrize("stream", [False, True])
async def test_search_beside_a_function_of_the_caller_runs_before_the_answer_ends(stream: bool) -> None:
    passes = Passes(passes=[called(beside="weather"), said("Rain.")])
    async with searching(passes) as (gateway, service):
        first = await response_of(gateway, stream=stream, tools=[FUNCTION, HOSTED])
        kinds = {item["type"]: item for item in first["output"]}
        assert sorted(kinds) == ["function_call", "web_search_call"]
        result = {"type": "function_call_output", "call_id": kinds["function_call"]["call_id"], "output": "rain"}
        history = [{"role": "user", "content": "What is weft?"}, *first["output"], result]
        answer = await response_of(gateway, stream=stream, tools=[FUNCTION, HOSTED], input=history)
    assert (len(service.asked), answer["output"][0]["content"][0]["text"]) == (1, "Rain.")
    # The pass that called it lists it.
    assert [len(receipt.tool_runs) for receipt in passes.reported] == [1, 0]
    messages = passes.seen[1].messages
    assert sorted(call.name for call in messages[1].tool_calls) == ["weather", "web_search"]
    assert {message.tool_call_id for message in messages[2:]} == {call.id for call in messages[1].tool_calls}


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_search_is_a_failed_item_and_the_model_answers(stream: bool) -> None:
    passes = Passes(passes=[called(), said("I could not search.")])
    async with searching(passes, FakeSearXng(status=503)) as (gateway, _):
        answer = await response_of(gateway, stream=stream)
    Response.model_validate(answer)
    call, message = answer["output"]
    assert (call["status"], call["error"]) == ("failed", "unavailable")
    assert message["content"][0]["text"] == "I could not search."


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "web_search_preview"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
    ],
)
async def test_choice_of_a_search_forces_the_first_pass_only(choice: dict[str, Any]) -> None:
    passes = Passes(passes=[called(), said("ok")])
    async with searching(passes) as (gateway, _):
        await response_of(gateway, tools=[FUNCTION, HOSTED], tool_choice=choice)
    first, second = (seen.tool_choice for seen in passes.seen)
    assert first.function_name == "web_search" or first.mode == chat_pb2.ToolChoice.MODE_REQUIRED
    assert second.mode == chat_pb2.ToolChoice.MODE_AUTO


async def test_filters_sizes_and_the_number_of_calls_are_obeyed() -> None:
    passes = Passes(passes=[called("a"), called("b"), said("ok")])
    results = [WEFT, *({"url": f"https://weft.example/{number}", "title": str(number)} for number in range(9)), LOOM]
    async with searching(passes, FakeSearXng(results=results)) as (gateway, service):
        tool = HOSTED | {"filters": {"allowed_domains": ["weft.example"]}, "search_context_size": "low"}
        answer = await response_of(gateway, tools=[tool], max_tool_calls=1, include=["web_search_call.action.sources"])
    assert service.queries == ["a site:weft.example"]
    call, refused, _ = answer["output"]
    assert len(call["action"]["sources"]) == 4
    assert (refused["status"], refused["error"]) == ("failed", "max_uses_exceeded")
    assert "warnings" not in answer


async def test_codex_which_permits_no_search_gets_none() -> None:
    passes = Passes(passes=[said("ok")])
    async with searching(passes) as (gateway, service):
        tools = [FUNCTION, HOSTED | {"external_web_access": False}]
        answer = await response_of(gateway, tools=tools)
        alone = await response_of(gateway, tools=tools[1:])
    assert service.asked == []
    assert [tool.function.name for tool in passes.seen[0].tools] == ["weather"]
    assert "external_web_access" in answer["warnings"][0]["message"]
    assert [item["type"] for item in alone["output"]] == ["web_search_call", "message"]


async def test_background_response_runs_no_search() -> None:
    passes = Passes(passes=[])
    async with searching(passes, tasks=ScriptedTasks(), responses=MemoryResponses()) as (gateway, service):
        body = {"model": "tiny", "input": "Hi", "tools": [HOSTED], "background": True}
        answer = await gateway.request("POST", "/v1/responses", json.dumps(body).encode())
    assert (answer.status, answer.error["param"], service.asked) == (400, "tools[0]", [])
