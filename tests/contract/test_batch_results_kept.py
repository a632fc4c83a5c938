"""What a batch came to is kept until its results are written, and its results have room, on every kind of database."""

from stored_batches import content, many, refused, running

from router_svc.durable.tasks import sql_transitions
from weft.durable.batches import BATCH_OUTPUT, BatchState, NewFile
from weft.durable.tasks import TaskState
from weft.kernel.reasons import Reason

pytest_plugins = ("database_fixtures",)

RESULTS = NewFile(tenant="ann", name="batch-1_output.jsonl", purpose=BATCH_OUTPUT)


async def test_lines_that_ended_long_before_the_others_are_kept_until_the_results_are_written(
    database_url: str,
) -> None:
    async with running(database_url) as world:

        async def forgotten() -> int:
            await world.clock.advance(100)
            async with world.database.writing() as connection:
                return await sql_transitions.purge_ended(connection, world.clock.utc_now().timestamp(), 10)

        made = await world.batches.create(world.new_batch(), many(2))
        await world.end(made.id, TaskState.COMPLETED, [0])
        assert await forgotten() == 0
        await world.end(made.id, TaskState.COMPLETED, [1])
        assert await forgotten() == 0
        finalizing = await world.batches.get("ann", made.id)
        assert (finalizing.state, finalizing.counts.completed) == (BatchState.FINALIZING, 2)
        assert await forgotten() == 0
        kept = await world.files.save(RESULTS, content(b"a"))
        await world.batches.finish("ann", made.id, output_file=kept.id, error_file="")
        assert await forgotten() == 2


async def test_a_file_of_results_is_as_long_as_the_answers_are(database_url: str) -> None:
    async with running(database_url, max_file_bytes=10, max_tenant_file_bytes=30) as world:
        assert (await world.files.save(RESULTS, content(bytes(20)))).size == 20
        await refused(Reason.TOO_MANY_RESOURCES, world.files.save(RESULTS, content(bytes(20))))
