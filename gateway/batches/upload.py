"""A file that is sent in a form: handed on as it comes in, and never held as a whole."""

from collections.abc import AsyncGenerator

from gateway.intake.multipart import Part
from gateway.intake.multipart_stream import MultipartStream
from weft.durable.files import BATCH_INPUT, MAX_FILE_NAME_CHARS
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

FORM_BYTES = 64 * 1024
"""What a form may hold besides its file."""


class FileUpload:
    """The one file of a form, with the purpose `batch`. Other fields are accepted and not used."""

    def __init__(self, form: MultipartStream, *, max_bytes: int) -> None:
        self._form = form
        self._max_bytes = max_bytes
        self._purposes = 0
        self.failure: WeftError | None = None
        """Why the content broke off, whoever read it."""

    async def name(self) -> str:
        """What the file is called. Raises INVALID_ARGUMENT naming what is wrong up to where it begins."""
        while (part := await self._form.next_part()) is not None:
            if part.name == "file":
                return _name_of(part)
            await self._take(part)
        raise invalid_field("file", "must be one file")

    async def content(self) -> AsyncGenerator[bytes]:
        """What is in the file. Ends once the whole form is as it should be, and raises what is wrong with it."""
        try:
            async for piece in self._file():
                yield piece
            while (part := await self._form.next_part()) is not None:
                if part.name == "file":
                    raise invalid_field("file", "must be one file")
                await self._take(part)
            if not self._purposes:
                raise invalid_field("purpose", f"must be {BATCH_INPUT!r}")
        except WeftError as error:
            self.failure = error
            raise

    async def _file(self) -> AsyncGenerator[bytes]:
        size = 0
        async for piece in self._form.data():
            size += len(piece)
            if size > self._max_bytes:
                raise WeftError(Reason.REQUEST_TOO_LARGE, f"the file is larger than {self._max_bytes} bytes")
            yield piece
        if not size:
            raise invalid_field("file", "must not be empty")

    async def _take(self, part: Part) -> None:
        """A field beside the file."""
        value = Part(name=part.name, data=await self._form.value(), filename=part.filename)
        if part.name != "purpose":
            return
        self._purposes += 1
        if self._purposes > 1:
            raise invalid_field("purpose", "is given twice")
        if value.text() != BATCH_INPUT:
            raise invalid_field("purpose", f"must be {BATCH_INPUT!r}: files are for batches here")


def _name_of(part: Part) -> str:
    if part.filename is None:
        raise invalid_field("file", "must be a file")
    if not 0 < len(part.filename) <= MAX_FILE_NAME_CHARS:
        raise invalid_field("file", f"must have a name of 1 to {MAX_FILE_NAME_CHARS} characters")
    return part.filename
