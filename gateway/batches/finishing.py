"""Finishing of batches: once all items are terminal, the result files are written when a caller asks for the batch.

The store decides which writer was first: a crash, or another gateway doing the same, wastes that work and no more.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass

import msgspec

from gateway.batches.chunks import EventLoopYielder, each_in_time, in_chunks
from gateway.deps import InferenceDeps
from gateway.errors import envelope, http_status, internal_error
from gateway.tasks.media_answers import link_of, with_content
from gateway.tasks.task_apis import AnyTaskApi, TaskApis
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.api.router.v1 import task_pb2
from weft.durable.batches import BATCH_OUTPUT, BatchPort, FilePort, LineResult
from weft.durable.tasks import failure_of
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import datetime_of, optional_datetime

EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}
CANCELLED = {"code": "batch_cancelled", "message": "This request was cancelled with its batch before it was done."}

MAX_HELD_BYTES = 1024 * 1024
"""Maximum size of error lines held in memory; beyond it the results are read a second time."""

_encode = msgspec.json.Encoder().encode


class BatchResults:
    """The result lines of one batch. Read the outputs first, then the errors."""

    def __init__(
        self,
        batch: batch_pb.Batch,
        batches: BatchPort,
        surface: AnyTaskApi,
        *,
        deps: InferenceDeps,
        base: str = "",
    ) -> None:
        """`base`: how callers reach the gateway, for addresses of results."""
        self._batch = batch
        self._batches = batches
        self._surface = surface
        self._deps = deps
        self._link = link_of(deps, base, batch.tenant)
        self._timeout_seconds = deps.config.batches.store_timeout_seconds
        """How long the store may take for each line."""
        self._broken = set[int]()
        """Completed lines whose outputs are invalid."""
        self._held = bytearray()
        self._has_all_errors = False

    async def outputs(self) -> AsyncGenerator[bytes]:
        """Yields a JSON line for each completed item. Errors found on the way are held up to MAX_HELD_BYTES."""
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
        """Yields a JSON line for each failed item, and for each with invalid outputs. Call it after `outputs`."""
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
        found = self._batches.results(self._batch.tenant, self._batch.id)
        async with aclosing(each_in_time(found, self._timeout_seconds)) as results:
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
                return _line(result, _refusal(result, error), None), False
            except Exception:
                # A fault in weft itself becomes the line's error: one line must not withhold all others.
                log.exception("the answer of a line could not be built", batch=self._batch.id, task=task.id)
                return _line(result, _refusal(result, internal_error()), None), False
            return _line(result, _response(result, 200, body), None), True
        if task.state == task_pb2.TASK_STATE_CANCELLED:
            # One with a failure was cancelled by its request id, and not with its batch.
            by_id = None if failure is None else {"code": "request_cancelled", "message": failure.message}
            return _line(result, None, by_id or CANCELLED), False
        # As the store counts them: expired at the end of the window.
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
    return _encode(line) + b"\n"


log = get_logger("weft.gateway")

_BELONGS_TO_OTHERS = frozenset({Reason.RESOURCE_IN_USE, Reason.NOT_FOUND})

Key = tuple[str, str]
"""Tenant and batch id."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A batch, with its results if they were written in time."""

    batch: batch_pb.Batch
    problem: WeftError | None = None
    """Why the results could not be written."""


class FinishingJobs:
    """Background jobs that outlive the request that started them: a bounded number, one per key."""

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._jobs: dict[Key, asyncio.Task[Settled]] = {}
        self._is_closed = False

    def begun(self, key: Key, work: Callable[[], Coroutine[None, None, Settled]]) -> asyncio.Task[Settled] | None:
        """Returns the job of a key, started if it is not running; None: the maximum number is running."""
        job = self._jobs.get(key)
        if job is None and not self._is_closed and len(self._jobs) < self._max_jobs:
            job = self._jobs[key] = asyncio.create_task(work())
            job.add_done_callback(lambda _: self._jobs.pop(key, None))
        return job

    async def close(self) -> None:
        """Cancel every job, and refuse new ones."""
        self._is_closed = True
        jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        if jobs:
            await asyncio.wait(jobs)


class BatchFinisher:
    """Writes the result files of batches."""

    def __init__(
        self, files: FilePort, batches: BatchPort, task_apis: TaskApis, *, jobs: FinishingJobs, deps: InferenceDeps
    ) -> None:
        self._files = files
        self._batches = batches
        self._surfaces = task_apis
        self._jobs = jobs
        self._deps = deps
        self._config = deps.config.batches

    async def settle(self, batch: batch_pb.Batch, base: str = "") -> Settled:
        """Returns the batch, with its results if it is finished and they are written within `finish_wait_seconds`.

        `base`: how the caller reaches the gateway, for addresses of results.
        """
        job = self.begin(batch, base)
        if job is None:
            return Settled(batch)
        # The job outlives the request.
        await asyncio.wait({job}, timeout=self._config.finish_wait_seconds)
        return job.result() if job.done() and not job.cancelled() else Settled(batch)

    def begin(self, batch: batch_pb.Batch, base: str = "") -> asyncio.Task[Settled] | None:
        """Start writing the results of a finished batch; None: it is not finished, or too many are being written."""
        if batch.state != batch_pb.BATCH_STATE_FINALIZING:
            return None
        return self._jobs.begun((batch.tenant, batch.id), lambda: self._finished(batch, base))

    async def _finished(self, batch: batch_pb.Batch, base: str) -> Settled:
        try:
            async with asyncio.timeout(self._config.finish_timeout_seconds):
                return Settled(await self._write(batch, base))
        except TimeoutError:
            limit = self._config.finish_timeout_seconds
            problem = WeftError(Reason.DEADLINE_EXCEEDED, f"the results were not written within {limit:g} seconds")
        except WeftError as error:
            problem = error
        except Exception:
            log.exception("results of a batch could not be written", batch=batch.id)
            problem = WeftError(Reason.INTERNAL, "the results could not be written")
        log.warning("results of a batch are not written", batch=batch.id, reason=problem.reason.name.lower())
        return Settled(batch, problem)

    async def _write(self, batch: batch_pb.Batch, base: str) -> batch_pb.Batch:
        surface = self._surfaces.of_endpoint(batch.endpoint)
        results = BatchResults(batch, self._batches, surface, deps=self._deps, base=base)
        output_file = await self._save(batch, "output", results.outputs())
        try:
            error_file = await self._save(batch, "error", results.errors())
        except BaseException:
            # Also at shutdown and at the timeout: each try would leave a file behind.
            await self._delete(batch.tenant, output_file)
            raise
        finished = await self._hand_in(batch, output_file, error_file)
        for mine in {output_file, error_file} - {finished.output_file, finished.error_file}:
            await self._delete(batch.tenant, mine)
        return finished

    async def _hand_in(self, batch: batch_pb.Batch, output_file: str, error_file: str) -> batch_pb.Batch:
        """Returns the batch with its result files, these or an earlier writer's. Other failures delete nothing."""
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
        """Stores the lines; returns the file's id, empty where there are no lines."""
        async with aclosing(lines), aclosing(in_chunks(lines)) as pieces:
            first = await anext(pieces, b"")
            if not first:
                return ""
            new = file_pb.File(tenant=batch.tenant, name=f"{batch.id}_{what}.jsonl", purpose=BATCH_OUTPUT)
            return (await self._files.save(new, _after(first, pieces))).id

    async def _delete(self, tenant: str, file_id: str) -> None:
        """Delete an unused file; one that remains expires."""
        if file_id:
            with suppress(WeftError):
                await self._files.delete(tenant, file_id)


async def _after(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for piece in rest:
        yield piece
