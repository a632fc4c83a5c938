"""Creation of a batch from its input file: all lines become tasks, or the batch fails with the errors of its lines."""

import re
from array import array
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b

import msgspec
from starlette.types import Scope

from gateway.answers.answer_builder import MAX_NOTICES
from gateway.batches.chunks import EventLoopYielder
from gateway.batches.documents import WINDOW_SECONDS, BatchRequest
from gateway.deps import InferenceDeps
from gateway.gateway_config import BatchEdgeConfig
from gateway.intake.json_guard import require_strict_json, without_halves
from gateway.intake.query import naming
from gateway.openai.extension_fields import unknown_fields, unsupported
from gateway.request_facts import facts_of
from gateway.tasks.task_apis import ServedTaskApi, SpecContext, TaskApis
from gateway.visible_names import with_visible_names
from weft.api.common.v1 import warning_pb2
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import task_pb2
from weft.durable.batches import BATCH_INPUT, MAX_CUSTOM_ID_CHARS, MAX_LINE_ERRORS, BatchClient, FileClient
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of

_MARK = b"\xef\xbb\xbf"
"""UTF-8 byte order mark, with which some editors begin a file."""
_DIGEST_BYTES = 16
_SLICE_BYTES = 64 * 1024
"""Bytes of a file that are scanned before the event loop runs other coroutines."""
_MAX_MESSAGE_CHARS = 500
_MAX_NAME_CHARS = 64
_MEMBERS = frozenset({"custom_id", "method", "url", "body"})
_FAULTS_OF_CALLERS = frozenset(
    {
        Reason.INVALID_ARGUMENT,
        Reason.MALFORMED_REQUEST,
        Reason.REQUEST_TOO_LARGE,
        Reason.UNSUPPORTED_OPERATION,
        Reason.PERMISSION_DENIED,
        Reason.MODEL_NOT_FOUND,
        Reason.NOT_FOUND,
    }
)

Members = dict[str, msgspec.Raw]
SpecTranslator = Callable[[bytes], task_pb2.TaskSpec]
"""Translates a body to a task. Raises the errors of the live endpoint."""


@dataclass(frozen=True, slots=True)
class RawLine:
    """One non-empty line."""

    number: int
    """Line number from 1; empty lines count."""
    text: bytes | None
    """None: the line is longer than `max_line_bytes`."""


class InvalidLinesError(WeftError):
    """Lines are invalid (see `BatchLines.errors`), so nothing of the batch is stored."""

    def __init__(self) -> None:
        super().__init__(Reason.INVALID_ARGUMENT, "lines of the input file are invalid")


async def raw_lines(content: AsyncIterable[bytes], max_line_bytes: int) -> AsyncGenerator[RawLine]:
    """Yields the non-empty lines of a file. Holds one line and one chunk of the file in memory."""
    number, begun, is_too_long = 1, bytearray(), False
    async with aclosing(_slices(content)) as slices:
        async for piece in slices:
            *ends, rest = piece.split(b"\n")
            for end in ends:
                # Dropped here, so that the store need not handle empty lines.
                if end or begun or is_too_long:
                    line = _line(number, begun + end, max_line_bytes, is_too_long=is_too_long)
                    if line is not None:
                        yield line
                    is_too_long = False
                    begun.clear()
                number += 1
            begun += rest
            if len(begun) > max_line_bytes:
                begun.clear()
                is_too_long = True
    line = _line(number, begun, max_line_bytes, is_too_long=is_too_long)
    if line is not None:
        yield line


class BatchLines:
    """Turns the lines of a batch into tasks. After the first invalid line, it only validates the others."""

    def __init__(self, endpoint: str, to_spec: SpecTranslator, config: BatchEdgeConfig, *, max_depth: int) -> None:
        self.errors: list[batch_pb.BatchLineError] = []
        """Errors, at most MAX_LINE_ERRORS."""
        self.unknown: dict[str, int] = {}
        """Unknown members of lines, with the number of the first."""
        self._endpoint = endpoint
        self._to_spec = to_spec
        self._config = config
        # The line itself adds one level of nesting.
        self._max_depth = max_depth + 1
        self._ids: set[bytes] = set()
        self._numbers = array("L")
        self._is_full = False

    def number_of(self, index: int) -> int:
        """Returns the line number of the task at a position counted from 0; 0: there is none."""
        return self._numbers[index] if 0 <= index < len(self._numbers) else 0

    def take(self, line: RawLine) -> batch_pb.BatchLine | None:
        """Returns a line as a task; None: this or an earlier line is invalid. Raises errors of other causes."""
        if len(self._numbers) == self._config.max_lines:
            self._is_full = True
            self.fail("too_many_tasks", f"a batch has at most {self._config.max_lines} requests", line.number)
            return None
        self._numbers.append(line.number)
        if line.text is None:
            limit = self._config.max_line_bytes
            self.fail("line_too_long", f"the line is longer than {limit} bytes", line.number)
            return None
        members = self._members(without_halves(line.text), line.number)
        return None if members is None else self._task(members, line.number)

    def fail(self, code: str, message: str, number: int = 0, field: str = "") -> None:
        """Records an error of a line; line 0 is the file."""
        if len(self.errors) < MAX_LINE_ERRORS:
            error = batch_pb.BatchLineError(code=code, message=message[:_MAX_MESSAGE_CHARS], line=number, field=field)
            self.errors.append(error)

    @property
    def has_enough_errors(self) -> bool:
        """Whether MAX_LINE_ERRORS is reached."""
        return self._is_full or len(self.errors) >= MAX_LINE_ERRORS

    def require_some(self) -> None:
        """Records an error if the file has no lines."""
        if not self._numbers and not self.errors:
            self.fail("empty_file", "the input file has no requests")

    def _members(self, text: bytes, number: int) -> Members | None:
        try:
            doubt = require_strict_json(text, self._max_depth)
            if doubt:
                self.fail("invalid_json_line", f"the line is not valid JSON: {doubt}", number)
                return None
            return msgspec.json.decode(text, type=Members)
        except WeftError as error:
            self.fail("invalid_json_line", error.message.replace("the body", "the line", 1), number)
        except msgspec.MsgspecError:
            self.fail("invalid_json_line", "the line must be a JSON object", number)
        return None

    def _task(self, members: Members, number: int) -> batch_pb.BatchLine | None:
        for name in members.keys() - _MEMBERS:
            if len(self.unknown) < MAX_NOTICES:
                self.unknown.setdefault(name[:_MAX_NAME_CHARS], number)
        count = len(self.errors)
        custom_id = self._custom_id(members, number)
        self._require(members, "method", "POST", "invalid_method", number)
        self._require(members, "url", self._endpoint, "invalid_url", number)
        if "body" not in members:
            self.fail("missing_required_parameter", "body: is required", number, "body")
        if len(self.errors) > count or "body" not in members:
            return None
        try:
            spec = self._to_spec(bytes(members["body"]))
        except WeftError as error:
            if error.reason not in _FAULTS_OF_CALLERS:
                raise
            self._refused(error, number)
            return None
        return None if self.errors else batch_pb.BatchLine(custom_id=custom_id, spec=spec)

    def _refused(self, error: WeftError, number: int) -> None:
        field = error.field if isinstance(error, FieldError) else "body"
        self.fail(error.reason.name.lower(), error.message, number, field)

    def _custom_id(self, members: Members, number: int) -> str:
        custom_id = self._text(members, "custom_id", number)
        if custom_id is None:
            return ""
        if not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS or not custom_id.isprintable():
            message = f"custom_id: must be 1 to {MAX_CUSTOM_ID_CHARS} printable characters"
            self.fail("invalid_custom_id", message, number, "custom_id")
            return ""
        digest = blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
        if digest in self._ids:
            message = "custom_id: another line of this file has the same one"
            self.fail("duplicate_custom_id", message, number, "custom_id")
        self._ids.add(digest)
        return custom_id

    def _require(self, members: Members, name: str, wanted: str, code: str, number: int) -> None:
        found = self._text(members, name, number)
        if found is not None and found != wanted:
            self.fail(code, f"{name}: must be {wanted!r}, as the batch says", number, name)

    def _text(self, members: Members, name: str, number: int) -> str | None:
        """Returns the value of a member; None: it is invalid, and its error is recorded."""
        if name not in members:
            self.fail("missing_required_parameter", f"{name}: is required", number, name)
            return None
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(members[name], type=str)
        self.fail("invalid_type", f"{name}: must be a text", number, name)
        return None


async def _slices(content: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Yields the same bytes in small slices, so that other coroutines run even in a file of empty lines."""
    breather = EventLoopYielder()
    async for piece in content:
        for start in range(0, len(piece), _SLICE_BYTES):
            yield piece[start : start + _SLICE_BYTES]
            await breather.yield_if_due()


def _line(number: int, text: bytes | bytearray, most: int, *, is_too_long: bool) -> RawLine | None:
    if is_too_long or len(text) > most:
        return RawLine(number, None)
    stripped = bytes(text.removeprefix(_MARK) if number == 1 else text).strip()
    return RawLine(number, stripped) if stripped else None


_PLACE = re.compile(r"lines\[(\d{1,9})\]\.?(.*)")


class BatchCreator:
    """Creates batches from input files."""

    def __init__(self, files: FileClient, batches: BatchClient, task_apis: TaskApis, *, deps: InferenceDeps) -> None:
        self._files = files
        self._batches = batches
        self._surfaces = task_apis
        self._config = deps.config
        self._fleet = deps.fleet
        self._clock = deps.clock
        self._links = deps.links

    async def make(
        self, scope: Scope, tenant: str, params: BatchRequest
    ) -> tuple[batch_pb.Batch, list[warning_pb2.Warning]]:
        """Creates the batch, durable with all its items, or a failed batch if lines are invalid.

        Returns it with warnings about fields that are not used.

        Raises INVALID_ARGUMENT naming the field, NOT_FOUND, and as `BatchClient.create`.
        """
        surface = await self._surfaces.of_endpoint(params.endpoint)
        await self._require_input(tenant, params.input_file_id)
        now, window = self._clock.utc_now(), timedelta(seconds=params.window_seconds or WINDOW_SECONDS)
        new = batch_pb.Batch(
            tenant=tenant,
            endpoint=params.endpoint,
            input_file=params.input_file_id,
            create_time=stamp_of(now),
            window_end_time=stamp_of(now + window),
            metadata=params.metadata or {},
            result_base="" if self._links is None else self._links.base_of(scope),
        )
        caller = facts_of(scope).principal.name
        lines = self._lines(scope, surface, wait_for_model=params.wait_for_model)
        try:
            batch = await self._batches.create(new, self._tasks(new, lines), caller=caller)
        except WeftError as error:
            _note(with_visible_names(error, self._fleet.view, facts_of(scope).principal), lines)
            if not lines.errors:
                raise
            # A line failed while items were created, so only the failed batch is stored.
            new.errors.extend(lines.errors)
            batch = await self._batches.create(new, _nothing(), caller=caller)
        found = unknown_fields(params)
        found += [unsupported(name, f"is unknown in line {line}; not used") for name, line in lines.unknown.items()]
        return batch, found[:MAX_NOTICES]

    async def _require_input(self, tenant: str, file_id: str) -> None:
        with naming("input_file_id"):
            file = await self._files.get(tenant, file_id)
        if file.purpose != BATCH_INPUT:
            raise invalid_field("input_file_id", f"is a file of the purpose {file.purpose!r}, not {BATCH_INPUT!r}")

    def _lines(self, scope: Scope, surface: ServedTaskApi, *, wait_for_model: bool) -> BatchLines:
        submission = SpecContext(scope=scope, field="body")
        max_depth = self._config.limits.max_json_depth

        def to_spec(raw: bytes) -> task_pb2.TaskSpec:
            spec = surface.spec(raw, submission)
            spec.wait_for_model = wait_for_model
            return spec

        return BatchLines(surface.endpoint, to_spec, self._config.batches, max_depth=max_depth)

    async def _tasks(self, new: batch_pb.Batch, lines: BatchLines) -> AsyncGenerator[batch_pb.BatchLine]:
        """Yields each line as a task, up to the first invalid one. Raises InvalidLinesError once all are validated."""
        bounds, breather = self._config.batches, EventLoopYielder()
        content = self._files.read(new.tenant, new.input_file)
        async with aclosing(content), aclosing(raw_lines(content, bounds.max_line_bytes)) as found:
            async for line in found:
                task = lines.take(line)
                if task is not None:
                    yield task
                if lines.has_enough_errors:
                    break
                await breather.yield_if_due()
        lines.require_some()
        if lines.errors:
            raise InvalidLinesError


def _note(error: WeftError, lines: BatchLines) -> None:
    """Records a store error that concerns one line as that line's error."""
    place = _PLACE.fullmatch(error.metadata.get("field", ""))
    if place is None or lines.errors:
        return
    number, field = lines.number_of(int(place[1])), place[2]
    if number:
        words = error.message.removeprefix(f"{place[0]}: ")
        lines.fail(error.reason.name.lower(), f"{field}: {words}" if field else words, number, field)


async def _nothing() -> AsyncGenerator[batch_pb.BatchLine]:
    """Yields no items."""
    none: tuple[batch_pb.BatchLine, ...] = ()
    for line in none:
        yield line
