"""A form with a file that is too large to be held (RFC 7578): its parts one after the other, as their bytes come in.

The same forms as in `gateway.intake.multipart`, and the same refusals.
"""

from collections.abc import AsyncGenerator, AsyncIterator

from gateway.config import RequestLimits
from gateway.intake.multipart import HEADERS_END, Part, malformed, part_of, too_long_head
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_VALUE_BYTES = 8 * 1024
"""Of a field that is no file."""
_CRLF = b"\r\n"


class MultipartStream:
    """The parts of one body. What is held of it at any time is one piece of it, and a boundary's length."""

    def __init__(self, pieces: AsyncIterator[bytes], boundary: bytes, limits: RequestLimits) -> None:
        self._pieces = pieces
        self._delimiter = b"\r\n--" + boundary
        self._limits = limits
        # The first boundary has no line end before it, unlike all others.
        self._held = bytearray(_CRLF)
        self._count = 0
        self._has_begun = False

    async def next_part(self) -> Part | None:
        """The head of the next part, its data empty; None: there is none. What was not read of the last one is dropped.

        Raises MALFORMED_REQUEST for what is not whole, REQUEST_TOO_LARGE for too many parts or too long headers of one.
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

    async def value(self) -> bytes:
        """The data of a part that is no file. Raises REQUEST_TOO_LARGE above MAX_VALUE_BYTES."""
        found = bytearray()
        async for piece in self.data():
            found += piece
            if len(found) > MAX_VALUE_BYTES:
                raise WeftError(Reason.REQUEST_TOO_LARGE, f"a field of the form is longer than {MAX_VALUE_BYTES} bytes")
        return bytes(found)

    async def data(self) -> AsyncGenerator[bytes]:
        """What is left of the data of this part. Raises MALFORMED_REQUEST for a body that ends within it."""
        delimiter, held = self._delimiter, self._held
        while (end := held.find(delimiter)) < 0:
            # All but what may be the beginning of a boundary.
            ready = len(held) - len(delimiter) + 1
            if ready > 0:
                yield bytes(memoryview(held)[:ready])
                del held[:ready]
            if not await self._read():
                raise malformed("the body ends within a part")
        if end:
            yield bytes(memoryview(held)[:end])
        # The boundary stays, so that whoever asks again finds the end again.
        del held[:end]

    async def _begin(self) -> None:
        self._has_begun = True
        while len(self._held) < len(self._delimiter) and await self._read():
            pass
        if not self._held.startswith(self._delimiter):
            raise malformed("the body does not begin with its boundary")

    async def _starts_with(self, mark: bytes) -> bool:
        """Whether the boundary, which is held, goes on with `mark`."""
        place = len(self._delimiter)
        while len(self._held) < place + len(mark) and await self._read():
            pass
        return self._held.startswith(mark, place)

    async def _head(self) -> bytes:
        """The headers of a part; what is held begins after them."""
        limits, begin = self._limits, len(self._delimiter)
        # From the line's end: a part without headers has nothing before the empty line.
        most = begin + limits.max_part_header_bytes + len(HEADERS_END)
        while (end := self._held.find(HEADERS_END, begin, most)) < 0:
            if len(self._held) < most and await self._read():
                continue
            if len(self._held) - begin > limits.max_part_header_bytes:
                raise too_long_head(limits)
            raise malformed("the body ends within the headers of a part")
        head = bytes(memoryview(self._held)[begin + len(_CRLF) : end])
        del self._held[: end + len(HEADERS_END)]
        await self._meet_empty_part()
        return head

    async def _meet_empty_part(self) -> None:
        """The line end before the data may be that of the boundary, where there is no data."""
        bare = self._delimiter[len(_CRLF) :]
        while len(self._held) < len(bare) and bare.startswith(self._held) and await self._read():
            pass
        if self._held.startswith(bare):
            self._held[:0] = _CRLF

    async def _drain(self) -> None:
        """What comes after the last boundary says nothing."""
        while await self._read():
            self._held.clear()

    async def _read(self) -> bool:
        """Hold one more piece; whether there was one."""
        piece = await anext(self._pieces, None)
        self._held += piece or b""
        return piece is not None
