"""The processes that watch the registry, by the names that they sent, for `GetHealth`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weft.api.operations.v1 import process_service_pb2
from weft.api.registry.v1 import registry_service_pb2

MAX_LISTED = 1_000
MAX_WORD_CHARS = 255
_SERVICES = frozenset({"router", "gateway"})


class WatchingProcesses:
    """The processes with an open watch."""

    def __init__(self) -> None:
        self._open: dict[int, process_service_pb2.WatchingProcess] = {}

    @contextmanager
    def watching(self, request: registry_service_pb2.WatchRequest) -> Iterator[None]:
        """Lists the watcher during the block, if it has sent its service."""
        if request.service not in _SERVICES or len(self._open) >= MAX_LISTED:
            yield
            return
        process = process_service_pb2.WatchingProcess(
            service=request.service, host=_word(request.host), version=_word(request.version)
        )
        self._open[id(process)] = process
        try:
            yield
        finally:
            del self._open[id(process)]

    def listed(self) -> Sequence[process_service_pb2.WatchingProcess]:
        """Returns the processes, sorted by service, host and version."""
        return sorted(self._open.values(), key=lambda each: (each.service, each.host, each.version))


def _word(text: str) -> str:
    """Returns a caller's text, bounded and without control characters."""
    return "".join(character for character in text[:MAX_WORD_CHARS] if character.isprintable())
