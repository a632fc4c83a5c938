"""Finishing of batches: after the last item of a batch has ended, a gateway writes its result files.

The router assigns each batch to one gateway. If that gateway ends first, another one writes the files.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial

import msgspec

from gateway.batches.chunks import EventLoopYielder, in_chunks
from gateway.deps import InferenceDeps
from gateway.errors import envelope, http_status, internal_error
from gateway.tasks.result_content import link_of, with_content
from gateway.tasks.task_apis import ServedTaskApi, TaskApis
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.api.router.v1 import task_pb2
from weft.durable.batches import BATCH_OUTPUT, BatchClient, FileClient, LineResult
from weft.durable.tasks import failure_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.json_lines import encode_json
from weft.kernel.time.timestamps import datetime_of, optional_datetime

EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}
CANCELLED = {"code": "batch_cancelled", "message": "This request was cancelled with its batch before it was done."}

MAX_HELD_BYTES = 1024 * 1024
"""Maximum size of error lines held in memory; above it the results are read a second time."""


class BatchResults:
    """The result lines of one batch. Read the outputs first, then the errors."""

    def __init__(
        self,
        batch: batch_pb.Batch,
        batches: BatchClient,
        surface: ServedTaskApi,
        *,
        deps: InferenceDeps,
    ) -> None:
        self._batch = batch
        self._batches = batches
        self._surface = surface
        self._deps = deps
        self._link = link_of(deps, batch.result_base, batch.tenant)
        self._broken = set[int]()
        """Completed lines whose outputs are invalid."""
        self._held = bytearray()
        self._has_all_errors = False

    async def outputs(self) -> AsyncGenerator[bytes]:
        """Yields a JSON line for each completed item. Errors found meanwhile are held up to MAX_HELD_BYTES."""
        if not self._batch.completed_count:
            return
        self._has_all_errors = True
        async with aclosing(self._results()) as results:
            async for result in results:
                line, is_answer = await self._rendered(result)
                if is_answer:
                    yield line
                    continue
                if result.task.state == task_pb2.TASK_STATE_COMPLETED:
                    self._broken.add(result.task.line)
                self._hold(line)

    async def errors(self) -> AsyncGenerator[bytes]:
        """Yields a JSON line for each failed item and each with invalid outputs. Call it after `outputs`."""
        if self._has_all_errors:
            if self._held:
                yield bytes(self._held)
            return
        async with aclosing(self._results()) as results:
            async for result in results:
                if result.task.state != task_pb2.TASK_STATE_COMPLETED or result.task.line in self._broken:
                    yield (await self._rendered(result))[0]

    def _hold(self, line: bytes) -> None:
        if len(self._held) + len(line) > MAX_HELD_BYTES:
            self._has_all_errors = False
            self._held.clear()
        if self._has_all_errors:
            self._held += line

    async def _results(self) -> AsyncGenerator[LineResult]:
        breather = EventLoopYielder()
        async with aclosing(self._batches.results(self._batch.tenant, self._batch.id)) as results:
            async for result in results:
                yield result
                await breather.yield_if_due()

    async def _answer(self, result: LineResult) -> bytes:
        surface, tenant = self._surface, self._batch.tenant
        has_links = bool(result.outputs) and surface.has_links(result.origin)
        outputs = await with_content(self._deps, tenant, result.outputs, has_links=has_links)
        return surface.answer(result.origin, result.task, outputs, self._link)

    async def _rendered(self, result: LineResult) -> tuple[bytes, bool]:
        """Returns the line of a result, and whether it is an answer."""
        task, failure = result.task, failure_of(result.task)
        if task.state == task_pb2.TASK_STATE_COMPLETED:
            try:
                body = await self._answer(result)
            except WeftError as error:
                if error.reason is Reason.SERVICE_UNAVAILABLE:
                    # An outage of the file store, after which the results are written again.
                    raise
                return _line(result, _refusal(result, error), None), False
            except Exception:
                # A fault in weft becomes the line's error, so that it does not withhold the other lines.
                log.exception("the answer of a line could not be built", batch=self._batch.id, task=task.id)
                return _line(result, _refusal(result, internal_error()), None), False
            return _line(result, _response(result, 200, body), None), True
        if task.state == task_pb2.TASK_STATE_CANCELLED:
            # A task with a failure was cancelled by its request id, not with its batch.
            by_id = None if failure is None else {"code": "request_cancelled", "message": failure.message}
            return _line(result, None, by_id or CANCELLED), False
        # As the store counts: expired at the end of the window.
        ended_at = optional_datetime(task, "end_time")
        is_late = ended_at is not None and ended_at >= datetime_of(self._batch.window_end_time)
        if is_late and failure is not None and failure.reason is Reason.DEADLINE_EXCEEDED:
            return _line(result, None, EXPIRED), False
        return _line(result, _refusal(result, failure or internal_error()), None), False


def _refusal(result: LineResult, error: WeftError) -> dict[str, object]:
    return _response(result, http_status(error), envelope(error, result.task.id))


def _response(result: LineResult, status: int, body: bytes) -> dict[str, object]:
    return {"status_code": status, "request_id": result.task.id, "body": msgspec.Raw(body)}


def _line(result: LineResult, response: dict[str, object] | None, error: dict[str, str] | None) -> bytes:
    line = {"id": f"batch_req_{result.task.id}", "custom_id": result.custom_id, "response": response, "error": error}
    return encode_json(line) + b"\n"


log = get_logger("weft.gateway")

_BELONGS_TO_OTHERS = frozenset({Reason.RESOURCE_IN_USE, Reason.NOT_FOUND})

RETRY_SECONDS = 1.0
"""Pause before ended batches are read again after the router was lost."""


class BatchFinisher:
    """Writes the result files of ended batches that the router assigns."""

    def __init__(self, files: FileClient, batches: BatchClient, task_apis: TaskApis, deps: InferenceDeps) -> None:
        self._files = files
        self._batches = batches
        self._surfaces = task_apis
        self._deps = deps
        self._config = deps.config.batches

    async def run(self) -> None:
        """Writes results until cancelled, for at most `max_finishing` batches concurrently."""
        writing: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                try:
                    await self._write_ended(writing)
                except WeftError as error:
                    log.info("ended batches could not be read", reason=error.reason.name.lower())
                await self._deps.clock.sleep(RETRY_SECONDS)
        finally:
            await stop_tasks(writing.values())

    async def _write_ended(self, writing: dict[str, asyncio.Task[None]]) -> None:
        async with aclosing(self._batches.ended()) as batches:
            async for batch in batches:
                if batch.id not in writing:
                    job = writing[batch.id] = start_task(self._finish(batch), name=f"results-{batch.id}")
                    job.add_done_callback(partial(_drop, writing, batch.id))
                if len(writing) >= self._config.max_finishing:
                    await asyncio.wait(writing.values(), return_when=asyncio.FIRST_COMPLETED)

    async def _finish(self, batch: batch_pb.Batch) -> None:
        problem = await self._failure_of_writing(batch)
        if problem is None:
            return
        log.warning("results of a batch are not written", batch=batch.id, reason=problem.reason.name.lower())
        told = batch_pb.BatchLineError(code=problem.reason.name.lower(), message=problem.message)
        # If this fails, the router assigns the batch again when this gateway leaves.
        with suppress(WeftError):
            await self._batches.finish(batch.tenant, batch.id, problem=told)

    async def _failure_of_writing(self, batch: batch_pb.Batch) -> WeftError | None:
        """Writes the results; returns why they could not be written, or None."""
        try:
            async with asyncio.timeout(self._config.finish_timeout_seconds):
                await self._write(batch)
        except TimeoutError:
            limit = self._config.finish_timeout_seconds
            return WeftError(Reason.DEADLINE_EXCEEDED, f"the results were not written within {limit:g} seconds")
        except WeftError as error:
            return error
        except Exception:
            log.exception("results of a batch could not be written", batch=batch.id)
            return WeftError(Reason.INTERNAL, "the results could not be written")
        return None

    async def _write(self, batch: batch_pb.Batch) -> None:
        surface = await self._surfaces.of_endpoint(batch.endpoint)
        results = BatchResults(batch, self._batches, surface, deps=self._deps)
        output_file = await self._save(batch, "output", results.outputs())
        try:
            error_file = await self._save(batch, "error", results.errors())
        except BaseException:
            # Also at shutdown and at the timeout, since each try would leave a file behind.
            await self._delete(batch.tenant, output_file)
            raise
        finished = await self._hand_in(batch, output_file, error_file)
        for mine in {output_file, error_file} - {finished.output_file, finished.error_file}:
            await self._delete(batch.tenant, mine)

    async def _hand_in(self, batch: batch_pb.Batch, output_file: str, error_file: str) -> batch_pb.Batch:
        """Returns the batch with its result files: these, or an earlier writer's. Other failures delete nothing."""
        tenant = batch.tenant
        try:
            return await self._batches.finish(tenant, batch.id, output_file=output_file, error_file=error_file)
        except WeftError as error:
            if error.reason not in _BELONGS_TO_OTHERS:
                raise
        try:
            return await self._batches.get(tenant, batch.id)
        except WeftError as error:
            if error.reason is Reason.NOT_FOUND:
                await self._delete(tenant, output_file)
                await self._delete(tenant, error_file)
            raise

    async def _save(self, batch: batch_pb.Batch, what: str, lines: AsyncGenerator[bytes]) -> str:
        """Stores the lines; returns the file's id; empty: there are no lines."""
        async with aclosing(lines), aclosing(in_chunks(lines)) as pieces:
            first = await anext(pieces, b"")
            if not first:
                return ""
            new = file_pb.File(tenant=batch.tenant, name=f"{batch.id}_{what}.jsonl", purpose=BATCH_OUTPUT)
            return (await self._files.save(new, _after(first, pieces))).id

    async def _delete(self, tenant: str, file_id: str) -> None:
        """Deletes an unused file; if that fails, it expires."""
        if file_id:
            with suppress(WeftError):
                await self._files.delete(tenant, file_id)


def _drop(writing: dict[str, asyncio.Task[None]], batch_id: str, _: object) -> None:
    writing.pop(batch_id, None)


async def _after(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for piece in rest:
        yield piece
