"""`weft top`: devices, models, the queue and recent requests on one page that refreshes."""

import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
from weft.kernel.units import size_words, time_words
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.options import DEFAULT_HOME, EXIT_OK, HomeOption, OutputFormat, OutputOption, reporting
from weft_app.cli.output import (
    Column,
    TextTable,
    custom_columns,
    document_text,
    json_line,
    moment_in,
    print_document,
    safe_text,
    say,
)
from weft_app.cli.ps import memory_bytes
from weft_app.cli.records import hosts_of

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_SHOWN = 100
INTERVAL_SECONDS = 1.0
MAX_OUTAGE_SECONDS = 60.0
"""Maximum outage of the registry, after which the page ends."""
BAR_CHARS = 10
MIN_COLUMNS, MIN_ROWS = 20, 6
_WAITS = ("queued", "loading")


class Sort(StrEnum):
    """The order of models."""

    NAME = "name"
    LOAD = "load"
    MEMORY = "memory"


TITLE, HEADER, PLAIN, WARNING = "bold", "dim", "", "yellow"
"""Styles of lines in rich."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the page."""

    text: str
    style: str = PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Display settings of the page."""

    columns: int
    rows: int
    sort: Sort = Sort.NAME
    is_paused: bool = False


def top(
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between two reads.")] = INTERVAL_SECONDS,
) -> None:
    """Show devices, models, the queue and ended requests on a live page; quit with q or Ctrl-C.

    Keys: q quits, p pauses, n, l and m sort models by name, load or memory. With -o json, one document per line.

    Example: weft top --once -o json
    """
    with reporting(interrupted=EXIT_OK):
        source = TopSource(home)
        if once:
            document = source.document()
            if output is OutputFormat.TABLE:
                say(_text(document))
            else:
                print_document(document, output)
            return
        if output is OutputFormat.TABLE and sys.stdout.isatty():
            TopScreen(source, interval).run()
            return
        while True:
            document = source.document()
            match output:
                case OutputFormat.JSON:
                    say(json_line(document))
                case OutputFormat.YAML:
                    say(f"---\n{document_text(document, output)}")
                case OutputFormat.TABLE:
                    say(f"{_text(document)}\n")
            time.sleep(interval)


def _text(document: Mapping[str, Any]) -> str:
    """Returns the page for a file or a pipe, uncut and without keys."""
    return "".join(f"{line.text}\n" for line in page(document, View(columns=10_000, rows=10_000))[:-1])


class TopSource:
    """Reads the state of the mesh for one page."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._runners: list[Document] = []
        self._read_at: float | None = None

    def document(self) -> dict[str, Any]:
        """Returns the current state. Raises SERVICE_UNAVAILABLE if no registry answers, or has not for a minute."""
        notice, running, total = "", 0, 0
        try:
            with connect(self._home) as mesh:
                self._runners, self._read_at = mesh.documents(ResourceKind.RUNNER), time.monotonic()
        except WeftError as error:
            if self._read_at is None or time.monotonic() - self._read_at > MAX_OUTAGE_SECONDS:
                raise
            notice = error.message
        hosts: list[Document] = []
        waiting: list[Document] = []
        ended: list[Document] = []
        try:
            with connect(self._home) as api:
                listed = api.get("/v1/requests", limit=MAX_SHOWN, allTenants=True)
                waiting = [request for request in listed["items"] if request["state"] in _WAITS]
                running, total = len(listed["items"]) - len(waiting), listed["total"]
                ended = api.get("/v1/requests", limit=MAX_SHOWN, state="ended", allTenants=True)["items"]
            hosts = hosts_of(self._home)
        except WeftError as error:
            notice = error.message
        return {
            "kind": "Top",
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "notice": notice,
            "tokensPerSecond": _speed(self._runners, running),
            "requests": {"running": running, "waiting": len(waiting), "total": total},
            "devices": [device for host in hosts for device in _devices(host)],
            "models": [model for runner in self._runners for model in _models(runner)],
            "queue": [_waiting(request) for request in waiting],
            "ended": [_end(request) for request in ended],
        }


def _speed(runners: Iterable[Document], running: int) -> float | None:
    """Returns the current tokens per second of all models as reported by runners; None: unknown."""
    speeds = [
        state["tokensPerSecond"]
        for runner in runners
        if runner["status"]["state"] == "active"
        for state in runner["status"]["instances"]
        if "tokensPerSecond" in state
    ]
    return sum(speeds) if speeds or not running else None


def _devices(host: Document) -> Iterator[dict[str, Any]]:
    for device in host["devices"]:
        yield {
            "host": host["host"],
            "name": device["name"] or device["id"],
            "totalBytes": device["totalBytes"],
            "freeBytes": device["freeBytes"],
            "utilization": device.get("utilization"),
        }


def _models(runner: Document) -> Iterator[dict[str, Any]]:
    is_active = runner["status"]["state"] == "active"
    for state in runner["status"]["instances"]:
        yield {
            "model": state["model"],
            "runner": runner["name"],
            "host": runner["status"]["host"],
            "state": state["phase"] if is_active else "inactive",
            "slotsUsed": state["slotsUsed"],
            "slotsTotal": state["slotsTotal"],
            "memoryBytes": memory_bytes(state.get("memory", {})),
            "loadProgress": state.get("loadProgress"),
            "detail": state.get("detail", ""),
        }


def _waiting(request: Document) -> dict[str, Any]:
    queued, loading = request.get("queued"), request.get("loading", {})
    return {
        "id": request["requestId"],
        "tenant": request["tenant"],
        "target": request["target"],
        "state": request["state"],
        "position": queued["position"] if queued else None,
        "etaSeconds": (queued or loading).get("etaSeconds"),
        "waitsFor": queued["reason"] if queued else loading.get("stage", ""),
    }


def _end(request: Document) -> dict[str, Any]:
    receipt = request.get("receipt", {})
    is_counted = "promptTokens" in receipt
    ended, arrived = moment_in(request["endedAt"]), moment_in(request["arrivedAt"])
    return {
        "id": request["requestId"],
        "tenant": request["tenant"],
        "target": request["target"],
        "outcome": request.get("reason", "completed"),
        "tokens": [receipt["promptTokens"], receipt["completionTokens"]] if is_counted else None,
        "seconds": (ended - arrived).total_seconds(),
        "tokensPerSecond": receipt.get("tokensPerSecond"),
    }


def _percent(key: str) -> Callable[[Document], str | None]:
    return lambda row: None if row[key] is None else f"{row[key] * 100:.0f}%"


def _used(device: Document) -> int:
    return max(0, int(device["totalBytes"] - device["freeBytes"]))


def _bar(device: Document) -> str:
    share = _used(device) / device["totalBytes"] if device["totalBytes"] else 0.0
    return f"[{'#' * round(share * BAR_CHARS):<{BAR_CHARS}}]"


_DEVICE = custom_columns(
    "DEVICE:name HOST:host MEMORY USED FREE:freeBytes:size BUSY",
    MEMORY=_bar,
    USED=lambda device: size_words(_used(device)),
    BUSY=_percent("utilization"),
)
_MODEL = custom_columns(
    "MODEL:model RUNNER:runner STATE SLOTS MEMORY DETAIL:detail",
    STATE=lambda model: " ".join(filter(None, (model["state"], _percent("loadProgress")(model)))),
    SLOTS=lambda model: f"{model['slotsUsed']}/{model['slotsTotal']}",
    MEMORY=lambda model: size_words(model["memoryBytes"]) if model["memoryBytes"] else None,
)
_QUEUED = custom_columns("WAITING:id TARGET:target STATE:state POS:position ETA:etaSeconds:eta WAITS_FOR:waitsFor")
_ENDED = custom_columns(
    "ENDED:id TARGET:target OUTCOME:outcome TOKENS TOOK TOK/S:tokensPerSecond:{:.1f}",
    TOKENS=lambda request: "+".join(map(str, request["tokens"] or ())),
    TOOK=lambda request: time_words(request["seconds"]),
)
_BAD = frozenset({"crash-loop", "failed"})
"""States of models with a colour."""


def page(document: Mapping[str, Any], view: View) -> list[Line]:
    """Returns the lines of a document: at most `view.rows`, none longer than `view.columns`."""
    columns, rows = max(MIN_COLUMNS, view.columns), max(MIN_ROWS, view.rows)
    counts, speed = document["requests"], document["tokensPerSecond"]
    told = (
        f"running {counts['running']}  waiting {counts['waiting']}  tokens/s {'-' if speed is None else f'{speed:.1f}'}"
    )
    lines = [Line(f"weft top  {told}  {document['time']}", TITLE)]
    if document["notice"]:
        lines.append(Line(document["notice"], WARNING))
    sections = [
        _section(_DEVICE, document["devices"]),
        _section(_MODEL, sorted(document["models"], key=_ORDERS[view.sort])),
        _section(_QUEUED, document["queue"]),
        _section(_ENDED, document["ended"]),
    ]
    for section, most in zip(sections, _shares(sections, rows - len(lines) - 1), strict=True):
        lines += _fitted(section, most)
    pause = "p go on" if view.is_paused else "p pause"
    lines.append(Line(f"q quit  {pause}  sort: n name, l load, m memory (now {view.sort})", HEADER))
    return [Line(safe_text(line.text)[:columns], line.style) for line in lines]


_ORDERS: Mapping[Sort, Callable[[Document], tuple[Any, ...]]] = {
    Sort.NAME: lambda model: (model["model"], model["runner"]),
    Sort.LOAD: lambda model: (-model["slotsUsed"], model["model"], model["runner"]),
    Sort.MEMORY: lambda model: (-model["memoryBytes"], model["model"], model["runner"]),
}


def _section(columns: Sequence[Column], rows: Sequence[Document]) -> list[Line]:
    """Returns a header and rows, with columns as wide as their widest cells."""
    header, *texts = TextTable(columns, is_cut=False).plain_text(rows).splitlines()
    styles = (WARNING if row.get("state") in _BAD else PLAIN for row in rows)
    return [Line(header, HEADER), *(Line(text, style) for text, style in zip(texts, styles, strict=True))]


def _shares(sections: Sequence[Sequence[Line]], rows: int) -> list[int]:
    """Returns the number of lines per section: all if they fit, otherwise shorter sections first."""
    shares = [0] * len(sections)
    left = rows
    for done, place in enumerate(sorted(range(len(sections)), key=lambda place: len(sections[place]))):
        shares[place] = min(len(sections[place]), left // (len(sections) - done))
        left -= shares[place]
    return shares


def _fitted(lines: Sequence[Line], most: int) -> Sequence[Line]:
    """Returns the lines, cut with a last line that says how many are missing."""
    if len(lines) <= most or most < 2:
        return lines[:most]
    return [*lines[: most - 1], Line(f"... and {len(lines) - most + 1} more", HEADER)]


KEY_SECONDS = 0.1
"""Polling interval of keys and the terminal's size."""
QUIT_KEYS = ("q", "Q", "\x04")
_SORTS: Mapping[str, Sort] = {each.value[0]: each for each in Sort}


class TopScreen:
    """The page on a terminal, which shows its previous content again at the end."""

    def __init__(self, source: TopSource, interval_seconds: float) -> None:
        # Not needed for pipes and `--once`.
        from rich.console import Console  # noqa: PLC0415

        self._source = source
        self._interval_seconds = interval_seconds
        self._console = Console(highlight=False)
        self._sort = Sort.NAME
        self._is_paused = False
        self._size = (0, 0)
        """The last known size of the terminal; (0, 0): unknown."""
        self._document = source.document()

    def run(self) -> None:
        """Shows the page until q or Ctrl-C. Raises SERVICE_UNAVAILABLE once the mesh is gone."""
        from rich.live import Live  # noqa: PLC0415 - as above

        self._fit()
        with _unbuffered_keys(), Live(console=self._console, screen=True, auto_refresh=False) as live:
            live.update(self._render(), refresh=True)
            read_at = time.monotonic()
            while (key := _key(KEY_SECONDS)) not in QUIT_KEYS:
                pressed = key in ("p", *_SORTS)
                self._is_paused ^= key == "p"
                self._sort = _SORTS.get(key, self._sort)
                if time.monotonic() - read_at >= self._interval_seconds and not self._is_paused:
                    self._document, read_at = self._source.document(), time.monotonic()
                    pressed = True
                if self._fit() or pressed:
                    live.update(self._render(), refresh=True)

    def _fit(self) -> bool:
        """Adopts the size of the terminal. Returns whether it has changed.

        The console would always use COLUMNS and LINES if they are exported.
        """
        with suppress(OSError, ValueError):
            columns, rows = os.get_terminal_size(sys.stdout.fileno())
            if columns and rows and (columns, rows) != self._size:
                # Until set, the console's size follows the terminal and would never differ from it.
                self._console.size = self._size = (columns, rows)
                return True
        return False

    def _render(self) -> "RenderableType":
        from rich.text import Text  # noqa: PLC0415 - as above

        size = self._console.size
        view = View(columns=size.width, rows=size.height, sort=self._sort, is_paused=self._is_paused)
        lines = page(self._document, view)
        return Text("\n").join(Text(line.text, style=line.style, no_wrap=True) for line in lines)


@contextmanager
def _unbuffered_keys() -> Iterator[None]:
    """Delivers key presses without Enter or echo; Ctrl-C stays a signal. Does nothing without a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    # Missing on some systems.
    import termios  # noqa: PLC0415
    import tty  # noqa: PLC0415

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _key(seconds: float) -> str:
    """Returns the next key; empty after `seconds` without one."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") or "q" if ready else ""
