"""`/v1/batches` after the last line's end: the files of answers and errors, and their writers."""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from time import thread_time
from typing import Any

import pytest
from batch_stage import LATE, PATH, Stage, line, stage
from file_script import EXPIRED, HELLO, NOW, MemoryBatches, MemoryFiles
from kit.messages import changed

from weft.api.router.v1 import batch_service_pb2, file_service_pb2, task_pb2
from weft.durable.batches import BATCH_INPUT, LineResult
from weft.durable.tasks import task_error
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


async def test_every_line_outcome_is_written_to_a_result_file() -> None:
    failure = task_error(Reason.CONTEXT_LENGTH_EXCEEDED, "too long")
    async with stage() as at:
        made = await at.make(*(line(each) for each in ("done", "failed", "expired", "tried", "cancelled", "broken")))
        at.batches.end(made["id"], 0, outputs=HELLO)
        at.batches.end(made["id"], 1, task_pb2.TASK_STATE_FAILED, error=failure, attempt=1)
        at.batches.end(made["id"], 2, task_pb2.TASK_STATE_FAILED, error=EXPIRED, end_time=LATE)
        at.batches.end(
            made["id"], 3, task_pb2.TASK_STATE_FAILED, error=changed(EXPIRED, message="too slow"), end_time=NOW
        )
        at.batches.end(made["id"], 4, task_pb2.TASK_STATE_CANCELLED)
        # Its outputs have no end, so they are not an answer.
        at.batches.end(made["id"], 5, outputs=(task_pb2.TaskOutput(events=HELLO[0].events[:2]),))
        at.batches.close(made["id"])
        done = await at.until(made["id"], "expired")
        outputs, errors = at.lines_of(done["output_file_id"]), at.lines_of(done["error_file_id"])
    assert [each["custom_id"] for each in outputs] == ["done"]
    by_id = {each["custom_id"]: each for each in errors}
    assert list(by_id) == ["failed", "expired", "tried", "cancelled", "broken"]
    failed = by_id["failed"]["response"]
    assert (failed["status_code"], failed["body"]["error"]["code"]) == (400, "context_length_exceeded")
    assert failed["body"]["error"]["message"] == "too long"
    assert failed["request_id"] == failed["body"]["request_id"] == f"task-{made['id']}-1"
    assert by_id["tried"]["response"]["status_code"] == 504
    assert by_id["broken"]["response"]["body"]["error"]["code"] == "backend_protocol_error"
    for name, code in (("expired", "batch_expired"), ("cancelled", "batch_cancelled")):
        assert by_id[name]["response"] is None
        assert by_id[name]["error"]["code"] == code
        assert by_id[name]["error"]["message"]
    assert all(each["error"] is None for each in (*outputs, by_id["failed"], by_id["tried"], by_id["broken"]))


async def test_few_errors_are_collected_in_one_pass_and_many_in_a_second() -> None:
    message = "x" * 9_000
    failure = task_error(Reason.BACKEND_ERROR, message)
    for count, reads in ((5, 1), (200, 2)):
        async with stage() as at:
            made = await at.make(*(line(str(number)) for number in range(count + 1)))
            for index in range(count):
                at.batches.end(made["id"], index, task_pb2.TASK_STATE_FAILED, error=failure)
            at.batches.end(made["id"], count, outputs=HELLO)
            at.batches.close(made["id"])
            done = await at.until(made["id"], "completed")
        errors = at.lines_of(done["error_file_id"])
        assert [each["custom_id"] for each in errors] == [str(number) for number in range(count)]
        assert [each["custom_id"] for each in at.lines_of(done["output_file_id"])] == [str(count)]
        assert at.batches.reads == reads


async def test_batch_that_exceeded_its_window_is_expired() -> None:
    async with stage() as at:
        made = await at.make(line("a"))
        at.batches.end(made["id"], 0, task_pb2.TASK_STATE_FAILED, error=EXPIRED, end_time=LATE)
        at.batches.close(made["id"])
        done = await at.until(made["id"], "expired")
    assert (done["completed_at"], done["output_file_id"]) == (None, None)
    assert done["expired_at"] > done["finalizing_at"]
    assert at.lines_of(done["error_file_id"])[0]["custom_id"] == "a"


async def test_cancelled_batch_keeps_its_finished_answers() -> None:
    async with stage() as at:
        made = await at.make(line("a"), line("b"))
        at.batches.end(made["id"], 0, outputs=HELLO)
        cancelled = await at.gateway.sdk.batches.cancel(made["id"])
        done = await at.until(made["id"], "cancelled")
        again = await at.gateway.sdk.batches.cancel(made["id"])
    assert (cancelled.status, again.status) == ("cancelling", "cancelled")
    assert cancelled.cancelling_at is not None
    assert done["cancelled_at"] > done["cancelling_at"]
    assert done["completed_at"] is None
    assert [each["custom_id"] for each in at.lines_of(done["output_file_id"])] == ["a"]
    assert [each["error"]["code"] for each in at.lines_of(done["error_file_id"])] == ["batch_cancelled"]


async def test_another_tenant_gets_404() -> None:
    other = {"X-Tenant-ID": "other"}
    async with stage() as at:
        made = await at.make(line())
        place = f"{PATH}/{made['id']}"
        asked = [("GET", place), ("POST", f"{place}/cancel"), ("GET", f"{PATH}?after={made['id']}")]
        statuses = [(await at.gateway.request(method, path, headers=other)).status for method, path in asked]
        listed = (await at.gateway.request("GET", PATH, headers=other)).json
        assert (await at.get(made["id"]))["status"] == "in_progress"
    assert statuses == [404] * 3
    assert listed["data"] == []


async def test_batches_are_listed_in_pages_while_others_finish() -> None:
    async with stage() as at:
        for _ in range(3):
            await at.make(line())
        at.batches.end("batch-1", 0, outputs=HELLO)
        at.batches.close("batch-1")
        page = (await at.gateway.request("GET", f"{PATH}?limit=2")).json
        rest = (await at.gateway.request("GET", f"{PATH}?limit=2&after={page['last_id']}")).json
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("batch-3", "batch-2", True)
        assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (["batch-1"], False)
        async with asyncio.timeout(10):
            while (await at.gateway.request("GET", PATH)).json["data"][2]["status"] != "completed":
                pass
        wrong = [
            (await at.gateway.request("GET", f"{PATH}?{query}")).status for query in ("limit=0", "limit=101", "x=1")
        ]
    assert wrong == [400] * 3


class Held(MemoryFiles):
    """Stores results only once it is released; `entered` is set when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()
        self.saves = 0

    async def save(self, new: file_service_pb2.File, content: AsyncIterator[bytes]) -> file_service_pb2.File:
        if new.purpose != BATCH_INPUT:
            self.saves += 1
            self.entered.set()
            await self.go_on.wait()
        return await super().save(new, content)


async def finalizing(at: Stage) -> str:
    """A batch whose lines have ended."""
    made = await at.make(line("a"))
    at.batches.end(made["id"], 0, outputs=HELLO)
    at.batches.close(made["id"])
    return str(made["id"])


async def test_results_are_written_once_without_a_request() -> None:
    files = Held()
    async with stage(files) as at:
        batch_id = await finalizing(at)
        await files.entered.wait()
        asked = await asyncio.gather(*(at.get(batch_id) for _ in range(5)))
        assert {each["status"] for each in asked} == {"finalizing"}
        files.go_on.set()
        done = await at.until(batch_id, "completed")
    assert files.saves == 1
    assert done["output_file_id"] in files.kept


async def test_concurrent_result_writes_are_limited() -> None:
    files = Held()
    async with stage(files, max_finishing=1) as at:
        first, second = await finalizing(at), await finalizing(at)
        await files.entered.wait()
        assert (await at.get(first))["status"] == "finalizing"
        assert (await at.get(second))["status"] == "finalizing"
        assert files.saves == 1
        files.go_on.set()
        await at.until(first, "completed")
        await at.until(second, "completed")


async def test_result_writing_stops_with_the_gateway() -> None:
    files = Held()
    async with stage(files) as at:
        batch_id = await finalizing(at)
        await files.entered.wait()
    at.batches.in_hand.clear()
    assert at.batches.kept[batch_id].batch.state == batch_service_pb2.BATCH_STATE_FINALIZING
    async with stage(MemoryFiles(), at.batches) as again:
        await again.until(batch_id, "completed")


async def test_failed_result_write_is_reported_and_retried() -> None:
    files = MemoryFiles()
    async with stage(files) as at:
        made = await at.make(line("a"))
        at.batches.end(made["id"], 0, outputs=HELLO)
        files.save_failure = WeftError(Reason.TOO_MANY_RESOURCES, "the tenant keeps all it may")
        at.batches.close(made["id"])
        found = await at.until_failed(made["id"])
        files.save_failure = None
        at.batches.in_hand.clear()
        done = await at.until(made["id"], "completed")
    assert found["status"] == "finalizing"
    assert [error["code"] for error in found["errors"]["data"]] == ["too_many_resources"]
    assert done["errors"] is None


class Second(MemoryBatches):
    """Another writer was the first to store the results."""

    async def finish(self, tenant: str, batch_id: str, **results: Any) -> batch_service_pb2.Batch:
        if self.kept[batch_id].batch.state == batch_service_pb2.BATCH_STATE_FINALIZING:
            await super().finish(tenant, batch_id, output_file="file-first")
        return await super().finish(tenant, batch_id, **results)


class Refusing(Second):
    """The same, reported by an error."""

    async def finish(self, tenant: str, batch_id: str, **results: Any) -> batch_service_pb2.Batch:
        await super().finish(tenant, batch_id, **results)
        raise WeftError(Reason.RESOURCE_IN_USE, "it is finished")


@pytest.mark.parametrize("batches", [Second(), Refusing()])
async def test_second_result_writer_deletes_its_files(batches: MemoryBatches) -> None:
    async with stage(batches=batches) as at:
        batch_id = await finalizing(at)
        done = await at.until(batch_id, "completed")
        assert done["output_file_id"] == "file-first"
        async with asyncio.timeout(10):
            while len(at.files.kept) > 1:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
        assert [file.purpose for file, _ in at.files.kept.values()] == [BATCH_INPUT]


class Unanswering(MemoryBatches):
    """Stores the results, and loses the answer."""

    async def finish(self, tenant: str, batch_id: str, **results: Any) -> batch_service_pb2.Batch:
        await super().finish(tenant, batch_id, **results)
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the connection broke")


async def test_possibly_referenced_files_are_not_deleted() -> None:
    async with stage(batches=Unanswering()) as at:
        batch_id = await finalizing(at)
        done = await at.until(batch_id, "completed")
        assert done["output_file_id"] in at.files.kept


async def test_output_file_is_deleted_if_the_error_file_cannot_be_stored() -> None:
    class Once(MemoryFiles):
        async def save(self, new: file_service_pb2.File, content: AsyncIterator[bytes]) -> file_service_pb2.File:
            if new.name.endswith("_error.jsonl"):
                raise WeftError(Reason.TOO_MANY_RESOURCES, "full")
            return await super().save(new, content)

    async with stage(Once()) as at:
        made = await at.make(line("a"), line("b"))
        at.batches.end(made["id"], 0, outputs=HELLO)
        await at.batches.cancel("default", made["id"])
        found = await at.until_failed(made["id"])
        assert found["status"] == "cancelling"
        assert [file.purpose for file, _ in at.files.kept.values()] == [BATCH_INPUT]


async def test_internal_error_in_one_line_does_not_block_the_others() -> None:
    class Odd(MemoryBatches):
        async def results(self, tenant: str, batch_id: str) -> AsyncGenerator[LineResult]:
            async for result in super().results(tenant, batch_id):
                outputs = (None,) if result.custom_id == "odd" else result.outputs
                yield replace(result, outputs=outputs)  # type: ignore[arg-type]  # what nobody thought of

    async with stage(batches=Odd()) as at:
        made = await at.make(line("odd"), line("even"))
        for place in (0, 1):
            at.batches.end(made["id"], place, outputs=HELLO)
        at.batches.close(made["id"])
        done = await at.until(made["id"], "completed")
    assert [each["custom_id"] for each in at.lines_of(done["output_file_id"])] == ["even"]
    (error,) = at.lines_of(done["error_file_id"])
    assert (error["custom_id"], error["response"]["status_code"]) == ("odd", 500)


class Turns:
    """How long other coroutines wait, in seconds of processor time."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            began = thread_time()
            await asyncio.sleep(0)
            self.longest = max(self.longest, thread_time() - began)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Without garbage collections: one over the objects of all tests takes longer than a turn."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow("floods a service")
@pytest.mark.usefixtures("no_collections")
async def test_requests_are_served_while_many_result_lines_are_processed() -> None:
    turns = Turns()
    async with stage() as at:
        lines = [line(str(number)) for number in range(3000)]
        file_id = await at.file(*lines)
        watching = asyncio.create_task(turns.watch())
        _, made = await at.ask(input_file_id=file_id)
        watching.cancel()
        for index in range(len(lines)):
            at.batches.end(made["id"], index, outputs=HELLO)
        at.batches.close(made["id"])
        watching = asyncio.create_task(turns.watch())
        done = await at.until(made["id"], "completed")
        watching.cancel()
    assert done["request_counts"]["completed"] == len(lines)
    # All lines without yielding take several times as long.
    assert turns.longest < 0.05
