"""Creation of a batch from its input file: all lines become tasks, or the batch fails with the errors of its lines."""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from datetime import timedelta

from starlette.types import Scope

from gateway.batches.chunks import Breather, each_in_time, in_time
from gateway.batches.documents import WINDOW_SECONDS, BatchRequest
from gateway.batches.lines import BatchLines, WrongLinesError, raw_lines
from gateway.config import GatewayConfig
from gateway.request_facts import facts_of
from gateway.tasks.task_api import SpecContext, TaskApi, TaskApis
from weft.api.router.v1 import task_pb2
from weft.durable.batches import Batch, BatchLine, BatchPort, NewBatch
from weft.durable.files import BATCH_INPUT, FilePort
from weft.kernel.clock import Clock
from weft.kernel.errors import FieldError, WeftError, invalid_field

_PLACE = re.compile(r"lines\[(\d{1,9})\]\.?(.*)")


class BatchMaker:
    """Creates batches from input files."""

    def __init__(
        self, files: FilePort, batches: BatchPort, task_apis: TaskApis, *, config: GatewayConfig, clock: Clock
    ) -> None:
        self._files = files
        self._batches = batches
        self._surfaces = task_apis
        self._config = config
        self._clock = clock

    async def make(self, scope: Scope, tenant: str, params: BatchRequest) -> Batch:
        """Creates the batch, durable with all its items; or a failed one, where lines are invalid.

        Raises INVALID_ARGUMENT naming the field, NOT_FOUND, and as `BatchPort.create`.
        """
        surface = self._surfaces.of_endpoint(params.endpoint)
        await self._require_input(tenant, params.input_file_id)
        window = timedelta(seconds=params.window_seconds or WINDOW_SECONDS)
        new = NewBatch(
            tenant=tenant,
            endpoint=params.endpoint,
            input_file=params.input_file_id,
            window_ends_at=self._clock.utc_now() + window,
            metadata=params.metadata or {},
            caller=facts_of(scope).principal.name,
        )
        lines = self._lines(scope, surface, wait_for_model=params.wait_for_model)
        try:
            return await self._batches.create(new, self._tasks(new, lines))
        except WeftError as error:
            _note(error, lines)
            if not lines.errors:
                raise
        # Errors were found while items were created: none of those is stored, and the failed batch is.
        failed = replace(new, errors=tuple(lines.errors))
        return await in_time(self._batches.create(failed, _nothing()), self._config.batches.store_timeout_seconds)

    async def _require_input(self, tenant: str, file_id: str) -> None:
        file = await in_time(self._files.get(tenant, file_id), self._config.batches.store_timeout_seconds)
        if file.purpose != BATCH_INPUT:
            raise invalid_field("input_file_id", f"is a file of the purpose {file.purpose!r}, not {BATCH_INPUT!r}")

    def _lines(self, scope: Scope, surface: TaskApi, *, wait_for_model: bool) -> BatchLines:
        about = SpecContext(scope=scope, field="body")
        max_depth = self._config.limits.max_json_depth

        def to_spec(raw: bytes) -> task_pb2.TaskSpec:
            spec = surface.spec(raw, about)
            spec.wait_for_model = wait_for_model
            return spec

        return BatchLines(surface.endpoint, to_spec, self._config.batches, max_depth=max_depth)

    async def _tasks(self, new: NewBatch, lines: BatchLines) -> AsyncGenerator[BatchLine]:
        """Yields every line as a task, up to the first invalid one. Raises WrongLinesError once all are validated."""
        bounds, breather = self._config.batches, Breather()
        content = each_in_time(self._files.read(new.tenant, new.input_file), bounds.store_timeout_seconds)
        async with aclosing(content), aclosing(raw_lines(content, bounds.max_line_bytes)) as found:
            async for line in found:
                task = lines.take(line)
                if task is not None:
                    yield task
                if lines.has_enough_errors:
                    break
                await breather.breathe()
        lines.require_some()
        if lines.errors:
            raise WrongLinesError


def _note(error: WeftError, lines: BatchLines) -> None:
    """Records a store error that concerns one line as that line's error."""
    place = _PLACE.fullmatch(error.field) if isinstance(error, FieldError) else None
    if place is None or lines.errors:
        return
    number, field = lines.number_of(int(place[1])), place[2]
    if number:
        words = error.message.removeprefix(f"{place[0]}: ")
        lines.fail(error.reason.name.lower(), f"{field}: {words}" if field else words, number, field)


async def _nothing() -> AsyncGenerator[BatchLine]:
    """Yields no items."""
    none: tuple[BatchLine, ...] = ()
    for line in none:
        yield line
