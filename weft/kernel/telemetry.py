"""Structured logs, and the trace context that travels with every request.

Logs go to stderr, pretty on a terminal and JSON lines otherwise, or to a bounded file. The trace context is W3C
`traceparent`: a caller's is carried on to the backend, a missing one is made up at the edge, so that every log line of
a request has the same trace id on every hop.
"""

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import getrandbits
from typing import Any, Literal, TextIO, cast

import msgspec

from weft.kernel.log_threshold import LogThreshold, structlog

TRACEPARENT = "traceparent"

_TRACEPARENT = re.compile(
    "(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<rest>-.{0,256})?"
)
_TRACE_ID_BITS, _SPAN_ID_BITS = 128, 64


class BoundedLogFile:
    """A log file that is rotated to `<name>.1` at its size limit, and made again once it was moved or removed.

    Writers get no error for a full or broken disk: failed writes are dropped, and their number is written once the file
    can be written again.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises OSError when the file cannot be opened."""
        self._path = path
        self._max_bytes = max_bytes
        self.dropped = 0
        """Writes that were dropped since the last one that succeeded."""
        self._torn = False
        """Whether the file ends with a part of a dropped write."""
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._identity = os.fstat(self._file.fileno())
        self._size = self._identity.st_size

    def _follow(self) -> None:
        """Open the file again if its path names another one or none: logrotate, or a user, has moved or removed it.

        Without a new file, writes go on to the old one.
        """
        found = None
        with suppress(OSError):
            found = self._path.stat()
        if found is not None and os.path.samestat(found, self._identity):
            # Somebody may have emptied it.
            self._size = found.st_size
            return
        before = self._file
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
            before.close()

    def write(self, text: str) -> int:
        """Append `text`, one or more whole lines; they are never split between files."""
        try:
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
        with suppress(FileNotFoundError):  # an earlier try got no further than this
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._open()
        full.close()

    def flush(self) -> None:
        """Does nothing: writes are unbuffered."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def configure_logging(
    service: str,
    *,
    level: str = "info",
    file: TextIO | BoundedLogFile | None = None,
    form: Literal["json", "text"] | None = None,
) -> None:
    """Send this process's logs to `file` (default: stderr); `service` is on every line.

    `form` None: text when that is a terminal, JSON lines otherwise.
    """
    output = sys.stderr if file is None else file
    is_terminal = file is None and sys.stderr.isatty()
    pretty = is_terminal if form is None else form == "text"
    threshold = logging.getLevelNamesMapping()[level.upper()]
    # Never local variables: they hold prompts and keys.
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
        # What is written may change while the process runs: see `LogThreshold`.
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", output)),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(stream=sys.stderr, level=max(threshold, logging.WARNING), format="%(message)s")


def _json_line(logger: Any, method: str, event: structlog.typing.EventDict) -> str:
    """Returns an event as a line of JSON, with the level, the time and what is bound for the process.

    One processor in place of six: each request writes a line, and the chain took half of its time. The faster encoder
    gets plain values only: of a dataclass it would write every field, also those that hold secrets and that its `repr`
    leaves out.
    """
    event = structlog.contextvars.merge_contextvars(logger, method, event)
    event["level"] = _ERROR if method == "exception" else method
    event["timestamp"] = f"{datetime.now(UTC).replace(tzinfo=None).isoformat()}Z"
    if "exc_info" in event:
        event = dict(_TRACEBACKS(logger, method, event))
    if _PLAIN.issuperset(map(type, event.values())):
        with suppress(UnicodeEncodeError, OverflowError):
            return _encode(event).decode()
    return str(_RENDERER(logger, method, event))


_ERROR = "error"
_PLAIN = frozenset({str, int, float, bool, type(None)})
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
_RENDERER = structlog.processors.JSONRenderer()
_encode = msgspec.json.Encoder().encode


def valid_traceparent(header: str | None) -> str | None:
    """`header` if it is a well-formed traceparent, otherwise None: a broken one from outside is not passed on."""
    found = None if header is None else _TRACEPARENT.fullmatch(header)
    # Version 00 has these four parts; a later one may have more.
    return None if found is None or (found["version"] == "00" and found["rest"]) else header


def new_traceparent() -> str:
    """A traceparent for a request that came without one; sampled."""
    return f"00-{_new_id(_TRACE_ID_BITS):032x}-{_new_id(_SPAN_ID_BITS):016x}-01"


def _new_id(bits: int) -> int:
    """A random number that is not 0, which would be no id."""
    return getrandbits(bits) or 1


def trace_id_of(traceparent: str) -> str:
    """The trace id inside a traceparent, for log lines."""
    return traceparent.split("-", 2)[1]


def carried_traceparent(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The valid traceparent in the metadata of a call; empty: it has none."""
    found = next((value for key, value in metadata or () if key == TRACEPARENT), "")
    return valid_traceparent(str(found)) or ""


def traceparent_of(metadata: Mapping[str, str]) -> str:
    """The caller's traceparent from metadata or headers, or a fresh one."""
    return valid_traceparent(metadata.get(TRACEPARENT)) or new_traceparent()
