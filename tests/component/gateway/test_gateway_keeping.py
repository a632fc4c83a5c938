"""Which responses are stored, and the warnings of those that are not."""

import asyncio
import json
from itertools import product
from typing import Any

import pytest
from gateway_script import ScriptedDispatcher, Step, delta, hello, serving
from response_script import PATH, MemoryResponses, answer_of, body, id_once_streamed

from gateway.answers.answer_builder import AnswerIdentity
from gateway.gateway_config import GatewayConfig, KeepResponses, RequestLimits
from gateway.responses import history
from gateway.responses.document import ResponseDocument
from gateway.responses.response_stream import PartialResponse
from gateway.responses.retrieval import Responses
from gateway.responses.running import LiveResponse
from gateway.responses.schema import ResponsesRequest
from gateway.running_responses import RunningResponses
from weft.api.common.v1 import chat_pb2
from weft.dispatch.operation_table import CHAT
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft_testing.fake_clock import FakeClock

BY_DEFAULT, ON_REQUEST, NEVER = KeepResponses


def last_response(raw: bytes) -> dict[str, Any]:
    told = [block.split(b"\ndata: ")[1] for block in raw.split(b"\n\n") if b'"response":{' in block]
    response: dict[str, Any] = json.loads(told[-1])["response"]
    return response


@pytest.mark.parametrize(
    ("keeps", "stored"),
    [
        (BY_DEFAULT, {None: True, True: True, False: False}),
        (ON_REQUEST, {None: False, True: True, False: False}),
        (NEVER, {None: False, False: False}),
    ],
)
async def test_operator_setting_controls_which_responses_are_stored(
    keeps: KeepResponses, stored: dict[bool | None, bool]
) -> None:
    responses = MemoryResponses()
    config = GatewayConfig(port=0, keep_responses=keeps)
    async with serving(responses=responses, config=config) as gateway:
        for (store, is_kept), stream in product(stored.items(), (False, True)):
            answer = await gateway.request("POST", PATH, body(stream=stream, store=store))
            response = last_response(answer.body) if stream else answer.json
            assert (response["status"], response["store"]) == ("completed", is_kept)
            assert list(responses.kept) == ([response["id"]] if is_kept else [])
            responses.kept.clear()


async def test_request_requiring_storage_is_rejected_if_disabled_and_stored_ones_remain() -> None:
    responses = MemoryResponses()
    async with serving(responses=responses) as gateway:
        first = await answer_of(gateway)
    async with serving(responses=responses, config=GatewayConfig(port=0, keep_responses=NEVER)) as gateway:
        refused = await gateway.request("POST", PATH, body(store=True))
        second = await answer_of(gateway, previous_response_id=first["id"])
        found = await gateway.request("GET", f"{PATH}/{first['id']}")
        gone = await gateway.request("DELETE", f"{PATH}/{first['id']}")
    assert (refused.status, refused.error["param"]) == (400, "store")
    assert (second["status"], second["store"]) == ("completed", False)
    assert (found.status, gone.status, responses.kept) == (200, 200, {})


async def test_input_items_of_an_unstored_stream_are_not_reported_empty() -> None:
    gate = asyncio.Event()
    steps: list[Step] = [[delta("Hel")], gate, *hello()]
    async with (
        serving(ScriptedDispatcher(steps), responses=MemoryResponses()) as gateway,
        gateway.connection() as (reader, writer),
    ):
        response_id = await id_once_streamed(gateway, reader, writer, store=False)
        items = await gateway.request("GET", f"{PATH}/{response_id}/input_items")
        gate.set()
        await reader.readuntil(b"0\r\n\r\n")
    assert items.status == 404


async def test_stream_cancelled_by_the_mesh_is_reported_as_not_stored() -> None:
    steps: list[Step] = [[delta("Hel")], WeftError(Reason.CANCELLED, "the request was ended")]
    responses = MemoryResponses()
    async with serving(ScriptedDispatcher(steps), responses=responses) as gateway:
        answer = await gateway.request("POST", PATH, body(stream=True))
    response = last_response(answer.body)
    assert (response["status"], response["store"], responses.kept) == ("cancelled", False, {})
    assert [told["code"] for told in response["warnings"]] == ["not_stored"]


class UnaryCall(PartialResponse):
    """A partial response that is complete."""

    def snapshot(self, status: str = "in_progress") -> bytes:
        return status.encode()

    def conclude(self, receipt: object) -> bytes:
        return b"{}"

    def __init__(self) -> None:
        super().__init__(AnswerIdentity(answer_id="resp_1", created=0, model="chat"), choice_count=1)
        params = ResponsesRequest(model="chat", input="hi")
        self.document = ResponseDocument(params, "resp_1", clock=FakeClock(), is_stored=True)


async def test_stored_response_is_deletable_while_its_caller_slowly_reads_the_end() -> None:
    store, everyone, growing = MemoryResponses(), RunningResponses[LiveResponse](1), UnaryCall()
    live = LiveResponse("ann", growing, store=store, items=b"[]", previous_id="", running=everyone)
    script = ScriptedDispatcher(hello())
    asked = RequestContext(request_id="r", tenant="ann", model="chat", operation=Operation.CHAT, traceparent="")
    seen = []
    async for frame in script.call(CHAT, asked, chat_pb2.ChatPayload()).through(live).chunks():
        is_last = frame[-1].HasField("finished")
        seen.append((is_last, "resp_1" in store.kept, everyone.find("ann", "resp_1") is live))
    assert seen[0] == (False, False, True)
    assert seen[-1] == (True, True, False)


async def test_cancelled_response_is_deletable_while_its_caller_does_not_read() -> None:
    """Its deletion was refused with "cancel it first", and its cancellation because it had ended."""
    store, everyone, growing = MemoryResponses(), RunningResponses[LiveResponse](1), UnaryCall()
    live = LiveResponse("ann", growing, store=store, items=b"[]", previous_id="", running=everyone)
    script = ScriptedDispatcher(hello())
    asked = RequestContext(request_id="r", tenant="ann", model="chat", operation=Operation.CHAT, traceparent="")
    unused: Any = None
    responses = Responses(deps=unused, store=store, running=everyone)
    frames = script.call(CHAT, asked, chat_pb2.ChatPayload()).through(live).chunks()
    await anext(frames)
    assert await responses.cancel("ann", "resp_1") == b"cancelled"
    assert list(store.kept) == ["resp_1"]
    await responses.delete("ann", "resp_1")
    assert store.kept == {}
    with pytest.raises(WeftError):
        await anext(frames)


async def test_items_with_one_id_are_paged_to_the_end() -> None:
    items = [{"type": "message", "role": "user", "id": "msg_same", "content": f"line {n}"} for n in range(5)]
    async with serving(responses=MemoryResponses()) as gateway:
        made = await answer_of(gateway, input=items)
        listed = [
            item async for _, item in limited(gateway.sdk.responses.input_items.list(made["id"], limit=1, order="asc"))
        ]
    assert [item.to_dict()["content"][0]["text"] for item in listed] == [f"line {n}" for n in range(5)]
    assert len({item.id for item in listed}) == 5


async def limited(items: Any, limit: int = 20) -> Any:
    number = 0
    async for item in items:
        number += 1
        assert number <= limit, "the pages never end"
        yield number, item


async def test_total_size_of_item_references_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(responses=MemoryResponses()) as gateway:
        made = [await answer_of(gateway, input="x" * 2000) for _ in range(3)]
        references = [{"type": "item_reference", "id": answer["output"][0]["id"]} for answer in made]
        monkeypatch.setattr(history, "MAX_REFERENCED_BYTES", 7000)
        two = await gateway.request("POST", PATH, body(input=references[:2]))
        three = await gateway.request("POST", PATH, body(input=references))
    assert (two.status, three.status) == (200, 400)
    assert three.error["param"] == "input[2].id"


async def test_duplicate_item_reference_is_rejected() -> None:
    async with serving(responses=MemoryResponses()) as gateway:
        made = await answer_of(gateway)
        reference = {"type": "item_reference", "id": made["output"][0]["id"]}
        once = await gateway.request("POST", PATH, body(input=[reference]))
        twice = await gateway.request("POST", PATH, body(input=[reference, reference]))
    assert (once.status, twice.status) == (200, 400)
    assert twice.error["param"] == "input[1].id"


async def test_json_member_limit_applies_to_the_whole_conversation() -> None:
    config = GatewayConfig(port=0, limits=RequestLimits(max_json_members=120))
    items = [{"role": "user", "content": "a: b"} for _ in range(15)]
    async with serving(responses=MemoryResponses(), config=config) as gateway:
        first = await answer_of(gateway, input=items)
        second = await answer_of(gateway, previous_response_id=first["id"])
        third = await gateway.request("POST", PATH, body(previous_response_id=second["id"], input=items))
        fourth = await gateway.request("POST", PATH, body(previous_response_id=third.json["id"], input="Go on"))
        reference = {"type": "item_reference", "id": third.json["output"][0]["id"]}
        named = await gateway.request("POST", PATH, body(previous_response_id=first["id"], input=[reference]))
    assert (second["status"], third.status, fourth.status, named.status) == ("completed", 200, 400, 400)
    assert fourth.error["param"] == "previous_response_id"
    assert named.error["param"] == "input[0].id"


async def test_malformed_response_id_returns_404_without_a_lookup() -> None:
    down = WeftError(Reason.SERVICE_UNAVAILABLE, "the router cannot be reached")
    async with serving(responses=MemoryResponses(failure=down)) as gateway:
        for name in ("a\x00b", "\u00e9", "a b", "../x"):
            answer = await gateway.request("POST", PATH, body(previous_response_id=name))
            assert (answer.status, answer.error["code"]) == (404, "previous_response_not_found")
