"""How many of a kind are under way at once."""

from collections.abc import Generator
from contextlib import contextmanager

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class Room:
    """Places, of which each is held for as long as a block runs."""

    def __init__(self, size: int, what: str) -> None:
        """`what` names the setting and the things, such as "files are taken in at once (max_uploads)"."""
        self._size = size
        self._what = what
        self._taken = 0

    @contextmanager
    def one(self) -> Generator[None]:
        """Hold a place. Raises RATE_LIMIT_EXCEEDED where there is none."""
        if self._taken >= self._size:
            message = f"{self._taken} {self._what}; try again"
            raise WeftError(Reason.RATE_LIMIT_EXCEEDED, message, retry_after_seconds=1)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
