"""Background responses: created at once, readable at any time by every caller of their tenant."""

import json

import pytest
from background_script import (
    asked,
    asking,
    events_in,
    followed,
    found,
    hello_pieces,
    long_answer,
    made_whole,
    pieces,
    stage,
)
from gateway_script import delta, serving, started
from response_script import PATH, MemoryResponses
from task_script import ScriptedTasks, output

from gateway.gateway_config import GatewayConfig, KeepResponses
from weft.api.router.v1 import task_service_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

FULL = WeftError(Reason.TOO_MANY_RESOURCES, "as many responses are kept as may be")


async def test_background_response_is_queued_immediately_and_readable_while_running() -> None:
    tasks, store = ScriptedTasks(), MemoryResponses()
    async with stage(tasks, store) as gateway:
        answer = await gateway.request("POST", PATH, asking(metadata={"a": "b"}))
        made = answer.json
        assert (answer.status, answer.headers["x-weft-task-id"]) == (200, tasks.one.task.id)
        assert (made["status"], made["background"], made["store"], made["output"]) == ("queued", True, True, [])
        assert (made["metadata"], made["usage"], made["model"]) == ({"a": "b"}, None, "chat")
        assert await found(gateway, made["id"]) == made
        tasks.begin()
        assert (await found(gateway, made["id"]))["status"] == "in_progress"
        first, second, *rest = hello_pieces()
        tasks.say(first)
        tasks.say(second)
        growing = await found(gateway, made["id"])
        assert (growing["status"], growing["output"][0]["content"][0]["text"]) == ("in_progress", "Hello")
        for piece in rest:
            tasks.say(piece)
        tasks.complete()
        assert store.kept == {}
        done = await gateway.sdk.responses.retrieve(made["id"])
    assert (done.status, done.output_text, done.created_at) == ("completed", "Hello, world", made["created_at"])
    assert done.completed_at == made["created_at"] + 60
    assert done.usage is not None
    assert json.loads(store.kept[made["id"]].body) == done.to_dict()


async def test_half_a_surrogate_pair_is_replaced_as_in_a_response_that_is_waited_for() -> None:
    tasks = ScriptedTasks(at_once=hello_pieces())
    async with stage(tasks) as gateway:
        made = await made_whole(gateway, input="cut \ud83d", metadata={"cut": "\ud83d"})
        items = await gateway.read(f"{PATH}/{made['id']}/input_items")
    assert (made["status"], made["metadata"]) == ("completed", {"cut": "\ufffd"})
    assert items["data"][0]["content"][0]["text"] == "cut \ufffd"


async def test_stored_response_outlives_its_task() -> None:
    tasks = ScriptedTasks(at_once=hello_pieces())
    async with stage(tasks) as gateway:
        made = await made_whole(gateway)
        assert made["status"] == "completed"
        tasks.kept.clear()
        assert await found(gateway, made["id"]) == made
        assert (await followed(gateway, made["id"])).refusal[::2] == (400, "stream")


async def test_response_is_read_from_its_task_while_it_cannot_be_stored() -> None:
    tasks, store = ScriptedTasks(at_once=hello_pieces()), MemoryResponses(save_failure=FULL)
    async with stage(tasks, store) as gateway:
        made = await made_whole(gateway)
        assert await found(gateway, made["id"]) == made
        assert (made["status"], made["store"], store.kept) == ("completed", True, {})
        store.save_failure = None
        assert await found(gateway, made["id"]) == made
        assert list(store.kept) == [made["id"]]


@pytest.mark.parametrize("begun", [False, True])
async def test_cancel_is_idempotent_and_final(begun: bool) -> None:
    tasks, store = ScriptedTasks(), MemoryResponses()
    async with stage(tasks, store) as gateway:
        made = await asked(gateway)
        if begun:
            tasks.begin()
            tasks.say(output([started(), delta("Hel")]))
        ended = await gateway.sdk.responses.cancel(made["id"])
        again = await gateway.sdk.responses.cancel(made["id"])
        store.kept.clear()
        from_task = await gateway.sdk.responses.cancel(made["id"])
        tasks.kept.clear()
        from_store = await gateway.sdk.responses.cancel(made["id"])
    assert ended.status == "cancelled"
    assert ended.output_text == ("Hel" if begun else "")
    assert ended.to_dict() == again.to_dict() == from_task.to_dict() == from_store.to_dict()


async def test_ended_response_cannot_be_cancelled() -> None:
    tasks = ScriptedTasks(at_once=hello_pieces())
    async with stage(tasks) as gateway:
        made = await asked(gateway)
        kept = await gateway.request("POST", f"{PATH}/{made['id']}/cancel")
        tasks.at_once = None
        other = await asked(gateway)
        tasks.fail(Reason.INTERNAL, "a fault", other["id"].replace("resp_", "task-"))
        failed = await gateway.request("POST", f"{PATH}/{other['id']}/cancel")
    assert kept.refusal[::2] == failed.refusal[::2] == (400, "response_id")


async def test_delete_removes_response_and_task_only_after_the_end() -> None:
    tasks, store = ScriptedTasks(), MemoryResponses()
    async with stage(tasks, store) as gateway:
        made = await asked(gateway)
        place = f"{PATH}/{made['id']}"
        busy = await gateway.request("DELETE", place)
        tasks.begin()
        for piece in hello_pieces():
            tasks.say(piece)
        tasks.complete()
        seen = await found(gateway, made["id"])
        gone = await gateway.request("DELETE", place)
        again = await gateway.request("DELETE", place)
        missing = await gateway.request("GET", place)
    assert (busy.status, busy.error["code"]) == (409, "resource_in_use")
    assert (seen["status"], gone.status, again.status, missing.status) == ("completed", 200, 404, 404)
    assert (tasks.kept, store.kept) == ({}, {})


async def test_delete_works_for_a_failed_response_that_was_never_read() -> None:
    tasks = ScriptedTasks()
    async with stage(tasks) as gateway:
        made = await asked(gateway)
        tasks.fail(Reason.QUEUE_TIMEOUT, "no runner came")
        assert (await gateway.request("DELETE", f"{PATH}/{made['id']}")).status == 200
    assert tasks.kept == {}


async def test_input_items_are_readable_before_and_after_the_end() -> None:
    tasks = ScriptedTasks(at_once=hello_pieces())
    async with stage(tasks) as gateway:
        first = await made_whole(gateway, input="one")
        tasks.at_once = None
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        made = await asked(gateway, input=[{"role": "user", "content": "two"}, reference])
        await gateway.request("DELETE", f"{PATH}/{first['id']}")
        items = await gateway.sdk.responses.input_items.list(made["id"], order="asc")
        before = [item.to_dict() for item in items.data]
        await gateway.request("POST", f"{PATH}/{made['id']}/cancel")
        items = await gateway.sdk.responses.input_items.list(made["id"], order="asc")
        after = [item.to_dict() for item in items.data]
    assert [item["content"][0]["text"] for item in before] == ["two", "Hello, world"]  # type: ignore[index]
    assert before == after


async def test_continued_chain_with_a_deleted_link_is_refused_with_its_name() -> None:
    async with stage(ScriptedTasks(), MemoryResponses()) as gateway:
        first = await gateway.sdk.responses.create(model="chat", input="one")
        later = await gateway.sdk.responses.create(model="chat", input="two", previous_response_id=first.id)
        await gateway.sdk.responses.delete(first.id)
        kept = await gateway.sdk.responses.retrieve(later.id)
        refused = await gateway.request("POST", PATH, asking(input="three", previous_response_id=later.id))
    assert kept.id == later.id
    assert refused.refusal[::2] == (404, "previous_response_id")
    assert f"there is no response {first.id}" in refused.error["message"]


async def test_completed_response_can_be_continued_even_if_its_end_was_never_read() -> None:
    tasks, store = ScriptedTasks(), MemoryResponses()
    async with stage(tasks, store) as gateway:
        made = await asked(gateway, input="one")
        early = await gateway.request("POST", PATH, asking(previous_response_id=made["id"]))
        tasks.begin()
        for piece in hello_pieces():
            tasks.say(piece)
        tasks.complete()
        second = await gateway.sdk.responses.create(model="chat", input="two", previous_response_id=made["id"])
        texts = [part.text for message in gateway.dispatcher.payloads[-1].messages for part in message.content]
        third = await asked(gateway, input="three", previous_response_id=second.id)
    assert early.refusal[::2] == (400, "previous_response_id")
    assert texts == ["one", "Hello, world", "two"]
    last = list(tasks.kept.values())[-1].new.spec.chat
    said = [part.text for message in last.messages for part in message.content]
    assert said == ["one", "Hello, world", "two", "Hello, world", "three"]
    assert third["previous_response_id"] == second.id
    assert set(store.kept) == {made["id"], second.id}


async def test_failed_response_cannot_be_continued() -> None:
    tasks = ScriptedTasks()
    async with stage(tasks) as gateway:
        made = await asked(gateway)
        tasks.fail(Reason.INTERNAL, "a fault")
        assert (await gateway.request("POST", PATH, asking(previous_response_id=made["id"]))).refusal[::2] == (
            400,
            "previous_response_id",
        )
        unknown = await gateway.request("POST", PATH, asking(previous_response_id="resp_" + "f" * 24))
    assert unknown.refusal[::2] == (404, "previous_response_id")


async def test_items_of_a_completed_response_are_referenceable_by_id() -> None:
    tasks, store = ScriptedTasks(at_once=hello_pieces()), MemoryResponses()
    async with stage(tasks, store) as gateway:
        made = await made_whole(gateway)
        store.kept.clear()
        reference = {"type": "item_reference", "id": made["output"][0]["id"]}
        await gateway.request("POST", PATH, asking(input=[reference], background=False))
        tasks.fail(Reason.INTERNAL, "not whole any more")
        store.kept.clear()
        gone = await gateway.request("POST", PATH, asking(input=[reference], background=False))
    (payload,) = gateway.dispatcher.payloads
    assert payload.messages[0].content[0].text == "Hello, world"
    assert gone.refusal[::2] == (400, "input[0].id")


async def test_another_tenant_gets_404() -> None:
    other = {"X-Tenant-ID": "other"}
    tasks = ScriptedTasks()
    async with stage(tasks) as gateway:
        place = f"{PATH}/{(await asked(gateway))['id']}"
        wanted = [("GET", place), ("GET", f"{place}?stream=true"), ("DELETE", place)]
        wanted += [("GET", f"{place}/input_items"), ("POST", f"{place}/cancel")]
        statuses = [(await gateway.request(method, path, headers=other)).status for method, path in wanted]
    assert statuses == [404] * 5
    assert tasks.cancelled == []


async def test_task_of_another_kind_is_not_a_response() -> None:
    tasks = ScriptedTasks()
    async with stage(tasks) as gateway:
        made = await asked(gateway)
        spec = tasks.one.new.spec
        spec.origin_kind = "chat"
        submitted = await tasks.submit(tasks.one.new.tenant, task_service_pb2.SubmitTaskRequest(spec=spec))
        place = f"{PATH}/{submitted.task.id.replace('task-', 'resp_')}"
        statuses = [(await gateway.request(method, place)).status for method in ("GET", "DELETE")]
        assert (await found(gateway, made["id"]))["status"] == "queued"
    assert statuses == [404, 404]
    assert len(tasks.kept) == 2


async def test_background_requires_tasks_and_a_response_store() -> None:
    never = GatewayConfig(port=0, keep_responses=KeepResponses.NEVER)
    async with serving(responses=MemoryResponses()) as gateway:
        assert (await gateway.request("POST", PATH, asking())).refusal[::2] == (400, "background")
    async with serving(tasks=ScriptedTasks()) as gateway:
        assert (await gateway.request("POST", PATH, asking())).refusal[::2] == (400, "background")
    async with stage(ScriptedTasks(), config=never) as gateway:
        assert (await gateway.request("POST", PATH, asking())).refusal[::2] == (400, "background")


@pytest.mark.parametrize("stream", [False, True])
async def test_unpersisted_response_is_not_acknowledged(stream: bool) -> None:
    down = WeftError(Reason.SERVICE_UNAVAILABLE, "the router cannot be reached")
    async with stage(ScriptedTasks(failure=down)) as gateway:
        answer = await gateway.request("POST", PATH, asking(stream=stream))
    assert (answer.status, answer.error["code"]) == (503, "service_unavailable")


async def test_invalid_answer_is_a_failed_response() -> None:
    async with stage(ScriptedTasks(at_once=pieces(long_answer()[:3] + long_answer()[-1:]))) as gateway:
        made = await made_whole(gateway)
        told = events_in((await followed(gateway, made["id"])).body)
    assert (made["status"], made["error"]["code"]) == ("failed", "backend_protocol_error")
    assert told[-2]["response"] == made
