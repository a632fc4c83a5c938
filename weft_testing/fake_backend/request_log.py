"""What reaches the fake, request by request, in a file that survives its SIGKILL: for whoever checks histories."""

import os
import time
from pathlib import Path

import msgspec

REQUEST_ID_HEADER = "x-request-id"


class RequestLog:
    """Appends one line of JSON per event, each in one write without a buffer."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be opened."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, headers: dict[str, str]) -> None:
        """`begun`, `finished`, `cancelled` or `failed`, with the id that the runner gave the request."""
        line = {
            "event": event,
            "request_id": headers.get(REQUEST_ID_HEADER, ""),
            "at": time.time(),
            "pid": os.getpid(),
        }
        os.write(self._descriptor, msgspec.json.encode(line) + b"\n")
