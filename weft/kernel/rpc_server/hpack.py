"""Headers of HTTP/2 as their sender compresses them (HPACK, RFC 7541). Pure.

One decoder belongs to one connection, because a header that came once may be named by a number later.
"""

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

Header = tuple[bytes, bytes]
Headers = tuple[Header, ...]

TABLE_BYTES = 4_096
"""Size of the table of headers that have come: the protocol's default, which this end does not change."""
MAX_KEPT_BLOCKS = 64
"""Blocks whose headers are kept: those of one sender's calls are the same bytes again and again."""
_ENTRY_BYTES = 32
_MAX_INTEGER = 1 << 24
_END_OF_STRING = 256
_STATIC: Headers = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)
_LENGTHS = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b08060606"
    "0505050606060606060607080f060c0a0d06070707070707070707070707070707070707070707070807080d130d0e06"
    "0f05060506050606060507070606060506070605050607070707070f0b0e0d1c14161414161616171617171717171817"
    "181816171817171717151617161717181615141616171715171616181516171715151615171617171416161617161617"
    "1a1a1413161716191a1a1a1b1b1a181913151a1b1b1a1b1815151a1a1c1b1b1b14181415161515171616191918181a17"
    "1a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)
"""Bits of the code of each byte, and of the end of a string. The codes are canonical: lengths alone define them."""


class HpackError(ValueError):
    """A block that no sender of headers makes, or one that is too large."""


def _codes() -> Mapping[tuple[int, int], int]:
    """Returns the symbols by length and value of their codes."""
    found, code, length = {}, 0, 0
    for symbol in sorted(range(len(_LENGTHS)), key=lambda each: (_LENGTHS[each], each)):
        code <<= _LENGTHS[symbol] - length
        length = _LENGTHS[symbol]
        found[length, code] = symbol
        code += 1
    return MappingProxyType(found)


_SYMBOLS = _codes()
_MIN_CODE_BITS, _MAX_CODE_BITS, _MAX_PADDING_BITS = min(_LENGTHS), max(_LENGTHS), 7


def text_of(data: bytes) -> bytes:
    """Returns a string from its Huffman code. Raises HpackError."""
    found, code, length = bytearray(), 0, 0
    for byte in data:
        for place in range(7, -1, -1):
            code, length = code << 1 | byte >> place & 1, length + 1
            if length < _MIN_CODE_BITS:
                continue
            symbol = _SYMBOLS.get((length, code))
            if symbol is None:
                if length >= _MAX_CODE_BITS:
                    raise HpackError("no such code")
                continue
            if symbol == _END_OF_STRING:
                raise HpackError("a string has the code of its end")
            found.append(symbol)
            code = length = 0
    # The rest of the last byte is filled with the first bits of that code, which are ones.
    if length > _MAX_PADDING_BITS or code != (1 << length) - 1:
        raise HpackError("a string ends within a code")
    return bytes(found)


class HeaderDecoder:
    """Decodes the blocks of one connection, in their order."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of the headers of one block, decoded."""
        self._max_bytes = max_bytes
        self._table: deque[Header] = deque()
        """The newest first."""
        self._size = 0
        self._limit = TABLE_BYTES
        self._kept: dict[bytes, Headers] = {}
        """Headers by blocks that changed no table, since the table was changed last."""

    def decode(self, block: bytes) -> Headers:
        """Returns the headers of a block. Raises HpackError; the connection cannot go on then."""
        kept = self._kept.get(block)
        if kept is not None:
            return kept
        found: list[Header] = []
        place, size, is_changed = 0, 0, False
        while place < len(block):
            first = block[place]
            if first & 0x80:
                index, place = _integer(block, place, 7)
                header = self._entry(index)
            elif first & 0xE0 == 0x20:
                limit, place = _integer(block, place, 5)
                if found or limit > TABLE_BYTES:
                    raise HpackError("a change of the table's size that is not allowed")
                self._limit, is_changed = limit, True
                self._shrink()
                continue
            else:
                is_added = bool(first & 0x40)
                header, place = self._literal(block, place, 6 if is_added else 4)
                if is_added:
                    self._add(header)
                    is_changed = True
            size += len(header[0]) + len(header[1]) + _ENTRY_BYTES
            if size > self._max_bytes:
                raise HpackError(f"headers are larger than {self._max_bytes} bytes")
            found.append(header)
        headers = tuple(found)
        if is_changed:
            self._kept.clear()
        elif len(self._kept) < MAX_KEPT_BLOCKS:
            self._kept[block] = headers
        return headers

    def _literal(self, block: bytes, place: int, bits: int) -> tuple[Header, int]:
        index, place = _integer(block, place, bits)
        if index:
            name = self._entry(index)[0]
        else:
            name, place = self._string(block, place)
        value, place = self._string(block, place)
        return (name, value), place

    def _string(self, block: bytes, place: int) -> tuple[bytes, int]:
        if place >= len(block):
            raise HpackError("a block ends within a header")
        is_coded = bool(block[place] & 0x80)
        length, place = _integer(block, place, 7)
        end = place + length
        if end > len(block):
            raise HpackError("a block ends within a string")
        text = block[place:end]
        return (text_of(text) if is_coded else text), end

    def _entry(self, index: int) -> Header:
        if 0 < index <= len(_STATIC):
            return _STATIC[index - 1]
        index -= len(_STATIC) + 1
        if not 0 <= index < len(self._table):
            raise HpackError("no such header in the table")
        return self._table[index]

    def _add(self, header: Header) -> None:
        self._table.appendleft(header)
        self._size += len(header[0]) + len(header[1]) + _ENTRY_BYTES
        self._shrink()

    def _shrink(self) -> None:
        while self._size > self._limit:
            name, value = self._table.pop()
            self._size -= len(name) + len(value) + _ENTRY_BYTES


def _integer(block: bytes, place: int, bits: int) -> tuple[int, int]:
    """Returns a number that begins in the last bits of a byte, and the place after it."""
    most = (1 << bits) - 1
    value = block[place] & most
    place += 1
    if value < most:
        return value, place
    shift = 0
    while place < len(block):
        byte = block[place]
        value += (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if value > _MAX_INTEGER:
            break
        if not byte & 0x80:
            return value, place
    raise HpackError("a number that does not end, or is too large")


def literal(name: bytes, value: bytes) -> bytes:
    """Returns a header that no table keeps; `name` in lower case."""
    return b"\x00" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    """Returns the length of a string that is not Huffman-coded."""
    left = len(text)
    if left < 0x7F:
        return bytes((left,))
    left -= 0x7F
    found = bytearray(b"\x7f")
    while left >= 0x80:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    found.append(left)
    return bytes(found)
