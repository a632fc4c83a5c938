"""The lines of an input file: found, read, and checked until too many of them are wrong."""

from array import array
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from gateway.batches.chunks import Breather
from gateway.config import BatchEdgeConfig
from gateway.intake.json_guard import require_strict_json
from weft.api.router.v1 import task_pb2
from weft.durable.batches import MAX_CUSTOM_ID_CHARS, MAX_LINE_ERRORS, BatchLine, LineError
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason

_MARK = b"\xef\xbb\xbf"
"""What some editors begin a file with."""
_DIGEST_BYTES = 16
_SLICE_BYTES = 64 * 1024
"""Of a file that are looked through at once."""
_MAX_MESSAGE_CHARS = 500
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
ToSpec = Callable[[bytes], task_pb2.TaskSpec]
"""A body as a task. Raises the WeftError that the live route would raise."""


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line, not empty."""

    number: int
    """Counted from 1, empty ones too."""
    text: bytes | None
    """None: it is longer than a line may be."""


class WrongLinesError(WeftError):
    """Lines are wrong, and `BatchLines.errors` has them: nothing of the batch is kept."""

    def __init__(self) -> None:
        super().__init__(Reason.INVALID_ARGUMENT, "lines of the input file are wrong")


async def raw_lines(content: AsyncIterable[bytes], max_line_bytes: int) -> AsyncGenerator[RawLine]:
    """The lines of a file that are not empty. What is held is one line and one piece of the file."""
    number, begun, is_too_long = 1, bytearray(), False
    async with aclosing(_slices(content)) as slices:
        async for piece in slices:
            *ends, rest = piece.split(b"\n")
            for end in ends:
                # Many lines of nothing are no work for those who take the lines, and little here.
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
    """The lines of one batch as tasks.

    Once a line is wrong, the others are only looked at for what is wrong with them.
    """

    def __init__(self, endpoint: str, to_spec: ToSpec, config: BatchEdgeConfig, *, max_depth: int) -> None:
        self.errors: list[LineError] = []
        """What is wrong, at most MAX_LINE_ERRORS."""
        self._endpoint = endpoint
        self._to_spec = to_spec
        self._config = config
        # The line is one level around the body.
        self._max_depth = max_depth + 1
        self._ids: set[bytes] = set()
        self._numbers = array("L")
        self._is_full = False

    def number_of(self, place: int) -> int:
        """The number of the line that was the `place`-th task, counted from 0; 0 where there was none."""
        return self._numbers[place] if 0 <= place < len(self._numbers) else 0

    def take(self, line: RawLine) -> BatchLine | None:
        """A line as a task; None: something is wrong, here or before. Raises what is not the line's fault."""
        if len(self._numbers) == self._config.max_lines:
            self._is_full = True
            self.fail("too_many_tasks", f"a batch has at most {self._config.max_lines} requests", line.number)
            return None
        self._numbers.append(line.number)
        if line.text is None:
            limit = self._config.max_line_bytes
            self.fail("line_too_long", f"the line is longer than {limit} bytes", line.number)
            return None
        members = self._members(line.text, line.number)
        return None if members is None else self._task(members, line.number)

    def fail(self, code: str, message: str, number: int = 0, field: str = "") -> None:
        """Note that something is wrong with a line; 0: with the file."""
        if len(self.errors) < MAX_LINE_ERRORS:
            self.errors.append(LineError(code=code, message=message[:_MAX_MESSAGE_CHARS], line=number, field=field))

    @property
    def has_enough_errors(self) -> bool:
        """Whether it is of no use to look on."""
        return self._is_full or len(self.errors) >= MAX_LINE_ERRORS

    def require_some(self) -> None:
        """Note that there are no lines, where there are none."""
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

    def _task(self, members: Members, number: int) -> BatchLine | None:
        count = len(self.errors)
        custom_id = self._custom_id(members, number)
        self._require(members, "method", "POST", "invalid_method", number)
        self._require(members, "url", self._endpoint, "invalid_url", number)
        if "body" not in members:
            self.fail("missing_required_parameter", "body: Field required", number, "body")
        if len(self.errors) > count or "body" not in members:
            return None
        try:
            spec = self._to_spec(bytes(members["body"]))
        except WeftError as error:
            if error.reason not in _FAULTS_OF_CALLERS:
                raise
            self._refused(error, number)
            return None
        return None if self.errors else BatchLine(custom_id=custom_id, spec=spec)

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
        """The value of a member; None: it is wrong, and noted."""
        if name not in members:
            self.fail("missing_required_parameter", f"{name}: Field required", number, name)
            return None
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(members[name], type=str)
        self.fail("invalid_type", f"{name}: Input should be a valid string", number, name)
        return None


async def _slices(content: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """The same bytes, so few at a time that others have their turn even where all of them are line ends."""
    breather = Breather()
    async for piece in content:
        for start in range(0, len(piece), _SLICE_BYTES):
            yield piece[start : start + _SLICE_BYTES]
            await breather.breathe()


def _line(number: int, text: bytes | bytearray, most: int, *, is_too_long: bool) -> RawLine | None:
    if is_too_long or len(text) > most:
        return RawLine(number, None)
    stripped = bytes(text.removeprefix(_MARK) if number == 1 else text).strip()
    return RawLine(number, stripped) if stripped else None
