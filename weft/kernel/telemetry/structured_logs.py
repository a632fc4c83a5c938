"""Structured logs, and the trace context of requests.

Logs go to stderr, as text on a terminal and JSON lines otherwise, or to a bounded file. The trace context is W3C
`traceparent`: the caller's or a new one is forwarded to the backend, so that all log lines of a request have the same
trace id on every hop.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from random import getrandbits
from typing import Any, Literal, TextIO, cast

from weft.kernel.telemetry.log_threshold import LogThreshold, structlog
from weft.kernel.text.json_lines import encode_json

TRACEPARENT = "traceparent"

_TRACEPARENT = re.compile(
    "(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<rest>-[ -~]{0,256})?"
)


FOLLOW_SECONDS = 1.0
"""Interval of checks whether the log file was moved, removed or truncated."""


class BoundedLogFile:
    """A log file that is rotated to `<name>.1` at its size limit, and recreated after it was moved or removed.

    Failed writes, for example on a full disk, are dropped without an error. Their number is logged once writes succeed.
    """

    def __init__(self, path: Path, max_bytes: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError if the file cannot be opened."""
        self._path = path
        self._max_bytes = max_bytes
        self._monotonic = monotonic
        self._follow_at = 0.0
        self.dropped = 0
        """Writes dropped since the last one that succeeded."""
        self._torn = False
        """Whether the file ends with a part of a dropped write."""
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._identity = os.fstat(self._file.fileno())
        self._size = self._identity.st_size

    def _follow(self) -> None:
        """Reopens the file if logrotate or a user has moved or removed it. If that fails, keeps the old one open."""
        found = None
        with suppress(OSError):
            found = self._path.stat()
        if found is not None and os.path.samestat(found, self._identity):
            # It may have been truncated.
            self._size = found.st_size
            return
        before = self._file
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
            before.close()

    def write(self, text: str) -> int:
        """Appends `text`, one or more whole lines, which are never split between files."""
        try:
            now = self._monotonic()
            if now >= self._follow_at or self._size > self._max_bytes:
                self._follow_at = now + FOLLOW_SECONDS
                self._follow()
            if self._size > self._max_bytes:
                self._begin_anew()
            if self.dropped:
                note = f'{{"event": "log lines were dropped", "count": {self.dropped}}}\n'
                self._append(f"\n{note}" if self._torn else note)
                self.dropped = 0
            self._append(text)
        except OSError:
            self.dropped += 1
        return len(text)

    def _append(self, text: str) -> None:
        rest = text.encode("utf-8", "backslashreplace")
        while rest:
            written = self._file.write(rest)
            self._size += written
            rest = rest[written:]
            self._torn = bool(rest)

    def _begin_anew(self) -> None:
        full = self._file
        with suppress(FileNotFoundError):  # an earlier attempt has already moved it
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._open()
        full.close()

    def flush(self) -> None:
        """Does nothing: writes are unbuffered."""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def configure_logging(
    service: str,
    *,
    level: str = "info",
    file: TextIO | BoundedLogFile | None = None,
    form: Literal["json", "text"] | None = None,
) -> None:
    """Sends this process's logs to `file` (default: stderr), with `service` on every line.

    `form` defaults to text if stderr is a terminal, and JSON lines otherwise.
    """
    output = sys.stderr if file is None else file
    is_terminal = file is None and sys.stderr.isatty()
    pretty = is_terminal if form is None else form == "text"
    threshold = logging.getLevelNamesMapping()[level.upper()]
    # No local variables in tracebacks: they contain prompts and keys.
    renderers: list[structlog.typing.Processor] = (
        [
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=is_terminal, exception_formatter=structlog.dev.plain_traceback),
        ]
        if pretty
        else [_json_line]
    )
    structlog.configure(
        processors=[LogThreshold(level), *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", output)),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(stream=sys.stderr, level=max(threshold, logging.WARNING), format="%(message)s")


@contextmanager
def discarded_logs() -> Iterator[None]:
    """Drops log lines while the block runs: for a command that runs parts of services and reports what it finds."""
    before = structlog.get_config()
    structlog.configure(processors=[_dropped])
    try:
        yield
    finally:
        structlog.configure(**before)


def _dropped(_logger: Any, _method: str, _event: structlog.typing.EventDict) -> str:
    raise structlog.DropEvent


def _json_line(logger: Any, method: str, event: structlog.typing.EventDict) -> str:
    """Returns an event as a line of JSON, with level, time and bound values.

    Replaces six processors, which took half of the time of a line, because each request writes one. The faster encoder
    only gets plain values: of a dataclass it would write every field, including secrets that its `repr` omits.
    """
    event = structlog.contextvars.merge_contextvars(logger, method, event)
    event["level"] = _ERROR if method == "exception" else method
    event["timestamp"] = f"{datetime.now(UTC).isoformat().removesuffix('+00:00')}Z"
    if "exc_info" in event:
        event = dict(_TRACEBACKS(logger, method, event))
    if _PLAIN.issuperset(map(type, event.values())):
        try:
            return encode_json(event).decode()
        except (UnicodeEncodeError, OverflowError):
            return str(_RENDERER(logger, method, event))
    return str(_RENDERER(logger, method, event))


_ERROR = "error"
_PLAIN = frozenset({str, int, float, bool, type(None)})
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
_RENDERER = structlog.processors.JSONRenderer()


def valid_traceparent(header: str | None) -> str | None:
    """Returns `header` if it is a well-formed traceparent, otherwise None."""
    found = None if header is None else _TRACEPARENT.fullmatch(header)
    # Version 00 has these four parts; a later one may have more.
    return None if found is None or (found["version"] == "00" and found["rest"]) else header


def new_traceparent() -> str:
    """Returns a new sampled traceparent."""
    return f"00-{new_trace_id():032x}-{new_span_id():016x}-01"


def new_trace_id() -> int:
    """Returns a random trace id; 0 is not a valid one."""
    return getrandbits(128) or 1


def new_span_id() -> int:
    """Returns a random span id; 0 is not a valid one."""
    return getrandbits(64) or 1


def trace_id_of(traceparent: str) -> str:
    """Returns the trace id in a traceparent."""
    return traceparent.split("-", 2)[1]


def carried_traceparent(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Returns the valid traceparent in the metadata of a call; empty if there is none."""
    found = next((value for key, value in metadata or () if key == TRACEPARENT), "")
    return valid_traceparent(str(found)) or ""


def traceparent_of(metadata: Mapping[str, str]) -> str:
    """Returns the caller's traceparent from metadata or headers, or a new one."""
    return valid_traceparent(metadata.get(TRACEPARENT)) or new_traceparent()
