import asyncio
import json
from typing import Any

import pytest
from gateway_script import ScriptedDispatcher, Step, delta, finished, hello, serving
from response_script import PATH, MemoryResponses, answer_of, body, id_once_streamed

from gateway.gateway_config import GatewayConfig
from weft.api.common.v1 import chat_pb2, event_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

DOWN = WeftError(Reason.SERVICE_UNAVAILABLE, "the router cannot be reached")


def texts_of(payload: chat_pb2.ChatPayload) -> list[str]:
    return [part.text for message in payload.messages for part in message.content]


def events_in(raw: bytes) -> list[dict[str, Any]]:
    blocks = raw.decode().split("\n\n")
    return [json.loads(block.split("\ndata: ")[1]) for block in blocks if block.startswith("event: ")]


async def test_chain_contains_all_previous_inputs_and_outputs_without_instructions() -> None:
    async with serving(responses=MemoryResponses()) as gateway:
        first = await gateway.sdk.responses.create(model="chat", input="one", instructions="Be terse.")
        second = await gateway.sdk.responses.create(model="chat", input="two", previous_response_id=first.id)
        third = await gateway.sdk.responses.create(model="chat", input="three", previous_response_id=second.id)
        texts = texts_of(gateway.dispatcher.payloads[-1])
    assert texts == ["one", "Hello, world", "two", "Hello, world", "three"]
    assert third.previous_response_id == second.id


async def test_truncated_call_is_excluded_from_the_chain() -> None:
    call = event_pb2.ToolCallDelta(index=0, id="call_1", name="weather", arguments_text='{"ci')
    steps: list[Step] = [[delta("Wait.")], [delta(tool_calls=[call])], [delta(finish="LENGTH"), finished()]]
    async with serving(ScriptedDispatcher(steps), responses=MemoryResponses()) as gateway:
        first = await gateway.sdk.responses.create(model="chat", input="Weather?")
        await gateway.sdk.responses.create(model="chat", previous_response_id=first.id, input="Go on")
        messages = gateway.dispatcher.payloads[-1].messages
    assert [len(message.tool_calls) for message in messages] == [0, 0, 0]
    assert texts_of(gateway.dispatcher.payloads[-1]) == ["Weather?", "Wait.", "Go on"]


async def test_items_are_referenced_by_id() -> None:
    async with serving(responses=MemoryResponses()) as gateway:
        first = await gateway.sdk.responses.create(model="chat", input="one")
        reference = {"type": "item_reference", "id": first.output[0].id}
        second = [{"role": "user", "content": "one"}, reference, {"role": "user", "content": "two"}]
        await answer_of(gateway, input=second)
        texts = texts_of(gateway.dispatcher.payloads[-1])
        unknown = await gateway.request("POST", PATH, body(input=[{"type": "item_reference", "id": "msg_1"}]))
        other = await gateway.request("POST", PATH, body(input=[reference]), {"X-Tenant-ID": "other"})
    assert texts == ["one", "Hello, world", "two"]
    assert (unknown.status, unknown.error["param"]) == (400, "input[0].id")
    assert (other.status, other.error["param"]) == (400, "input[0].id")


async def test_another_tenant_gets_404() -> None:
    other = {"X-Tenant-ID": "other"}
    async with serving(responses=MemoryResponses()) as gateway:
        made = await answer_of(gateway)
        place = f"{PATH}/{made['id']}"
        statuses = [
            (await gateway.request(method, path, headers=other)).status
            for method, path in (
                ("GET", place),
                ("DELETE", place),
                ("GET", f"{place}/input_items"),
                ("POST", f"{place}/cancel"),
            )
        ]
        chained = await gateway.request("POST", PATH, body(previous_response_id=made["id"]), other)
        own = await gateway.request("GET", place)
    assert statuses == [404, 404, 404, 404]
    assert chained.status == 404
    assert own.status == 200


async def test_input_items_are_paged() -> None:
    items = [{"role": "user", "content": f"line {number}"} for number in range(5)]
    async with serving(responses=MemoryResponses()) as gateway:
        made = await answer_of(gateway, input=items)
        listed = [item async for item in gateway.sdk.responses.input_items.list(made["id"], limit=2, order="asc")]
        newest = await gateway.sdk.responses.input_items.list(made["id"], limit=1)
        wrong = [
            (await gateway.request("GET", f"{PATH}/{made['id']}/input_items?{query}")).status
            for query in ("limit=0", "limit=101", "limit=0010", "limit=x", "order=up", "after=nope")
        ]
    shown: list[dict[str, Any]] = [item.to_dict() for item in listed]
    assert [item["content"][0]["text"] for item in shown] == [f"line {number}" for number in range(5)]
    assert len({item.id for item in listed}) == 5
    (last,) = newest.data
    assert last.to_dict()["content"] == shown[-1]["content"]
    assert newest.has_more is True
    assert wrong == [400] * 6


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_store_completes_the_response_with_a_not_stored_warning(stream: bool) -> None:
    full = WeftError(Reason.TOO_MANY_RESOURCES, "at most 10 responses are kept")
    store = MemoryResponses(save_failure=full)
    async with serving(responses=store) as gateway:
        answer = await gateway.request("POST", PATH, body(stream=stream, store=True))
    response = events_in(answer.body)[-1]["response"] if stream else answer.json
    assert (response["status"], response["store"]) == ("completed", False)
    assert [(told["code"], told["field"]) for told in response["warnings"]] == [("not_stored", "store")]
    assert "at most 10 responses are kept" in response["warnings"][0]["message"]


async def test_stream_that_must_be_stored_is_rejected_if_the_store_is_down() -> None:
    async with serving(responses=MemoryResponses(failure=DOWN)) as gateway:
        asked = await gateway.request("POST", PATH, body(stream=True, store=True))
        usual = events_in((await gateway.request("POST", PATH, body(stream=True))).body)
    assert asked.status == 503
    assert len(gateway.dispatcher.payloads) == 1
    assert usual[-1]["response"]["store"] is False


async def test_unreadable_chain_is_an_error_status() -> None:
    async with serving(responses=MemoryResponses(failure=DOWN)) as gateway:
        answer = await gateway.request("POST", PATH, body(previous_response_id="resp_1"))
    assert (answer.status, answer.error["code"]) == (503, "service_unavailable")
    assert not gateway.dispatcher.payloads


async def test_running_response_can_be_read_and_cancelled_and_is_stored_as_is() -> None:
    steps: list[Step] = [[delta("Hel")], asyncio.Event(), *hello()]
    async with (
        serving(ScriptedDispatcher(steps), responses=MemoryResponses()) as gateway,
        gateway.connection() as (reader, writer),
    ):
        response_id = await id_once_streamed(gateway, reader, writer)
        on_its_way = await gateway.sdk.responses.retrieve(response_id)
        strange = await gateway.request("GET", f"{PATH}/{response_id}", headers={"X-Tenant-ID": "other"})
        early = await gateway.request("DELETE", f"{PATH}/{response_id}")
        items = await gateway.sdk.responses.input_items.list(response_id)
        cancelled = await gateway.sdk.responses.cancel(response_id)
        rest = await reader.readuntil(b"0\r\n\r\n")
        await gateway.dispatcher.was_closed.wait()
        kept = await gateway.sdk.responses.retrieve(response_id)
        again = await gateway.request("POST", f"{PATH}/{response_id}/cancel")
    assert (on_its_way.status, on_its_way.output_text) == ("in_progress", "Hel")
    assert (strange.status, early.status, again.status) == (404, 409, 400)
    assert len(items.data) == 1
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
    assert (kept.status, kept.output_text) == ("cancelled", "Hel")
    assert rest.index(b"event: response.failed") < rest.index(b"event: error")
    assert b'"status":"cancelled"' in rest
    assert b"response.completed" not in rest


async def test_response_with_store_false_can_be_cancelled() -> None:
    steps: list[Step] = [[delta("Hel")], asyncio.Event()]
    async with serving(ScriptedDispatcher(steps)) as gateway, gateway.connection() as (reader, writer):
        response_id = await id_once_streamed(gateway, reader, writer)
        cancelled = await gateway.sdk.responses.cancel(response_id)
        await reader.readuntil(b"0\r\n\r\n")
        after = await gateway.request("GET", f"{PATH}/{response_id}")
    assert (cancelled.status, getattr(cancelled, "store", None)) == ("cancelled", False)
    assert after.status == 404


async def test_cancelled_response_that_cannot_be_stored_warns_in_both_answers() -> None:
    steps: list[Step] = [[delta("Hel")], asyncio.Event()]
    store = MemoryResponses(save_failure=DOWN)
    async with (
        serving(ScriptedDispatcher(steps), responses=store) as gateway,
        gateway.connection() as (reader, writer),
    ):
        response_id = await id_once_streamed(gateway, reader, writer)
        answer = (await gateway.request("POST", f"{PATH}/{response_id}/cancel")).json
        rest = await reader.readuntil(b"0\r\n\r\n")
    failed = json.loads(rest.split(b"event: response.failed\ndata: ")[1].split(b"\n\n")[0])
    for response in (answer, failed["response"]):
        assert (response["status"], response["store"]) == ("cancelled", False)
        assert [told["code"] for told in response["warnings"]] == ["not_stored"]


async def test_ended_response_cannot_be_cancelled_or_streamed_again() -> None:
    async with serving(responses=MemoryResponses()) as gateway:
        made = await answer_of(gateway)
        ended = await gateway.request("POST", f"{PATH}/{made['id']}/cancel")
        streamed = await gateway.request("GET", f"{PATH}/{made['id']}?stream=true")
        plain = await gateway.request("GET", f"{PATH}/{made['id']}?stream=false&include[]=a&include[]=b")
        unknown = await gateway.request("POST", f"{PATH}/resp_1/cancel")
    assert (ended.status, ended.error["param"]) == (400, "response_id")
    assert (streamed.status, streamed.error["param"]) == (400, "stream")
    assert (plain.status, unknown.status) == (200, 404)


async def test_concurrent_streamed_responses_are_limited() -> None:
    config = GatewayConfig(port=0, max_running_responses=1)
    steps: list[Step] = [[delta("Hel")], asyncio.Event()]
    async with (
        serving(ScriptedDispatcher(steps), config=config) as gateway,
        gateway.connection() as (reader, writer),
    ):
        writer.write(gateway.post(PATH, body(stream=True)))
        await reader.readuntil(b'"delta":"Hel"')
        second = await gateway.request("POST", PATH, body(stream=True))
    assert (second.status, second.error["code"]) == (429, "rate_limit_exceeded")
    assert "max_running_responses" in second.error["message"]
