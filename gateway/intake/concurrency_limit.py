"""How many of one kind of work run concurrently."""

from collections.abc import Generator
from contextlib import contextmanager

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


class ConcurrencyLimit:
    """A limit on how many blocks run concurrently."""

    def __init__(self, size: int, what: str) -> None:
        """`what` completes the error message, such as "files are being uploaded (max_uploads)"."""
        self._size = size
        self._what = what
        self._taken = 0

    @contextmanager
    def slot(self) -> Generator[None]:
        """Holds one of the slots. Raises RATE_LIMIT_EXCEEDED if all are taken."""
        if self._taken >= self._size:
            message = f"{self._taken} {self._what}; try again"
            raise WeftError(Reason.RATE_LIMIT_EXCEEDED, message, retry_after_seconds=1)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
