"""Files of batches: the port to the file store and its values.

Every method takes the tenant: another tenant's file is NOT_FOUND. Every method raises SERVICE_UNAVAILABLE when the
store cannot be reached.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

FILE_PREFIX = "file"
MAX_FILE_NAME_CHARS = 255
MAX_PIECE_BYTES = 1024 * 1024
"""Size limit of one read or write."""
BATCH_INPUT = "batch"
BATCH_OUTPUT = "batch_output"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """What is known of a file. Times are UTC."""

    id: str
    tenant: str
    name: str
    purpose: str
    """BATCH_INPUT or BATCH_OUTPUT."""
    size: int
    """Bytes."""
    created_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """What a file is to be."""

    tenant: str
    name: str
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePage:
    """Some files, the newest first."""

    files: Sequence[StoredFile]
    has_more: bool


class FilePort(Protocol):
    """The file store."""

    async def save(self, new: NewFile, content: AsyncIterator[bytes]) -> StoredFile:
        """Keep a file; return once it is durable. One whose content breaks off is not kept.

        Raises REQUEST_TOO_LARGE, TOO_MANY_RESOURCES where the tenant keeps all it may, and what `content` raises.
        """
        ...

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        """What is known of it. Raises NOT_FOUND."""
        ...

    async def list_page(self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100) -> FilePage:
        """Files of a purpose (empty: of all) that are older than one (empty: from the newest on). Raises NOT_FOUND."""
        ...

    def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        """Yields the content in chunks. Raises NOT_FOUND."""
        ...

    async def delete(self, tenant: str, file_id: str) -> None:
        """Forget it. Raises NOT_FOUND."""
        ...


def file_not_found(file_id: str) -> WeftError:
    """NOT_FOUND for a file that is unknown or another tenant's."""
    return WeftError(Reason.NOT_FOUND, f"no file {file_id} exists")
