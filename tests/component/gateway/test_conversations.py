"""Conversations of the Responses API, by the client of OpenAI against the router's own store."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from background_script import hello_pieces
from gateway_script import RunningGateway, ScriptedDispatcher, Step, delta, finished, hello, serving
from messages_script import CountingDispatcher
from response_script import PATH, body, id_once_streamed, router_store
from task_script import ScriptedTasks

from gateway.gateway_config import GatewayConfig, KeepResponses, RateLimitConfig
from gateway.responses import conversations
from router_svc.durable.limits import ResponseLimits
from weft.api.common.v1 import chat_pb2, event_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.units import Rate
from weft_testing.fake_clock import FakeClock

CONVERSATIONS = "/v1/conversations"
OTHER = {"X-Tenant-ID": "other"}


@asynccontextmanager
async def stage(
    folder: Path,
    dispatcher: ScriptedDispatcher | None = None,
    *,
    limits: ResponseLimits | None = None,
    clock: FakeClock | None = None,
    **ports: Any,
) -> AsyncIterator[RunningGateway]:
    """A gateway with the store of a router, whose database is in `folder`."""
    async with (
        router_store(folder, limits, clock) as store,
        serving(dispatcher, responses=store, clock=clock, result_key=b"k" * 32, **ports) as gateway,
    ):
        yield gateway


def texts_of(payload: chat_pb2.ChatPayload) -> list[str]:
    return [part.text for message in payload.messages for part in message.content]


def texts(item: dict[str, Any]) -> list[str]:
    return [part["text"] for part in item["content"]]


async def items_of(gateway: RunningGateway, conversation_id: str) -> list[dict[str, Any]]:
    return [item.to_dict() async for item in gateway.sdk.conversations.items.list(conversation_id, order="asc")]


async def said_in(gateway: RunningGateway, conversation_id: str) -> list[str]:
    return [item["content"][0]["text"] for item in await items_of(gateway, conversation_id)]


async def is_free(gateway: RunningGateway, conversation_id: str) -> bool:
    """Whether a conversation can be changed, within a moment."""
    for _ in range(500):
        changed = await gateway.request("POST", f"{CONVERSATIONS}/{conversation_id}", {"metadata": {}})
        if changed.status == 200:
            return True
        await asyncio.sleep(0.01)
    return False


def batched_in_pairs(kept: list[str]) -> list[list[str]]:
    return [kept[start : start + 2] for start in range(0, len(kept), 2)]


async def test_conversation_is_created_read_changed_and_deleted(tmp_path: Path) -> None:
    async with stage(tmp_path) as gateway:
        api = gateway.sdk.conversations
        empty = await api.create()
        made = await api.create(items=[{"role": "user", "content": "one"}], metadata={"topic": "demo"})
        assert (made.object, made.metadata, empty.metadata) == ("conversation", {"topic": "demo"}, {})
        assert await api.retrieve(made.id) == made
        changed = await api.update(made.id, metadata={"topic": "other"})
        assert changed == await api.retrieve(made.id)
        assert (changed.created_at, changed.metadata) == (made.created_at, {"topic": "other"})
        deleted = await api.delete(made.id)
        assert deleted.to_dict() == {"id": made.id, "object": "conversation.deleted", "deleted": True}
        with pytest.raises(openai.NotFoundError):
            await api.retrieve(made.id)
        assert (await api.items.list(empty.id)).data == []


async def test_items_are_added_paged_read_and_deleted(tmp_path: Path) -> None:
    async with stage(tmp_path) as gateway:
        api = gateway.sdk.conversations
        made = await api.create()
        for part in (range(20), range(20, 25)):
            added = await api.items.create(made.id, items=[{"role": "user", "content": f"line {n}"} for n in part])
            assert [texts(item.to_dict()) for item in added.data] == [[f"line {n}"] for n in part]
        assert await said_in(gateway, made.id) == [f"line {n}" for n in range(25)]
        newest = await api.items.list(made.id, limit=2, include=["message.output_text.logprobs"])
        assert [texts(item.to_dict()) for item in newest.data] == [["line 24"], ["line 23"]]
        assert (newest.has_more, newest.last_id) == (True, newest.data[1].id)
        one = await api.items.retrieve(newest.data[0].id or "", conversation_id=made.id)
        assert one == newest.data[0]
        assert one.to_dict()["status"] == "completed"
        assert await api.items.delete(newest.data[0].id or "", conversation_id=made.id) == made
        assert await said_in(gateway, made.id) == [f"line {n}" for n in range(24)]
        with pytest.raises(openai.NotFoundError):
            await api.items.retrieve(newest.data[0].id or "", conversation_id=made.id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [True, False])
async def test_response_reads_the_items_and_adds_input_and_output(tmp_path: Path, stream: bool, store: bool) -> None:
    async with stage(tmp_path) as gateway:
        made = await gateway.sdk.conversations.create(items=[{"role": "user", "content": "zero"}])
        for said in ("one", "two"):
            sent = body(conversation={"id": made.id}, input=said, stream=stream, store=store)
            answer = await gateway.request("POST", PATH, sent)
            assert answer.status == 200
        texts = texts_of(gateway.dispatcher.payloads[-1])
        kept = await said_in(gateway, made.id)
        response = await gateway.sdk.responses.create(model="chat", input="three", conversation=made.id, store=store)
        stored = await gateway.request("GET", f"{PATH}/{response.id}")
    assert texts == ["zero", "one", "Hello, world", "two"]
    assert kept == ["zero", "one", "Hello, world", "two", "Hello, world"]
    assert response.conversation is not None
    assert response.conversation.id == made.id
    assert stored.status == (200 if store else 404)


async def test_prompt_of_a_turn_begins_with_the_one_before_as_with_previous_response_id(tmp_path: Path) -> None:
    call = event_pb2.ToolCallDelta(index=0, id="call_1", name="weather", arguments_text='{"city":"Bonn"}')
    first: list[Step] = [[delta(reasoning="hm")], [delta("Wait.")], [delta(tool_calls=[call])]]
    steps: list[Step] = [*first, [delta(finish="TOOL_CALLS"), finished()]]
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    prompts: dict[bool, list[list[bytes]]] = {}
    for by_conversation in (False, True):
        async with stage(tmp_path / str(by_conversation), ScriptedDispatcher(steps)) as gateway:
            made = await gateway.sdk.conversations.create()
            before: dict[str, object] = {}
            for given in ("Weather?", [result], "And in Ulm?"):
                before = {"conversation": made.id} if by_conversation else before
                sent = body(input=given, tools=[tool], instructions="Be terse.", **before)
                answer = (await gateway.request("POST", PATH, sent)).of(200)
                before = {"previous_response_id": answer["id"]}
            payloads = gateway.dispatcher.payloads
            prompts[by_conversation] = [
                [message.SerializeToString(deterministic=True) for message in payload.messages] for payload in payloads
            ]
    turns = prompts[True]
    assert [later[: len(earlier)] for earlier, later in pairwise(turns)] == turns[:-1]
    assert [len(turn) for turn in turns] == [len(turn) for turn in prompts[False]] == [2, 4, 6]


async def test_items_of_a_call_are_added_one_by_one(tmp_path: Path) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
    async with stage(tmp_path) as gateway:
        made = await gateway.sdk.conversations.create(items=[{"role": "user", "content": "Weather?"}])
        for item in (call, output):
            added = await gateway.request("POST", f"{CONVERSATIONS}/{made.id}/items", {"items": [item]})
            (shown,) = added.of(200)["data"]
            assert shown | item == shown
        await gateway.sdk.responses.create(model="chat", input="Thanks", conversation=made.id)
        messages = gateway.dispatcher.payloads[-1].messages
    assert [len(message.tool_calls) for message in messages] == [0, 1, 0, 0]
    assert texts_of(gateway.dispatcher.payloads[-1]) == ["Weather?", "sunny", "Thanks"]


async def test_another_tenant_gets_404_and_a_conversation_is_no_response(tmp_path: Path) -> None:
    async with stage(tmp_path) as gateway:
        made = await gateway.sdk.conversations.create(items=[{"role": "user", "content": "one"}])
        (item,) = await items_of(gateway, made.id)
        place = f"{CONVERSATIONS}/{made.id}"
        new = {"items": [{"role": "user", "content": "x"}]}
        calls: list[tuple[str, str, Any]] = [
            ("GET", place, None),
            ("POST", place, {"metadata": {}}),
            ("GET", f"{place}/items", None),
            ("POST", f"{place}/items", new),
            ("GET", f"{place}/items/{item['id']}", None),
            ("DELETE", f"{place}/items/{item['id']}", None),
            ("DELETE", place, None),
            ("POST", PATH, body(conversation=made.id)),
        ]
        strange = [await gateway.request(method, path, sent, OTHER) for method, path, sent in calls]
        as_response = [
            await gateway.request("GET", f"{PATH}/{made.id}"),
            await gateway.request("DELETE", f"{PATH}/{made.id}"),
            await gateway.request("POST", PATH, body(previous_response_id=made.id)),
        ]
        kept = await said_in(gateway, made.id)
    assert [answer.status for answer in (*strange, *as_response)] == [404] * 11
    assert strange[-1].error["param"] == "conversation"
    assert kept == ["one"]


async def test_wrong_requests_name_their_field_and_add_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path) as gateway:
        made = await gateway.sdk.conversations.create(items=[{"role": "user", "content": "one"}])
        (item,) = await items_of(gateway, made.id)
        items = f"{CONVERSATIONS}/{made.id}/items"
        message = {"role": "user", "content": "x"}
        wrong: list[tuple[str, Any, str]] = [
            (PATH, body(conversation=made.id, previous_response_id="resp_1"), "conversation"),
            (PATH, body(conversation=7), "conversation"),
            (PATH, body(conversation=made.id, input=[{"role": "user"}]), "input[0].content"),
            (PATH, body(conversation=made.id, input=[{**message, "id": item["id"]}]), "input"),
            (PATH, body(conversation=made.id, include=["x"]), "include[0]"),
            (CONVERSATIONS, {"items": [message] * 21}, "items"),
            (CONVERSATIONS, {"metadata": {"k" * 65: "v"}}, f"metadata.{'k' * 64}"),
            (CONVERSATIONS, {"metadata": {"k": "v" * 513}}, "metadata.k"),
            (CONVERSATIONS, {"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata"),
            (items, {"items": [{"role": "user"}]}, "items[0].content"),
            (items, {"items": [message, {"type": "compaction_trigger"}]}, "items[1].type"),
            (items, {"items": [{"type": "compaction", "encrypted_content": "x"}]}, "items[0].encrypted_content"),
            (items, {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0].type"),
            (items, {"items": [{**message, "id": item["id"]}]}, "items"),
        ]
        for path, sent, field in wrong:
            answer = await gateway.request("POST", path, sent)
            assert (answer.status, answer.error["param"][: len(field)]) == (400, field), answer.body
        repeated = await gateway.request(
            "POST", PATH, body(conversation=made.id, background=True), {"Idempotency-Key": "k"}
        )
        kept = await said_in(gateway, made.id)
    assert (repeated.status, repeated.error["param"]) == (400, "conversation")
    assert kept == ["one"]
    assert not gateway.dispatcher.payloads


async def test_second_response_is_refused_as_locked_while_the_first_runs(tmp_path: Path) -> None:
    gate = asyncio.Event()
    steps: list[Step] = [[delta("Hel")], gate, *hello()]
    async with stage(tmp_path, ScriptedDispatcher(steps)) as gateway, gateway.connection() as (reader, writer):
        made = await gateway.sdk.conversations.create()
        await id_once_streamed(gateway, reader, writer, conversation=made.id)
        second = await gateway.request("POST", PATH, body(conversation=made.id))
        item = {"items": [{"role": "user", "content": "x"}]}
        added = await gateway.request("POST", f"{CONVERSATIONS}/{made.id}/items", item)
        gate.set()
        await reader.readuntil(b"response.completed")
        kept = await said_in(gateway, made.id)
        third = await gateway.request("POST", PATH, body(conversation=made.id))
    for refused in (second, added):
        assert (refused.status, refused.error["code"]) == (400, "conversation_locked")
        assert (refused.error["type"], refused.error["param"]) == ("invalid_request_error", "conversation")
    assert kept == ["Say hello", "HelHello, world"]
    assert third.status == 200


async def test_concurrent_turns_are_refused_or_added_as_a_whole(tmp_path: Path) -> None:
    async with stage(tmp_path) as gateway:
        made = await gateway.sdk.conversations.create()
        items = f"{CONVERSATIONS}/{made.id}/items"

        async def turn(number: int) -> tuple[int, list[str]]:
            said = f"turn {number}"
            if number % 2:
                sent: dict[str, object] = {"items": [{"role": "user", "content": said}] * 2}
                return (await gateway.request("POST", items, sent)).status, [said, said]
            answer = await gateway.request("POST", PATH, body(conversation=made.id, input=said, stream=number % 4 == 0))
            return answer.status, [said, "Hello, world"]

        turns = await asyncio.gather(*map(turn, range(24)))
        kept = await said_in(gateway, made.id)
    added = [texts for status, texts in turns if status == 200]
    assert len(added) + sum(status == 400 for status, _ in turns) == len(turns)
    assert sorted(batched_in_pairs(kept)) == sorted(added)


async def test_failed_and_cancelled_responses_add_nothing_and_end_their_turn(tmp_path: Path) -> None:
    broken = WeftError(Reason.SERVER_DIED, "the engine died")
    async with stage(tmp_path, ScriptedDispatcher([[delta("Hel")], broken])) as gateway:
        made = await gateway.sdk.conversations.create()
        for stream in (False, True):
            await gateway.request("POST", PATH, body(conversation=made.id, stream=stream))
        assert await items_of(gateway, made.id) == []
    steps: list[Step] = [[delta("Hel")], asyncio.Event(), *hello()]
    async with stage(tmp_path, ScriptedDispatcher(steps)) as gateway:
        async with gateway.connection() as (reader, writer):
            response_id = await id_once_streamed(gateway, reader, writer, conversation=made.id)
            await gateway.sdk.responses.cancel(response_id)
            await reader.readuntil(b"response.failed")
        async with gateway.connection() as (reader, writer):
            await id_once_streamed(gateway, reader, writer, conversation=made.id)
        assert await is_free(gateway, made.id)
        assert await items_of(gateway, made.id) == []


async def test_response_of_a_conversation_deleted_meanwhile_ends_and_nothing_is_recreated(tmp_path: Path) -> None:
    gate = asyncio.Event()
    steps: list[Step] = [[delta("Hel")], gate, *hello()]
    async with stage(tmp_path, ScriptedDispatcher(steps)) as gateway, gateway.connection() as (reader, writer):
        made = await gateway.sdk.conversations.create()
        response_id = await id_once_streamed(gateway, reader, writer, conversation=made.id)
        await gateway.sdk.conversations.delete(made.id)
        gate.set()
        last = await reader.readuntil(b"event: response.completed\n")
        last = await reader.readuntil(b"\n\n")
        stored = await gateway.read(f"{PATH}/{response_id}")
        gone = await gateway.request("GET", f"{CONVERSATIONS}/{made.id}")
    response = json.loads(last.split(b"data: ")[1])["response"]
    assert [(each["code"], each["field"]) for each in response["warnings"]] == [("not_stored", "conversation")]
    assert stored == response
    assert gone.status == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_response_that_cannot_be_added_fails(tmp_path: Path, stream: bool) -> None:
    async with stage(tmp_path) as gateway:
        made = await gateway.sdk.conversations.create()
    async with stage(tmp_path, limits=ResponseLimits(max_tenant_bytes=60)) as gateway:
        answer = await gateway.request("POST", PATH, body(conversation=made.id, stream=stream))
        assert await items_of(gateway, made.id) == []
    assert answer.status == (200 if stream else 429)
    assert (b"event: response.failed" in answer.body) is stream
    assert b"response.completed" not in answer.body


async def test_full_conversation_is_refused_before_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as gateway:
        made = await gateway.sdk.conversations.create(items=[{"role": "user", "content": "x" * 500}])
        monkeypatch.setattr("gateway.responses.conversations.MAX_CONVERSATION_BYTES", 600)
        long = await gateway.request("POST", PATH, body(conversation=made.id))
        item = {"items": [{"role": "user", "content": "x" * 500}]}
        added = await gateway.request("POST", f"{CONVERSATIONS}/{made.id}/items", item)
    for refused in (long, added):
        assert (refused.status, refused.error["param"]) == (400, "conversation")
        assert "is full" in refused.error["message"]
    assert not gateway.dispatcher.payloads


async def test_conversations_are_durable_and_belong_to_no_gateway(tmp_path: Path) -> None:
    async with stage(tmp_path) as gateway:
        made = await gateway.sdk.conversations.create(metadata={"a": "b"})
        await gateway.sdk.responses.create(model="chat", input="one", conversation=made.id)
    async with stage(tmp_path) as gateway:
        assert await gateway.sdk.conversations.retrieve(made.id) == made
        await gateway.sdk.responses.create(model="chat", input="two", conversation=made.id)
        assert texts_of(gateway.dispatcher.payloads[-1]) == ["one", "Hello, world", "two"]


async def test_hold_of_a_long_response_is_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "HOLD_SECONDS", 0.3)
    gate = asyncio.Event()
    async with (
        stage(tmp_path, ScriptedDispatcher([[delta("Hel")], gate, *hello()])) as gateway,
        gateway.connection() as (reader, writer),
    ):
        made = await gateway.sdk.conversations.create()
        await id_once_streamed(gateway, reader, writer, conversation=made.id)
        await asyncio.sleep(0.6)
        second = await gateway.request("POST", PATH, body(conversation=made.id))
        gate.set()
        await reader.readuntil(b"response.completed")
        kept = await said_in(gateway, made.id)
    assert second.error["code"] == "conversation_locked"
    assert len(kept) == 2


async def test_background_response_is_added_once_when_its_task_has_ended(tmp_path: Path) -> None:
    tasks = ScriptedTasks()
    async with stage(tmp_path, tasks=tasks) as gateway:
        made = await gateway.sdk.conversations.create(items=[{"role": "user", "content": "zero"}])
        sent = body(background=True, conversation=made.id, input="one")
        response = (await gateway.request("POST", PATH, sent)).of(200)
        locked = await gateway.request("POST", PATH, body(conversation=made.id))
        assert await said_in(gateway, made.id) == ["zero"]
        tasks.begin()
        for piece in hello_pieces():
            tasks.say(piece)
        tasks.complete()
        # Seen first by a reader of the conversation.
        assert await said_in(gateway, made.id) == ["zero", "one", "Hello, world"]
        await gateway.read(f"{PATH}/{response['id']}")
        assert await said_in(gateway, made.id) == ["zero", "one", "Hello, world"]
        after = await gateway.request("POST", PATH, body(conversation=made.id, input="two"))
        texts = texts_of(gateway.dispatcher.payloads[-1])
    assert response["conversation"] == {"id": made.id}
    assert locked.error["code"] == "conversation_locked"
    assert texts == ["zero", "one", "Hello, world", "two"]
    assert after.status == 200


async def test_cancelled_or_deleted_background_response_frees_its_conversation(tmp_path: Path) -> None:
    tasks = ScriptedTasks()
    async with stage(tmp_path, tasks=tasks) as gateway:
        made = await gateway.sdk.conversations.create()
        sent = body(background=True, conversation=made.id, stream=False)
        first = (await gateway.request("POST", PATH, sent)).of(200)
        await gateway.sdk.responses.cancel(first["id"])
        second = (await gateway.request("POST", PATH, sent)).of(200)
        tasks.kept.clear()
        third = await gateway.request("POST", PATH, body(conversation=made.id, input="three"))
        kept = await said_in(gateway, made.id)
    assert second["status"] == "queued"
    assert third.status == 200
    assert kept == ["three", "Hello, world"]


async def test_ended_background_response_is_added_once_although_it_cannot_be_stored(tmp_path: Path) -> None:
    tasks, limits = ScriptedTasks(at_once=hello_pieces()), ResponseLimits(max_per_tenant=1)
    async with stage(tmp_path, tasks=tasks, limits=limits) as gateway:
        made = await gateway.sdk.conversations.create()
        response = (await gateway.request("POST", PATH, body(background=True, conversation=made.id))).of(200)
        for _ in range(2):
            assert (await gateway.read(f"{PATH}/{response['id']}"))["status"] == "completed"
            assert await said_in(gateway, made.id) == ["Say hello", "Hello, world"]


async def test_failed_background_response_frees_its_conversation(tmp_path: Path) -> None:
    tasks = ScriptedTasks()
    async with stage(tmp_path, tasks=tasks) as gateway:
        made = await gateway.sdk.conversations.create()
        await gateway.request("POST", PATH, body(background=True, conversation=made.id))
        tasks.begin()
        tasks.fail(Reason.SERVER_DIED, "the engine died")
        assert await items_of(gateway, made.id) == []
        assert await is_free(gateway, made.id)


async def test_deleted_background_response_leaves_its_items_in_the_conversation(tmp_path: Path) -> None:
    async with stage(tmp_path, tasks=ScriptedTasks(at_once=hello_pieces())) as gateway:
        made = await gateway.sdk.conversations.create()
        response = (await gateway.request("POST", PATH, body(background=True, conversation=made.id))).of(200)
        await gateway.sdk.responses.delete(response["id"])
        kept = await said_in(gateway, made.id)
    assert kept == ["Say hello", "Hello, world"]


async def test_streamed_background_response_is_added_before_its_last_event(tmp_path: Path) -> None:
    async with stage(tmp_path, tasks=ScriptedTasks(at_once=hello_pieces())) as gateway:
        made = await gateway.sdk.conversations.create()
        sent = body(background=True, stream=True, conversation=made.id)
        assert b"event: response.completed" in (await gateway.request("POST", PATH, sent)).body
        assert await gateway.sdk.conversations.update(made.id, metadata={"a": "b"})
        assert await said_in(gateway, made.id) == ["Say hello", "Hello, world"]


async def test_conversation_is_kept_from_its_last_change_on(tmp_path: Path) -> None:
    clock, limits = FakeClock(), ResponseLimits(keep_seconds=3600.0)
    async with stage(tmp_path, clock=clock, limits=limits) as gateway:
        made = await gateway.sdk.conversations.create()
    statuses = []
    # Each start deletes what has expired.
    for hours in (0.9, 0.9, 1.1):
        await clock.advance(hours * 3600)
        async with stage(tmp_path, clock=clock, limits=limits) as gateway:
            changed = await gateway.request("POST", f"{CONVERSATIONS}/{made.id}", {"metadata": {}})
            statuses.append(changed.status)
    assert statuses == [200, 200, 404]


async def test_compacted_conversation_is_continued_from_its_summary(tmp_path: Path) -> None:
    summary: list[Step] = [[delta("All was said.")], [delta(finish="STOP"), finished()]]
    async with stage(tmp_path) as gateway:
        made = await gateway.sdk.conversations.create(items=[{"role": "user", "content": "one"}])
        await gateway.sdk.responses.create(model="chat", input="two", conversation=made.id)
        gateway.dispatcher.steps = summary
        await gateway.request("POST", PATH, body(conversation=made.id, input=[{"type": "compaction_trigger"}]))
        gateway.dispatcher.steps = hello()
        await gateway.sdk.responses.create(model="chat", input="three", conversation=made.id)
        *users, opened, last = texts_of(gateway.dispatcher.payloads[-1])
        kept = await items_of(gateway, made.id)
        (sealed,) = (item for item in kept if item["type"] == "compaction")
        other = await gateway.sdk.conversations.create(items=[sealed])  # type: ignore[list-item]
        copied = await items_of(gateway, other.id)
    assert (users, last) == (["one", "two"], "three")
    assert "All was said." in opened
    assert copied == [sealed]


async def test_changes_count_for_the_rate_limit_of_the_tenant(tmp_path: Path) -> None:
    config = GatewayConfig(port=0, rate_limits=RateLimitConfig(default=Rate(2, 60)))
    async with stage(tmp_path, config=config) as gateway:
        made = await gateway.sdk.conversations.create()
        place = f"{CONVERSATIONS}/{made.id}"
        statuses = [(await gateway.request("POST", place, {"metadata": {}})).status for _ in range(2)]
        assert (await gateway.request("GET", place)).status == 200
    assert statuses == [200, 429]


async def test_item_that_no_model_can_be_given_is_refused_as_one_of_the_conversation(tmp_path: Path) -> None:
    async with stage(tmp_path) as gateway:
        video = {"role": "user", "content": [{"type": "input_video", "video": "x"}]}
        made = (await gateway.request("POST", CONVERSATIONS, {"items": [video]})).of(200)
        answer = await gateway.request("POST", PATH, body(conversation=made["id"]))
    assert answer.status == 400, answer.body
    assert answer.error["param"].startswith("conversation."), answer.body


async def test_tokens_of_a_conversation_are_counted_without_a_turn(tmp_path: Path) -> None:
    async with stage(tmp_path, CountingDispatcher()) as gateway:
        made = await gateway.sdk.conversations.create(items=[{"role": "user", "content": "zero"}])
        counted = await gateway.sdk.responses.input_tokens.count(model="tiny", conversation=made.id)
        ((_, payload),) = gateway.dispatcher.asked  # type: ignore[attr-defined]
        unknown = {"model": "chat", "conversation": "conv_1"}
        refused = await gateway.request("POST", f"{PATH}/input_tokens", unknown)
    assert counted.input_tokens == 42
    assert texts_of(payload.chat) == ["zero"]
    assert (refused.status, refused.error["param"]) == (404, "conversation")


async def test_gateway_that_stores_nothing_has_no_conversations(tmp_path: Path) -> None:
    config = GatewayConfig(port=0, keep_responses=KeepResponses.NEVER)
    async with stage(tmp_path, config=config) as gateway:
        made = await gateway.request("POST", CONVERSATIONS, {})
        asked = await gateway.request("POST", PATH, body(conversation="conv_" + "0" * 24))
    assert (made.status, asked.status) == (501, 501)
    assert "gateway.keep_responses" in made.error["message"]
