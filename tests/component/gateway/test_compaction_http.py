"""Compaction over HTTP: summaries that Codex and OpenAI's clients ask for, keep sealed and send back."""

from typing import Any

import pytest
from background_script import asked, events_in, found, pieces
from gateway_script import RunningGateway, ScriptedDispatcher, Step, delta, finished, hello, serving, started, usage
from messages_script import CountingDispatcher
from response_script import PATH, MemoryResponses
from task_script import ScriptedTasks

from weft.api.common.v1 import chat_pb2, event_pb2

KEY = b"k" * 32
TOOL = {"type": "function", "name": "ls", "parameters": {"type": "object"}}
TURNS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be terse."},
    {"role": "user", "content": "List the files"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
    {"role": "assistant", "content": "There is a.py."},
]
TRIGGER = {"type": "compaction_trigger"}


def summary(text: str = "Listed: a.py.", finish: str = "STOP") -> list[Step]:
    return [[started()], [delta(reasoning="Let me see.")], [delta(text)], [delta(finish=finish), usage(), finished()]]


def texts_of(chat: chat_pb2.ChatPayload) -> list[tuple[str, str]]:
    return [
        (chat_pb2.Role.Name(each.role).removeprefix("ROLE_"), "".join(part.text for part in each.content))
        for each in chat.messages
    ]


async def compacted(gateway: RunningGateway, *, key: str = "", **fields: Any) -> Any:
    gateway.dispatcher.steps = summary()
    body = {"model": "tiny", "input": [*TURNS, TRIGGER], "store": False} | fields
    answer = (await gateway.request("POST", PATH, body, key=key)).of(200)
    gateway.dispatcher.steps = hello()
    return answer


async def test_trigger_gets_exactly_one_sealed_item_from_the_same_prompt() -> None:
    async with serving(result_key=KEY) as gateway:
        answer = await compacted(gateway, tools=[TOOL], tool_choice="required", max_output_tokens=5)
        (chat,) = gateway.dispatcher.payloads
        await gateway.request("POST", PATH, {"model": "tiny", "input": TURNS, "tools": [TOOL], "store": False})
        plain = gateway.dispatcher.payloads[1]
    assert [context.compaction is None for context in gateway.dispatcher.contexts] == [False, True]
    (item,) = answer["output"]
    assert (item["type"], item["id"][:4], sorted(item)) == ("compaction", "cmp_", ["encrypted_content", "id", "type"])
    assert (answer["status"], "a.py" in str(answer["output"]), answer["usage"]["total_tokens"]) == (
        "completed",
        False,
        10,
    )
    assert (list(chat.messages[:-1]), list(chat.tools)) == (list(plain.messages), list(plain.tools))
    assert chat.tool_choice.mode == chat_pb2.ToolChoice.MODE_NONE
    assert not chat.sampling.HasField("max_tokens")
    assert "summary" in texts_of(chat)[-1][1]


async def test_trigger_is_streamed_with_its_documented_events() -> None:
    async with serving(ScriptedDispatcher(steps=summary()), result_key=KEY) as gateway:
        answer = await gateway.request("POST", PATH, {"model": "tiny", "input": [*TURNS, TRIGGER], "stream": True})
    events = events_in(answer.body)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "compaction.compacting", "output_item.done", "completed",
    ]  # fmt: skip
    added, compacting, done, completed = events[2:]
    assert added["item"] == {"type": "compaction", "id": done["item"]["id"], "encrypted_content": ""}
    assert (compacting["item_id"], compacting["output_index"]) == (done["item"]["id"], 0)
    assert completed["response"]["output"] == [done["item"]]
    assert [event["sequence_number"] for event in events] == list(range(6))


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary", "context_compaction"])
async def test_summary_comes_back_as_a_message_in_place_of_what_it_covers(kind: str) -> None:
    async with serving(result_key=KEY) as gateway:
        (item,) = (await compacted(gateway))["output"]
        sealed = {"type": kind, "encrypted_content": item["encrypted_content"]}
        for turns in (TURNS, TURNS[:2]):
            body = {"model": "tiny", "input": [*turns, sealed, {"role": "user", "content": "And now?"}]}
            assert "warnings" not in (await gateway.request("POST", PATH, body)).of(200)
            said = texts_of(gateway.dispatcher.payloads[-1])
            assert said[:2] == [("DEVELOPER", "Be terse."), ("USER", "List the files")]
            assert [role for role, _ in said[2:]] == ["USER", "USER"]
            assert said[2][1].endswith("\n\nListed: a.py.")
            assert said[3][1] == "And now?"


async def test_summary_without_text_is_an_error_and_a_cut_one_says_so() -> None:
    async with serving(result_key=KEY) as gateway:
        call = event_pb2.ToolCallDelta(index=0, id="c", name="ls", arguments_text="{}")
        for steps in ([[started()], [delta(reasoning="hm")]], [[started()], [delta(tool_calls=[call])]]):
            gateway.dispatcher.steps = [*steps, [delta(finish="STOP"), finished()]]
            answer = await gateway.request("POST", PATH, {"model": "tiny", "input": [*TURNS, TRIGGER]})
            assert (answer.status, answer.error["code"]) == (502, "backend_protocol_error")
        gateway.dispatcher.steps = summary(finish="LENGTH")
        cut = (await gateway.request("POST", PATH, {"model": "tiny", "input": [*TURNS, TRIGGER]})).of(200)
        assert cut["status"] == "completed"
        await gateway.request(
            "POST", PATH, {"model": "tiny", "input": [*cut["output"], {"role": "user", "content": "?"}]}
        )
        assert "cut off" in texts_of(gateway.dispatcher.payloads[-1])[0][1]


async def test_summary_that_cannot_be_opened_is_refused_by_its_field() -> None:
    async with serving(result_key=KEY) as gateway:
        (item,) = (await compacted(gateway))["output"]
        for changed in ("gAAAA", "", None, 7, item["encrypted_content"][:-2], "weft1." + "A" * 100):
            body = {"model": "tiny", "input": [*TURNS, item | {"encrypted_content": changed}]}
            answer = await gateway.request("POST", PATH, body)
            assert answer.refusal == (400, "invalid_argument", "input[6].encrypted_content")
    async with serving(result_key=b"l" * 32) as other:
        for path in (PATH, f"{PATH}/compact", f"{PATH}/input_tokens"):
            answer = await other.request("POST", path, {"model": "tiny", "input": [item, *TURNS[:2]]})
            assert answer.refusal == (400, "invalid_argument", "input[0].encrypted_content")
            assert "key_file" in answer.error["message"]


async def test_summary_of_another_tenant_is_refused() -> None:
    async with serving(result_key=KEY) as gateway:
        (item,) = (await compacted(gateway))["output"]
        headers = {"X-Tenant-Id": "other"}
        body = {"model": "tiny", "input": [item, *TURNS[:2]]}
        assert (await gateway.request("POST", PATH, body)).status == 200
        answer = await gateway.request("POST", PATH, body, headers)
        assert answer.refusal == (400, "invalid_argument", "input[0].encrypted_content")


async def test_trigger_must_be_last_and_needs_a_conversation_and_a_key() -> None:
    async with serving(result_key=KEY) as gateway:
        answer = await gateway.request("POST", PATH, {"model": "tiny", "input": [TRIGGER, *TURNS]})
        assert answer.refusal == (400, "invalid_argument", "input[0].type")
        answer = await gateway.request("POST", PATH, {"model": "tiny", "input": [TRIGGER]})
        assert answer.refusal == (400, "invalid_argument", "input")
        task = {"endpoint": "/v1/responses", "body": {"model": "tiny", "input": [*TURNS, TRIGGER]}}
    async with serving(tasks=ScriptedTasks(), responses=MemoryResponses()) as gateway:
        answer = await gateway.request("POST", PATH, {"model": "tiny", "input": [*TURNS, TRIGGER]})
        assert answer.refusal == (501, "unsupported_operation", "input[6].type")
        answer = await gateway.request("POST", "/api/v1/inference-tasks", task)
        assert answer.refusal == (501, "unsupported_operation", "body.input[6].type")
        assert gateway.dispatcher.calls == []


async def test_stored_summary_is_continued_by_its_id() -> None:
    async with serving(result_key=KEY, responses=MemoryResponses()) as gateway:
        first = (await gateway.request("POST", PATH, {"model": "tiny", "input": TURNS})).of(200)
        second = await compacted(gateway, input=[TRIGGER], previous_response_id=first["id"], store=True)
        listed = await gateway.read(f"{PATH}/{second['id']}/input_items")
        assert [item["type"] for item in listed["data"]] == ["compaction_trigger"]
        assert (await gateway.read(f"{PATH}/{second['id']}"))["output"] == second["output"]
        body = {"model": "tiny", "input": "And now?", "previous_response_id": second["id"]}
        (await gateway.request("POST", PATH, body)).of(200)
    said = texts_of(gateway.dispatcher.payloads[-1])
    assert [role for role, _ in said] == ["DEVELOPER", "USER", "USER", "USER"]
    assert "Listed: a.py." in said[2][1]


async def test_background_response_compacts_like_a_live_one() -> None:
    tasks = ScriptedTasks(at_once=pieces(summary()))  # type: ignore[arg-type]  # frames only
    async with serving(result_key=KEY, responses=MemoryResponses(), tasks=tasks) as gateway:
        live = await compacted(gateway)
        made = await asked(gateway, model="tiny", input=[*TURNS, TRIGGER])
        for _ in range(2):
            shown = await found(gateway, made["id"])
            assert [item["type"] for item in shown["output"]] == ["compaction"]
            assert shown["output"][0]["encrypted_content"] == live["output"][0]["encrypted_content"]
        streamed = await gateway.request("GET", f"{PATH}/{made['id']}?stream=true")
        assert events_in(streamed.body)[-1]["response"]["output"] == shown["output"]


async def test_compact_endpoint_keeps_the_users_messages_beside_a_summary() -> None:
    async with serving(ScriptedDispatcher(steps=summary()), result_key=KEY, responses=MemoryResponses()) as gateway:
        turns = [*TURNS, {"role": "user", "content": [{"type": "input_text", "text": "Thanks"}]}]
        answer = await gateway.sdk.responses.compact(model="tiny", input=turns, instructions="Be kind.")  # type: ignore[arg-type]
        assert (answer.object, answer.usage.total_tokens) == ("response.compaction", 10)
        found = [item.model_dump(mode="json", exclude_none=True, warnings=False) for item in answer.output]
        assert [item["type"] for item in found] == ["message", "message", "compaction"]
        assert [item["content"][0]["text"] for item in found[:2]] == ["List the files", "Thanks"]
        gateway.dispatcher.steps = hello()
        (await gateway.request("POST", PATH, {"model": "tiny", "input": [*found, *TURNS[1:2]]})).of(200)
    assert texts_of(gateway.dispatcher.payloads[0])[0] == ("SYSTEM", "Be kind.")
    assert [role for role, _ in texts_of(gateway.dispatcher.payloads[1])] == ["USER"] * 4


async def test_compact_endpoint_continues_a_stored_response_and_does_not_stream() -> None:
    async with serving(result_key=KEY, responses=MemoryResponses()) as gateway:
        first = (await gateway.request("POST", PATH, {"model": "tiny", "input": "Hi"})).of(200)
        gateway.dispatcher.steps = summary()
        body = {"model": "tiny", "previous_response_id": first["id"]}
        made = (await gateway.request("POST", f"{PATH}/compact", body)).of(200)
        assert [item["type"] for item in made["output"]] == ["message", "compaction"]
        assert (await gateway.request("GET", f"{PATH}/{made['id']}")).status == 404
        for field in ("stream", "background"):
            answer = await gateway.request("POST", f"{PATH}/compact", {"model": "tiny", "input": "Hi", field: True})
            assert answer.refusal == (400, "invalid_argument", field)
        assert (await gateway.request("POST", f"{PATH}/compact", {"model": "tiny"})).refusal[2] == "input"


async def test_input_tokens_are_counted_by_the_models_tokenizer() -> None:
    async with serving(CountingDispatcher(), result_key=KEY) as gateway:
        counted = await gateway.sdk.responses.input_tokens.count(
            model="tiny",
            input=TURNS,  # type: ignore[arg-type]
            instructions="Be kind.",
            tools=[TOOL],  # type: ignore[list-item]
        )
        ((_, payload),) = gateway.dispatcher.asked  # type: ignore[attr-defined]
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 42)
    assert texts_of(payload.chat)[0] == ("SYSTEM", "Be kind.")
    assert [tool.function.name for tool in payload.chat.tools] == ["ls"]
