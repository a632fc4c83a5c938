"""What became of a batch's lines, as the two files of OpenAI's API: outputs, and errors."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import structlog

from gateway.batches.pieces import Breather, each_in_time
from gateway.errors import envelope, http_status, internal_error
from gateway.tasks.surface import Surface
from weft.durable.batches import Batch, BatchPort, LineResult
from weft.durable.tasks import TaskState
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

log = structlog.get_logger("weft.gateway")

EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}
CANCELLED = {"code": "batch_cancelled", "message": "This request was cancelled with its batch before it was done."}

MAX_HELD_BYTES = 1024 * 1024
"""Of lines of errors; for more of them, the results are read once more."""

_encode = msgspec.json.Encoder().encode


class BatchResults:
    """The results of one batch, line by line. Read the outputs first, then the errors."""

    def __init__(self, batch: Batch, batches: BatchPort, surface: Surface, *, timeout_seconds: float) -> None:
        """`timeout_seconds`: how long the keeper may take for each line."""
        self._batch = batch
        self._batches = batches
        self._surface = surface
        self._timeout_seconds = timeout_seconds
        self._broken: set[int] = set()
        self._held = bytearray()
        self._has_all_errors = False

    async def outputs(self) -> AsyncGenerator[bytes]:
        """A line of JSON for each that is completed. Errors that are found on the way are held, if they are few."""
        if not self._batch.counts.completed:
            return
        self._has_all_errors = True
        async with aclosing(self._results()) as results:
            async for result in results:
                if result.task.state is not TaskState.COMPLETED:
                    self._hold(self._failed_line(result))
                    continue
                try:
                    body = self._answer(result)
                except WeftError as error:
                    self._broken.add(result.task.line)
                    self._hold(_line(result, _refusal(result, error), None))
                else:
                    yield _line(result, _response(result, 200, body), None)

    async def errors(self) -> AsyncGenerator[bytes]:
        """A line of JSON for each other one, and for those whose outputs are no answer. Read it after `outputs`."""
        if self._has_all_errors:
            if self._held:
                yield bytes(self._held)
            return
        async with aclosing(self._results()) as results:
            async for result in results:
                if result.task.state is not TaskState.COMPLETED:
                    yield self._failed_line(result)
                elif result.task.line in self._broken:
                    yield self._broken_line(result)

    def _hold(self, line: bytes) -> None:
        if len(self._held) + len(line) > MAX_HELD_BYTES:
            self._has_all_errors = False
            self._held.clear()
        if self._has_all_errors:
            self._held += line

    async def _results(self) -> AsyncGenerator[LineResult]:
        breather = Breather()
        found = self._batches.results(self._batch.tenant, self._batch.id)
        async with aclosing(each_in_time(found, self._timeout_seconds)) as results:
            async for result in results:
                yield result
                await breather.breathe()

    def _answer(self, result: LineResult) -> bytes:
        try:
            return self._surface.answer(result.origin, result.task, result.outputs)
        except WeftError:
            raise
        except Exception:
            # A fault in weft itself, told in the line's error: one line must not keep all others from their caller.
            log.exception("the answer of a line could not be made", batch=self._batch.id, task=result.task.id)
            raise internal_error() from None

    def _broken_line(self, result: LineResult) -> bytes:
        try:
            body = self._answer(result)
        except WeftError as error:
            return _line(result, _refusal(result, error), None)
        return _line(result, _response(result, 200, body), None)

    def _failed_line(self, result: LineResult) -> bytes:
        task, failure = result.task, result.task.error
        if task.state is TaskState.CANCELLED:
            return _line(result, None, CANCELLED)
        # As whoever counts them says it: at the end of the window, and for that reason.
        is_late = task.ended_at is not None and task.ended_at >= self._batch.window_ends_at
        if is_late and failure is not None and failure.reason is Reason.DEADLINE_EXCEEDED:
            return _line(result, None, EXPIRED)
        error = internal_error() if failure is None else WeftError(failure.reason, failure.message)
        return _line(result, _refusal(result, error), None)


def _refusal(result: LineResult, error: WeftError) -> dict[str, object]:
    return _response(result, http_status(error), envelope(error, result.task.id))


def _response(result: LineResult, status: int, body: bytes) -> dict[str, object]:
    return {"status_code": status, "request_id": result.task.id, "body": msgspec.Raw(body)}


def _line(result: LineResult, response: dict[str, object] | None, error: dict[str, str] | None) -> bytes:
    told = {"id": f"batch_req_{result.task.id}", "custom_id": result.custom_id, "response": response, "error": error}
    return _encode(told) + b"\n"
