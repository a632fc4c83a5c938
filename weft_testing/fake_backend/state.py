"""Records of the requests that the fake received: counters, the last request, and a log file."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

REQUEST_ID_HEADER = "x-request-id"


class RequestLog:
    """Appends one line of JSON per event, each in one unbuffered write."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._opened_at = time.time()

    def write(self, event: str, headers: dict[str, str]) -> None:
        """Writes `begun`, `finished`, `cancelled` or `failed`, with the runner's id of the request."""
        line = {
            "event": event,
            "request_id": headers.get(REQUEST_ID_HEADER, ""),
            "at": time.time(),
            "pid": os.getpid(),
            # Systems use the ids of ended processes again.
            "opened_at": self._opened_at,
        }
        os.write(self._descriptor, msgspec.json.encode(line) + b"\n")


MAX_RECORDED_BODY_BYTES = 256 * 1024


class FakeState(msgspec.Struct, kw_only=True):
    """Response of GET /fake/state. A request is active until it is finished, cancelled or broken by the fake."""

    pid: int
    grandchild_pid: int | None = None
    active_requests: int = 0
    """Unfinished requests, including those that wait for a slot."""
    busy_slots: int = 0
    requests_started: int = 0
    requests_finished: int = 0
    """Completely answered requests, with any status."""
    requests_cancelled: int = 0
    """Requests whose client disconnected first."""
    tokens_sent: int = 0
    """Tokens generated so far, over all requests."""
    prompt_tokens: int = 0
    """Prompt tokens so far, including cached ones."""
    cached_prompt_tokens: int = 0
    route_calls: list[str] = []
    """Calls of a dialect's additional routes, such as `POST /flush_cache`."""
    last_request_body: Any = None
    """The parsed body; None if it was larger than MAX_RECORDED_BODY_BYTES."""
    last_request_headers: dict[str, str] = {}
    """Headers by lower-case name."""
    aborted_request_ids: list[str] = []
    """Ids in vLLM's POST /abort_requests; "*" for all requests."""
    remote_calls: list[str] = []
    """Methods of vLLM's POST /collective_rpc."""


class Outcome:
    """How a request ends; set before the fake breaks its connection."""

    def __init__(self) -> None:
        self.broken_by_fake = False


class Ledger:
    """Counts requests. One per process, used only on the event loop."""

    def __init__(self, log: RequestLog | None = None) -> None:
        self.state = FakeState(pid=os.getpid())
        self._log = log

    @contextmanager
    def request(self, headers: dict[str, str], body: Any, body_bytes: int) -> Iterator[Outcome]:
        """Counts one request from its arrival to its end."""
        state, outcome = self.state, Outcome()
        state.requests_started += 1
        state.active_requests += 1
        state.last_request_headers = headers
        state.last_request_body = body if body_bytes <= MAX_RECORDED_BODY_BYTES else None
        self._write("begun", headers)
        end = "failed"
        try:
            yield outcome
        except (asyncio.CancelledError, ConnectionError):
            if not outcome.broken_by_fake:
                state.requests_cancelled += 1
                end = "cancelled"
            raise
        else:
            state.requests_finished += 1
            end = "finished"
        finally:
            state.active_requests -= 1
            self._write(end, headers)

    def _write(self, event: str, headers: dict[str, str]) -> None:
        if self._log is not None:
            self._log.write(event, headers)
