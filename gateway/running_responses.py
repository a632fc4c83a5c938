"""Which responses run on one gateway: kept over its configurations, and known before the Responses API is imported."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


class RunningResponse(Protocol):
    """A response being generated."""

    tenant: str
    response_id: str

    @property
    def is_settled(self) -> bool:
        """Whether it was cancelled and has been stored."""
        ...


Response = TypeVar("Response", bound=RunningResponse)


class RunningResponses(Generic[Response]):
    """The running responses of one gateway, by id."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._running: dict[str, Response] = {}

    def find(self, tenant: str, response_id: str) -> Response | None:
        """Returns a running response of the tenant; None: it does not run on this gateway."""
        found = self._running.get(response_id)
        return found if found is not None and found.tenant == tenant and not found.is_settled else None

    def require_room(self) -> None:
        """Raises RATE_LIMIT_EXCEEDED if the maximum number is running."""
        if len(self._running) >= self._max_running:
            message = f"more than {self._max_running} responses are being streamed (gateway.max_running_responses)"
            raise WeftError(Reason.RATE_LIMIT_EXCEEDED, message)

    @contextmanager
    def joined(self, running: Response) -> Generator[None]:
        """Registers `running` while the block runs. Raises RATE_LIMIT_EXCEEDED above the maximum."""
        self.require_room()
        self._running[running.response_id] = running
        try:
            yield
        finally:
            del self._running[running.response_id]
