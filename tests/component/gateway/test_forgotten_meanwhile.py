"""Tasks and responses that are deleted while they are read: no partial answer, and none reappears."""

from collections.abc import AsyncGenerator

from background_script import asked, events_in, followed, hello_pieces, stage
from gateway_script import serving
from response_script import MemoryResponses
from task_script import ScriptedTasks
from test_inference_tasks import PATH, submit

from weft.api.router.v1 import stored_response_service_pb2, task_service_pb2
from weft.durable.tasks import task_not_found


class Forgotten(ScriptedTasks):
    """Deletes tasks after the first chunk of their answer was read: a watch then has only the end."""

    is_on = True

    async def watch(
        self, tenant: str, task_id: str, after_event: int = 0
    ) -> AsyncGenerator[task_service_pb2.WatchTaskResponse]:
        found = self.kept[task_id].task
        async for item in super().watch(tenant, task_id, after_event):
            yield item
            if self.is_on and item.HasField("piece"):
                await self.delete(tenant, task_id)
                yield task_service_pb2.WatchTaskResponse(task=found)
                return


async def test_result_purged_during_a_read_returns_503_then_404() -> None:
    tasks = Forgotten(at_once=hello_pieces())
    async with serving(tasks=tasks) as gateway:
        assert (await submit(gateway)).status == 202
        path = f"{PATH}/{tasks.one.task.id}"
        assert (await gateway.request("GET", path)).refusal[:2] == (503, "service_unavailable")
        assert (await gateway.request("GET", path)).refusal[:2] == (404, "not_found")


async def test_response_purged_during_a_read_is_neither_failed_nor_stored() -> None:
    tasks, store = Forgotten(at_once=hello_pieces()), MemoryResponses()
    async with stage(tasks, store) as gateway:
        tasks.is_on = False
        made = await asked(gateway)
        store.kept.clear()
        tasks.is_on = True
        answer = await gateway.request("GET", f"/v1/responses/{made['id']}")
        assert (answer.status, store.kept) == (503, {})
        assert (await gateway.request("GET", f"/v1/responses/{made['id']}")).status == 404


async def test_response_known_to_be_purged_during_a_read_returns_404() -> None:
    class Told(Forgotten):
        async def watch(
            self, tenant: str, task_id: str, after_event: int = 0
        ) -> AsyncGenerator[task_service_pb2.WatchTaskResponse]:
            async for item in super().watch(tenant, task_id, after_event):
                if task_id not in self.kept:
                    raise task_not_found(task_id)
                yield item

    tasks, store = Told(at_once=hello_pieces()), MemoryResponses()
    async with stage(tasks, store) as gateway:
        made = await asked(gateway)
        answer = await gateway.request("GET", f"/v1/responses/{made['id']}")
    assert answer.refusal[:2] == (404, "not_found")
    assert made["id"] in answer.error["message"]


async def test_stream_of_a_purged_response_ends_with_an_error_instead_of_a_made_up_end() -> None:
    tasks, store = Forgotten(at_once=hello_pieces()), MemoryResponses()
    async with stage(tasks, store) as gateway:
        tasks.is_on = False
        made = await asked(gateway)
        store.kept.clear()
        tasks.is_on = True
        told = events_in((await followed(gateway, made["id"])).body)
    assert [event["type"] for event in told][-1] == "error"
    assert "response.failed" not in [event["type"] for event in told]
    assert (told[-1]["code"], store.kept) == ("service_unavailable", {})


async def test_response_deleted_while_its_end_is_stored_is_not_restored() -> None:
    class Deleting(MemoryResponses):
        async def save(self, response: stored_response_service_pb2.StoredResponse, *, holder: str = "") -> None:
            tasks.kept.clear()
            await super().save(response, holder=holder)

    tasks, store = ScriptedTasks(at_once=hello_pieces()), Deleting()
    async with stage(tasks, store) as gateway:
        made = await asked(gateway)
        path = f"/v1/responses/{made['id']}"
        # It was read before its deletion.
        assert ((await gateway.request("GET", path)).status, store.kept) == (200, {})
        assert (await gateway.request("GET", path)).status == 404
        made = await asked(gateway)
        body = {"model": "chat", "input": "more", "previous_response_id": made["id"]}
        answer = await gateway.request("POST", "/v1/responses", body)
        assert answer.refusal[:2] == (404, "previous_response_not_found")
        assert store.kept == {}


async def test_stored_response_is_not_stored_again_on_each_read() -> None:
    class Counting(MemoryResponses):
        saves = 0

        async def save(self, response: stored_response_service_pb2.StoredResponse, *, holder: str = "") -> None:
            self.saves += 1
            await super().save(response, holder=holder)

    store = Counting()
    async with stage(ScriptedTasks(at_once=hello_pieces()), store) as gateway:
        made = await asked(gateway)
        for _ in range(2):
            assert events_in((await followed(gateway, made["id"])).body)[-1]["type"] == "response.completed"
    assert (store.saves, list(store.kept)) == (1, [made["id"]])
