"""What a batch came to is kept until its results are written, and its results have room, on every kind of database."""

from stored_batches import content, many, refused, running

from router_svc.durable.tasks.sql_store import SqlTaskStore
from weft.api.router.v1 import batch_service_pb2, file_service_pb2, task_pb2
from weft.durable.batches import BATCH_OUTPUT
from weft.kernel.reasons import Reason

pytest_plugins = ("database_fixtures",)

RESULTS = file_service_pb2.File(tenant="ann", name="batch-1_output.jsonl", purpose=BATCH_OUTPUT)


async def test_results_of_early_lines_are_retained_until_the_result_file_is_written(
    database_url: str,
) -> None:
    async with running(database_url) as world:

        async def forgotten() -> int:
            await world.clock.advance(100)
            now = world.clock.utc_now().timestamp()
            return await SqlTaskStore(world.database).purge_ended(now, 10)

        made = await world.batches.create(world.new_batch(), many(2))
        await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, [0])
        assert await forgotten() == 0
        await world.end(made.id, task_pb2.TASK_STATE_COMPLETED, [1])
        assert await forgotten() == 0
        finalizing = await world.batches.get("ann", made.id)
        assert (finalizing.state, finalizing.completed_count) == (batch_service_pb2.BATCH_STATE_FINALIZING, 2)
        assert await forgotten() == 0
        kept = await world.files.save(RESULTS, content(b"a"))
        await world.batches.finish("ann", made.id, output_file=kept.id, error_file="")
        assert await forgotten() == 2


async def test_result_file_is_as_long_as_the_answers(database_url: str) -> None:
    async with running(database_url, max_file_bytes=10, max_tenant_file_bytes=30) as world:
        assert (await world.files.save(RESULTS, content(bytes(20)))).byte_count == 20
        await refused(Reason.TOO_MANY_RESOURCES, world.files.save(RESULTS, content(bytes(20))))
