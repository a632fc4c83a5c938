"""Logs of the mesh for `weft logs`, read from the files of a home even if no mesh runs.

`weft up` writes `host.log`, each line with its component; `weft serve SERVICE` writes `SERVICE.log`, a runner
`runner-NAME.log` and `runner-NAME.out`, and `weft up -d` its output to `up.out`.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, Self

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import closest_names, require_name
from weft.kernel.values.unknown_names import LOGGED, unknown_name
from weft_app.cli.output import json_line
from weft_app.cli.terminal import note, safe_text, say
from weft_app.compose.home import WeftHome

DEFAULT_LINES = 100
MAX_LINES = 1000
POLL_SECONDS = 0.2
MAX_VALUE_CHARS = 500
MAX_FRAMES = 20
"""Maximum number of innermost traceback frames in text output."""

MAX_READ_BYTES = 256 * 1024 * 1024
"""Maximum bytes to read from the end of a file."""
MAX_LINE_BYTES = 1024 * 1024
"""Maximum length of a line; longer ones are split."""
MESH = "mesh"
COMPONENTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "gateway": frozenset({"weft.gateway", "weft.request", "weft.keys", "weft.router_watch"}),
        "router": frozenset(
            {"weft.router", "weft.waker", "weft.tasks", "weft.relay", "weft.publishers", "weft.memory_watch"}
        ),
        "registry": frozenset({"weft.registry"}),
    }
)
"""Components of each service in `host.log`, including those below them, such as `weft.registry.keys`."""
RUNNER_PREFIX = "runner/"
_HOST, _UP = "host.log", "up.out"
_FILE_PREFIX = "runner-"
_SHOWN_FIRST = frozenset({"timestamp", "level", "component", "service", "event", "exception"})


class LinesFormat(StrEnum):
    """Output format of log lines."""

    TEXT = "text"
    JSON = "json"


class Piece(NamedTuple):
    """A line of a file, or a part of one longer than MAX_LINE_BYTES."""

    data: bytes
    written: float
    """Last write to the file, in seconds since the epoch."""


class LogFile:
    """A log file and its older part `<name>.1`. The file may be missing at first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._older = path.with_name(f"{path.name}.1")
        self._file: IO[bytes] | None = None
        self._rest = b""
        self._lost = False
        self._time = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def past(self) -> Iterator[Piece]:
        """Yields the current lines of the older part and the file, including an incomplete last one."""
        self._file, older = _opened(self.path), _opened(self._older)
        if older is not None:
            with older:
                # The file may have become its older part between the two opens.
                if self._file is None or not os.path.sameopenfile(older.fileno(), self._file.fileno()):
                    yield from _lines(older, is_bounded=True)
        if self._file is not None:
            yield from _lines(self._file, is_bounded=True)

    def new(self) -> Iterator[Piece]:
        """Yields the complete lines since the last call, also across a rotation."""
        self._file = self._file or _opened(self.path)
        if self._file is None:
            return
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            # `weft up -d` truncates its file.
            self._file.seek(0)
            self._rest = b""
        yield from self._complete(self._file)
        if _is_of(self._file, self.path) is False:
            # The writer may have added lines before it moved the file.
            yield from self._complete(self._file)
            self._lost = _is_of(self._file, self._older) is False
            self._file.close()
            self._file = _opened(self.path)
            if self._file is not None:
                yield from self._complete(self._file)

    def entry(self, piece: Piece) -> "Entry":
        """Parses a line of the file."""
        text = piece.data.decode("utf-8", "replace").rstrip("\r\n")
        fields = _fields_of(text)
        found = None if fields is None else _timestamp(fields.get("timestamp"))
        self._time = found if found is not None else self._time or piece.written
        return Entry(self._time, text, fields, self.path.name)

    def take_lost(self) -> bool:
        """Whether lines were lost since the last call: the file was replaced twice between two polls."""
        lost, self._lost = self._lost, False
        return lost

    def _complete(self, file: IO[bytes]) -> Iterator[Piece]:
        for piece in _lines(file):
            self._rest += piece.data
            if self._rest.endswith(b"\n") or len(self._rest) >= MAX_LINE_BYTES:
                yield Piece(self._rest, piece.written)
                self._rest = b""


def _opened(path: Path) -> IO[bytes] | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _is_of(file: IO[bytes], path: Path) -> bool | None:
    """Whether an open file is the one at a path; None: there is none."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return None


def _lines(file: IO[bytes], *, is_bounded: bool = False) -> Iterator[Piece]:
    """Yields the lines up to the current end of the file; `is_bounded`: of its last MAX_READ_BYTES."""
    status = os.fstat(file.fileno())
    if is_bounded and status.st_size > MAX_READ_BYTES:
        file.seek(status.st_size - MAX_READ_BYTES)
        file.readline(MAX_LINE_BYTES)
    while file.tell() < status.st_size and (line := file.readline(MAX_LINE_BYTES)):
        yield Piece(line, status.st_mtime)


@dataclass(frozen=True, slots=True)
class Entry:
    """A parsed line of a log."""

    time: float
    """Seconds since the epoch; for a line without a time that of the previous line, or the last write to the file."""
    text: str
    fields: Mapping[str, Any] | None
    """Fields of a structured line; None: plain text."""
    file: str

    def shown(self, output: LinesFormat) -> str:
        """Returns the line as JSON or text."""
        if output is LinesFormat.JSON:
            return f"{self.text}\n" if self.fields is not None else json_line({"event": self.text, "file": self.file})
        return f"{safe_text(self.text)}\n" if self.fields is None else _text_of(self.fields, self.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Selects lines."""

    since: float | None = None
    """Seconds since the epoch."""
    request: str = ""
    """Id of a request or its trace."""
    service: str = ""
    """A service of COMPONENTS, to select its lines of `host.log`."""
    in_text: bool = False
    """Whether plain lines that contain the request's id match, too."""

    def takes(self, entry: Entry) -> bool:
        """Whether a line matches. Blank lines never do."""
        if not entry.text.strip():
            return False
        if self.since is not None and entry.time < self.since:
            return False
        fields = entry.fields or {}
        if self.request and not self._is_of_request(entry):
            return False
        return not self.service or entry.file != _HOST or self.service == _service_of(str(fields.get("component", "")))

    def _is_of_request(self, entry: Entry) -> bool:
        if entry.fields is None:
            return self.in_text and self.request in entry.text
        return self.request in (entry.fields.get("request_id"), entry.fields.get("trace_id"))


def _service_of(component: str) -> str:
    for service, components in COMPONENTS.items():
        if any(component == each or component.startswith(f"{each}.") for each in components):
            return service
    return ""


@dataclass(frozen=True, slots=True)
class Logs:
    """The files for a name, and the service to select from `host.log`."""

    files: tuple[Path, ...]
    service: str = ""


@dataclass(frozen=True, slots=True)
class LogFolder:
    """The logs of a home."""

    home: WeftHome

    def runners(self) -> tuple[str, ...]:
        """Returns the runners with logs here, running or not."""
        return tuple(name.removeprefix(_FILE_PREFIX) for name in self._names() if name.startswith(_FILE_PREFIX))

    def everything(self) -> Logs:
        """Returns the logs of all services and runners. Raises NOT_FOUND if there are none."""
        self.require(MESH)
        runners = (f"{_FILE_PREFIX}{name}{suffix}" for name in self.runners() for suffix in (".log", ".out"))
        return Logs(tuple(map(self._path, (_HOST, *(f"{name}.log" for name in COMPONENTS), *runners))))

    def names(self) -> tuple[str, ...]:
        """Returns all names for `find`."""
        others = (name for name in self._names() if not name.startswith(_FILE_PREFIX))
        return tuple(sorted({MESH, *COMPONENTS, *others, *self.runners()} - {"host", "up"}))

    def find(self, name: str) -> Logs | None:
        """Returns the logs of the mesh, a service or a runner; None if there are none. Raises INVALID_ARGUMENT."""
        if name == MESH:
            # The output of `weft up -d` explains a failed start, but adds nothing for a running mesh.
            up = () if self.home.is_claimed() else (self._path(_UP),)
            return Logs((self._path(_HOST), *up))
        if name in COMPONENTS:
            return Logs((self._path(_HOST), self._path(f"{name}.log")), name)
        bare = require_name(name.removeprefix(RUNNER_PREFIX), "NAME")
        if bare in self.runners():
            return Logs((self._path(f"{_FILE_PREFIX}{bare}.log"), self._path(f"{_FILE_PREFIX}{bare}.out")))
        if bare in self.names() and not name.startswith(RUNNER_PREFIX):
            return Logs((self._path(f"{bare}.log"),))
        return None

    def require(self, name: str) -> Logs:
        """As `find`. Raises NOT_FOUND with similar names, or with the next step if there are no logs at all."""
        found = self.find(name)
        if found is not None and (any(path.is_file() for path in found.files) or self._names()):
            return found
        if not self._names():
            folder = self.home
            raise WeftError(
                Reason.NOT_FOUND,
                f"there are no logs in {folder.logs}: no mesh has run on this home. Start one with `weft up --home "
                f"{folder.root}`, or set its home with --home",
            )
        raise self.unknown(name)

    def unknown(self, name: str, models: Iterable[str] = ()) -> WeftError:
        """Returns the error for a name without logs, with similar names and models."""
        if name.startswith(RUNNER_PREFIX):
            error = unknown_name("runner", name.removeprefix(RUNNER_PREFIX), self.runners(), field="NAME")
            error.message += " The log of a runner on another machine is in its home on that machine."
            return error
        return unknown_name(LOGGED, name, {*self.names(), *models}, field="NAME")

    def is_close(self, name: str) -> bool:
        """Whether a name without logs is similar to one with logs."""
        return bool(closest_names(name, self.names()))

    def _names(self) -> list[str]:
        try:
            listed = list(self.home.logs.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable(self.home.logs, error) from error
        return sorted({path.stem for path in listed if path.suffix in (".log", ".out")})

    def _path(self, name: str) -> Path:
        return self.home.logs / name


def print_logs(
    logs: Logs,
    wanted: Filter,
    output: LinesFormat,
    *,
    lines: int | None = None,
    follow: bool = False,
    says_none: bool = True,
) -> int:
    """Prints the last lines of logs sorted by time, and with `follow` new ones until Ctrl-C; returns their number.

    `lines` None: DEFAULT_LINES, or with a filter up to MAX_LINES; a note says how many are omitted.
    `says_none`: print a note if there are none.
    """
    wanted = replace(wanted, service=logs.service)
    is_filtered = wanted.since is not None or bool(wanted.request)
    most = lines if lines is not None else MAX_LINES if is_filtered else DEFAULT_LINES
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(LogFile(path)) for path in logs.files]
            last, total = _last([map(file.entry, file.past()) for file in files], wanted, most)
            if is_filtered and lines is None and total > most:
                note(
                    f"{total - most} earlier lines are omitted; narrow the range with --since, or read {logs.files[0]}"
                )
            say("".join(entry.shown(output) for entry in last))
            if says_none and not total and not follow:
                note("there are no such lines" if is_filtered or logs.service else "there are no lines yet")
            while follow:
                time.sleep(POLL_SECONDS)
                _print_new(files, wanted, output)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise _unreadable(logs.files[0].parent, error) from error
    return total


def _print_new(files: Sequence[LogFile], wanted: Filter, output: LinesFormat) -> None:
    entries = (entry for file in files for entry in map(file.entry, file.new()) if wanted.takes(entry))
    if new := sorted(entries, key=_time):
        say("".join(entry.shown(output) for entry in new))
    for file in files:
        if file.take_lost():
            note(f"lines of {file.path.name} were lost: it was replaced twice")


_time = attrgetter("time")


def _last(sources: Iterable[Iterator[Entry]], wanted: Filter, most: int) -> tuple[list[Entry], int]:
    """Returns the last entries of several files sorted by time, and the total number."""
    total = 0
    kept: list[Entry] = []
    for source in sources:
        last: deque[Entry] = deque(maxlen=most)
        for entry in source:
            if wanted.takes(entry):
                total += 1
                last.append(entry)
        kept += last
    return sorted(kept, key=_time)[max(0, len(kept) - most) :], total


def _fields_of(text: str) -> Mapping[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "event" in found else None


def _timestamp(value: object) -> float | None:
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def _text_of(fields: Mapping[str, Any], seconds: float) -> str:
    """Returns a structured line as text: local time, level, component, event, and its values."""
    at = datetime.fromtimestamp(seconds, UTC).astimezone()
    origin = str(fields.get("component") or fields.get("service") or "").removeprefix("weft.")
    rest = ((name, value) for name, value in fields.items() if name not in _SHOWN_FIRST and value is not None)
    values = (f"{name}={_value_text(value)}" for name, value in rest)
    head = f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d} {fields.get('level', '-')!s:<8} {origin:<12}"
    line = " ".join((head, str(fields["event"]), *values))
    return "".join(f"{safe_text(each)}\n" for each in (line, *_traceback(fields.get("exception"))))


def _value_text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."
    return json.dumps(cut, ensure_ascii=False) if isinstance(value, str) and (" " in cut or not cut) else cut


def _traceback(exception: object) -> Iterator[str]:
    """Yields the errors of a structured traceback, each with its innermost frames."""
    if isinstance(exception, str):
        yield from (f"    {line}" for line in exception.splitlines()[-MAX_FRAMES:])
        return
    for error in exception if isinstance(exception, list) else ():
        if not isinstance(error, dict):
            continue
        yield f"    {error.get('exc_type')}: {error.get('exc_value')}"
        frames = error.get("frames")
        for frame in frames[-MAX_FRAMES:] if isinstance(frames, list) else ():
            if isinstance(frame, dict):
                yield f"      {frame.get('filename')}:{frame.get('lineno')} in {frame.get('name')}"


def _unreadable(path: Path, error: OSError) -> WeftError:
    return WeftError(Reason.INVALID_ARGUMENT, f"the logs in {path} cannot be read: {error.strerror}")
