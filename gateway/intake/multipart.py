"""Multipart forms (RFC 7578): parsed as a stream, and their fields by name."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from python_multipart.multipart import parse_options_header

from gateway.gateway_config import RequestLimits
from gateway.intake.json_guard import field_path
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.errors.validation_words import plain_words

MAX_BOUNDARY_CHARS = 70
"""Maximum of RFC 2046."""
_SHOWN_CHARS = 64
_MAX_NAME_CHARS = 256
HEADERS_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One field of a form."""

    name: str
    data: bytes
    filename: str | None = None
    """The last segment of the file's path, only for messages and its suffix; None: not a file."""
    media_type: str = "text/plain"

    def text(self) -> str:
        """Returns the value of a field that is not a file. Raises INVALID_ARGUMENT naming it."""
        if self.filename is not None:
            raise invalid_field(self.name, "must be a value, not a file")
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise invalid_field(self.name, "is not valid UTF-8") from None


def boundary_of(content_type: bytes) -> bytes:
    """Returns the boundary of a Content-Type. Raises MALFORMED_REQUEST, REQUEST_TOO_LARGE if it is too long."""
    _, options = parse_options_header(content_type)
    boundary = bytes(options.get(b"boundary", b""))
    if len(boundary) > MAX_BOUNDARY_CHARS:
        raise WeftError(
            Reason.REQUEST_TOO_LARGE, f"the boundary of the Content-Type is longer than {MAX_BOUNDARY_CHARS} characters"
        )
    if not boundary or any(byte < 0x20 or byte > 0x7E for byte in boundary):
        raise malformed("the Content-Type has no usable boundary")
    return boundary


def part_of(head: bytes, data: bytes) -> Part:
    """Returns a part with these headers. Raises MALFORMED_REQUEST."""
    headers = dict(_header(line) for line in head.split(b"\r\n"))
    kind, options = parse_options_header(headers.get(b"content-disposition", b""))
    name = _text(options.get(b"name", b""))
    if kind != b"form-data" or not 0 < len(name) <= _MAX_NAME_CHARS:
        raise malformed("a part has no name")
    filename = options.get(b"filename")
    media_type = headers.get(b"content-type", b"text/plain").partition(b";")[0].strip().lower()
    return Part(
        name=name,
        data=data,
        filename=None if filename is None else _last_segment(_text(filename, shown=_shown)),
        media_type=media_type.decode("ascii", "replace"),
    )


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not name or name != name.strip():
        raise malformed("a header of a part is malformed")
    return name.lower(), value.strip()


def _text(raw: bytes, shown: Callable[[str], str] = str) -> str:
    try:
        text = shown(raw.decode())
    except UnicodeDecodeError:
        raise malformed("a name in the body is not valid UTF-8") from None
    if not text.isprintable():
        raise malformed(f"a name in the body holds control characters: {text[:_SHOWN_CHARS]!a}")
    return text


def _shown(name: str) -> str:
    """Replaces characters without a glyph, such as the space U+202F in a screenshot's name; control characters stay."""
    kept = (each if each.isprintable() or each < "\xa0" else " " if each.isspace() else "_" for each in name)
    return "".join(kept)


def _last_segment(filename: str) -> str:
    return filename.replace("\\", "/").rpartition("/")[2]


def malformed(message: str) -> WeftError:
    """Returns the error of a body that is not a valid form."""
    return WeftError(Reason.MALFORMED_REQUEST, message)


MAX_VALUE_BYTES = 8 * 1024
"""Maximum size of a field that is not a file."""
_CRLF = b"\r\n"


class MultipartStream:
    """Streams the parts of a body. Holds one chunk and the length of a boundary in memory."""

    def __init__(self, pieces: AsyncIterator[bytes], boundary: bytes, limits: RequestLimits) -> None:
        self._pieces = pieces
        self._delimiter = b"\r\n--" + boundary
        self._limits = limits
        # The first boundary has no line end before it, unlike the others.
        self._held = bytearray(_CRLF)
        self._count = 0
        self._has_begun = False

    async def next_part(self) -> Part | None:
        """Returns the head of the next part, without data; None: no more parts. Drops unread data of the previous part.

        Raises MALFORMED_REQUEST for an incomplete form, REQUEST_TOO_LARGE for too many parts or too long headers.
        """
        if not self._has_begun:
            await self._begin()
        else:
            async for _ in self.data():
                pass
        if await self._starts_with(b"--"):
            await self._drain()
            return None
        if self._count == self._limits.max_parts:
            raise WeftError(Reason.REQUEST_TOO_LARGE, f"the body has more than {self._limits.max_parts} parts")
        if not await self._starts_with(_CRLF):
            raise malformed("a boundary is not at the end of its line")
        self._count += 1
        return part_of(await self._head(), b"")

    async def parts(self) -> list[Part]:
        """Returns the remaining parts with their data, in order. Raises as `next_part` and `data`."""
        found = []
        while (part := await self.next_part()) is not None:
            found.append(replace(part, data=b"".join([piece async for piece in self.data()])))
        return found

    async def value(self) -> bytes:
        """Returns the data of a part that is not a file. Raises REQUEST_TOO_LARGE above MAX_VALUE_BYTES."""
        found = bytearray()
        async for piece in self.data():
            found += piece
            if len(found) > MAX_VALUE_BYTES:
                raise WeftError(Reason.REQUEST_TOO_LARGE, f"a field of the form is longer than {MAX_VALUE_BYTES} bytes")
        return bytes(found)

    async def data(self) -> AsyncGenerator[bytes]:
        """Yields the remaining data of this part. Raises MALFORMED_REQUEST if the body ends within it."""
        delimiter, held = self._delimiter, self._held
        while (end := held.find(delimiter)) < 0:
            # All but a possible beginning of a boundary.
            ready = len(held) - len(delimiter) + 1
            if ready > 0:
                yield bytes(memoryview(held)[:ready])
                del held[:ready]
            if not await self._read():
                raise malformed("the body ends in the middle of a part")
        if end:
            yield bytes(memoryview(held)[:end])
        # The boundary stays, so that a second call finds the end again.
        del held[:end]

    async def _begin(self) -> None:
        self._has_begun = True
        while len(self._held) < len(self._delimiter) and await self._read():
            pass
        if not self._held.startswith(self._delimiter):
            raise malformed("the body does not begin with its boundary")

    async def _starts_with(self, mark: bytes) -> bool:
        """Whether `mark` follows the held boundary."""
        index = len(self._delimiter)
        while len(self._held) < index + len(mark) and await self._read():
            pass
        return self._held.startswith(mark, index)

    async def _head(self) -> bytes:
        """Returns the headers of a part and removes them from the buffer."""
        limits, begin = self._limits, len(self._delimiter)
        # From the line end: in a part without headers, nothing precedes the empty line.
        most = begin + limits.max_part_header_bytes + len(HEADERS_END)
        while (end := self._held.find(HEADERS_END, begin, most)) < 0:
            if len(self._held) < most and await self._read():
                continue
            if len(self._held) - begin > (limit := limits.max_part_header_bytes):
                raise WeftError(Reason.REQUEST_TOO_LARGE, f"the headers of a part are longer than {limit} bytes")
            raise malformed("the body ends within the headers of a part")
        head = bytes(memoryview(self._held)[begin + len(_CRLF) : end])
        del self._held[: end + len(HEADERS_END)]
        await self._meet_empty_part()
        return head

    async def _meet_empty_part(self) -> None:
        """Handles a part without data, of which the head and the boundary share one line end."""
        bare = self._delimiter[len(_CRLF) :]
        while len(self._held) < len(bare) and bare.startswith(self._held) and await self._read():
            pass
        if self._held.startswith(bare):
            self._held[:0] = _CRLF

    async def _drain(self) -> None:
        """Drops everything after the last boundary."""
        while await self._read():
            self._held.clear()

    async def _read(self) -> bool:
        """Reads one chunk into the buffer; returns whether there was one."""
        piece = await anext(self._pieces, None)
        self._held += piece or b""
        return piece is not None


Model = TypeVar("Model", bound=BaseModel)

_MAX_MESSAGE_CHARS = 500
LIST_MARK = "[]"
"""Suffix of a field's name that may be repeated."""


class Form:
    """The fields and files of a form, by name."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def files(self, name: str) -> list[Part]:
        """Returns the files of this name, in order. Raises INVALID_ARGUMENT for a value that is not a file."""
        found = [part for part in self._parts if part.name == name]
        if any(part.filename is None for part in found):
            raise invalid_field(name, "must be a file")
        return found

    def file(self, name: str) -> Part:
        """Returns the file of this name. Raises INVALID_ARGUMENT unless there is exactly one, and it is not empty."""
        found = self.files(name)
        if len(found) != 1:
            raise invalid_field(name, "must be one file")
        if not found[0].data:
            raise invalid_field(name, "must not be empty")
        return found[0]

    def values(self, name: str, known: frozenset[str]) -> list[str]:
        """Returns the values of a field that may be repeated. Raises INVALID_ARGUMENT for an unknown value."""
        found = [part.text() for part in self._parts if part.name in (name, name + LIST_MARK)]
        if not known.issuperset(found):
            raise invalid_field(name, f"must be one of {', '.join(sorted(known))}")
        return found

    def read(self, model: type[Model], *, besides: frozenset[str]) -> Model:
        """Returns the fields, each at most once, as a request model; `besides`: names of files and repeated fields.

        Raises INVALID_ARGUMENT naming the field.
        """
        values: dict[str, str] = {}
        for part in self._parts:
            name = part.name
            if name in besides or name.removesuffix(LIST_MARK) in besides:
                continue
            if name in values and not name.endswith(LIST_MARK):
                raise invalid_field(name, "is given twice")
            values[name] = part.text()
        try:
            return model.model_validate_strings(values)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise invalid_field(field_path(found["loc"]) or "body", plain_words(found["msg"])[:_MAX_MESSAGE_CHARS])
