"""Forms with files (RFC 7578), from a body that is whole and within its limit."""

from dataclasses import dataclass

from python_multipart.multipart import parse_options_header

from gateway.config import RequestLimits
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

_SHOWN_CHARS = 64
_MAX_NAME_CHARS = 256
HEADERS_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One field of a form."""

    name: str
    data: bytes
    filename: str | None = None
    """The last segment of what the caller's file is called, for messages and its suffix only; None: no file."""
    media_type: str = "text/plain"

    def text(self) -> str:
        """The value of a field that is no file. Raises INVALID_ARGUMENT naming it."""
        if self.filename is not None:
            raise invalid_field(self.name, "must be a value, not a file")
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise invalid_field(self.name, "is not valid UTF-8") from None


def boundary_of(content_type: bytes, limits: RequestLimits) -> bytes:
    """The boundary that a Content-Type names. Raises MALFORMED_REQUEST, REQUEST_TOO_LARGE for one too long."""
    _, options = parse_options_header(content_type)
    boundary = bytes(options.get(b"boundary", b""))
    if len(boundary) > limits.max_boundary_chars:
        limit = limits.max_boundary_chars
        raise WeftError(Reason.REQUEST_TOO_LARGE, f"the boundary of the Content-Type is longer than {limit} characters")
    if not boundary or any(byte < 0x20 or byte > 0x7E for byte in boundary):
        raise malformed("the Content-Type has no usable boundary")
    return boundary


def parts_of(raw: bytes, boundary: bytes, limits: RequestLimits) -> list[Part]:
    """The parts of `raw`, in order.

    Raises MALFORMED_REQUEST for what is not whole, REQUEST_TOO_LARGE for too many parts or too long headers of one.
    """
    delimiter = b"\r\n--" + boundary
    if not raw.startswith(delimiter[2:]):
        raise malformed("the body does not begin with its boundary")
    parts: list[Part] = []
    place = len(delimiter) - 2
    while not raw.startswith(b"--", place):
        if len(parts) == limits.max_parts:
            raise WeftError(Reason.REQUEST_TOO_LARGE, f"the body has more than {limits.max_parts} parts")
        if not raw.startswith(b"\r\n", place):
            raise malformed("a boundary is not at the end of its line")
        # From the line's end: a part without headers has nothing before the empty line.
        head_end = raw.find(HEADERS_END, place, place + limits.max_part_header_bytes + len(HEADERS_END))
        if head_end < 0:
            raise _no_head(raw, place, limits)
        data_begin = head_end + len(HEADERS_END)
        # The line end before the data may be that of the delimiter, where there is no data.
        data_end = raw.find(delimiter, data_begin - 2)
        if data_end < 0:
            raise malformed("the body ends within a part")
        parts.append(part_of(raw[place + 2 : head_end], raw[data_begin : max(data_begin, data_end)]))
        place = data_end + len(delimiter)
    return parts


def part_of(head: bytes, data: bytes) -> Part:
    """A part with these headers. Raises MALFORMED_REQUEST."""
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
        filename=None if filename is None else _last_segment(_text(filename)),
        media_type=media_type.decode("ascii", "replace"),
    )


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not name or name != name.strip():
        raise malformed("a header of a part is malformed")
    return name.lower(), value.strip()


def _text(raw: bytes) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise malformed("a name in the body is not valid UTF-8") from None
    if not text.isprintable():
        raise malformed(f"a name in the body holds control characters: {text[:_SHOWN_CHARS]!a}")
    return text


def _last_segment(filename: str) -> str:
    return filename.replace("\\", "/").rpartition("/")[2]


def too_long_head(limits: RequestLimits) -> WeftError:
    """What is said of a part with more headers than one may have."""
    limit = limits.max_part_header_bytes
    return WeftError(Reason.REQUEST_TOO_LARGE, f"the headers of a part are longer than {limit} bytes")


def _no_head(raw: bytes, place: int, limits: RequestLimits) -> WeftError:
    if len(raw) - place > limits.max_part_header_bytes:
        return too_long_head(limits)
    return malformed("the body ends within the headers of a part")


def malformed(message: str) -> WeftError:
    """What is said of a body that is no such form."""
    return WeftError(Reason.MALFORMED_REQUEST, message)
