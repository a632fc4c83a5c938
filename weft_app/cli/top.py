"""`weft top`: hosts, devices, models, requests and the queue on one page that refreshes."""

import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.cancel import CANCEL_TIMEOUT_SECONDS
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.options import DEFAULT_HOME, EXIT_OK, WINDOWS, HomeOption, OutputFormat, OutputOption, reporting
from weft_app.cli.output import document_text, json_line, moment_in, print_document
from weft_app.cli.ps import memory_bytes, until_text
from weft_app.cli.records import LEASES
from weft_app.cli.terminal import is_out_terminal, say
from weft_app.cli.top_page import Sort, Target, View, page, targets

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_SHOWN = 100
MAX_ASKED_RUNNERS = 8
"""Maximum number of runners asked for the progress of their requests."""
INTERVAL_SECONDS = 1.0
_WAITS = ("queued", "loading")


def top(
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between two reads.")] = INTERVAL_SECONDS,
) -> None:
    """Show hosts, models, running answers and the queue on a live page; quit with q or Ctrl-C.

    Keys: q quits, p pauses, s sorts models by name, load or memory, the arrows select a model or request, c cancels the
    selected request, l shows its log or that of the model's engine. With -o json, one document per line.

    Example: weft top, or once for a script: weft top --once -o json
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
        if output is OutputFormat.TABLE and is_out_terminal():
            TopScreen(source, home, interval).run()
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
    return "".join(f"{line.text}\n" for line in page(document, View())[:-1])


class TopSource:
    """Reads the state of the mesh for one page."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._last: dict[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        """Returns the current state; if the mesh does not answer, the last known one with a notice.

        Raises SERVICE_UNAVAILABLE if it has never answered.
        """
        try:
            with connect(self._home) as mesh:
                self._last = _read(mesh)
        except WeftError as error:
            if self._last is None:
                raise
            return self._last | {"notice": f"No answer since {self._last['time']}, retrying: {error.message}"}
        return self._last


def _read(mesh: MeshApi) -> dict[str, Any]:
    """Returns the state of the mesh. Raises SERVICE_UNAVAILABLE if the registry does not answer."""
    notice, running, total = "", [], 0
    runners = mesh.documents(ResourceKind.RUNNER)
    hosts: list[Document] = []
    waiting: list[Document] = []
    ended: list[Document] = []
    try:
        listed = mesh.get("/v1/requests", limit=MAX_SHOWN, allTenants=True)
        waiting = [request for request in listed["items"] if request["state"] in _WAITS]
        running, total = [request for request in listed["items"] if request["state"] not in _WAITS], listed["total"]
        ended = mesh.get("/v1/requests", limit=MAX_SHOWN, state="ended", allTenants=True)["items"]
        hosts = mesh.get(LEASES.path)["hosts"]
    except WeftError as error:
        notice = error.message
    progress = _progress(mesh, runners) if running else {}
    return {
        "kind": "Top",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "notice": notice,
        "tokensPerSecond": _speed(runners, len(running)),
        "requests": {"running": len(running), "waiting": len(waiting), "total": total},
        "hosts": list(_hosts(runners)),
        "devices": [device for host in hosts for device in _devices(host)],
        "models": [model for runner in runners for model in _models(runner)],
        "running": [_running(request, progress.get(request["requestId"], {})) for request in running],
        "queue": [_waiting(request) for request in waiting],
        "ended": [_end(request) for request in ended],
    }


def _progress(mesh: MeshApi, runners: Iterable[Document]) -> dict[str, Document]:
    """Returns what runners report of their unfinished requests, by id; some of it if not all runners answer."""
    busy = (
        runner["name"]
        for runner in runners
        if runner["status"]["state"] == "active" and any(state["slotsUsed"] for state in runner["status"]["instances"])
    )
    found: dict[str, Document] = {}
    for name in islice(busy, MAX_ASKED_RUNNERS):
        with suppress(WeftError):
            for instance in mesh.get(f"/v1/admin/runners/{name}/instances").get("instances", ()):
                for record in instance.get("requests", ()):
                    if "endTime" not in record:
                        found[record["requestId"]] = {**record, "runner": name}
    return found


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


def _hosts(runners: Iterable[Document]) -> Iterator[dict[str, Any]]:
    """Yields the hosts of online runners, each as its first runner reports it."""
    online: dict[str, list[Document]] = {}
    for runner in runners:
        if runner["status"]["state"] == "active":
            online.setdefault(runner["status"]["host"], []).append(runner)
    for host, own in sorted(online.items()):
        use: Document = next((each["status"]["hostUse"] for each in own if "hostUse" in each["status"]), {})
        yield {
            "host": host,
            "cpuCount": use.get("cpuCount"),
            "cpuUtilization": use.get("cpuUtilization"),
            "memoryTotalBytes": use.get("memoryTotalBytes"),
            "memoryUsedBytes": use.get("memoryUsedBytes"),
            "runners": [each["name"] for each in own],
        }


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
            "tokensPerSecond": state.get("tokensPerSecond"),
            "until": until_text(state),
            "loadProgress": state.get("loadProgress"),
            "detail": state.get("detail", ""),
        }


def _running(request: Document, record: Document) -> dict[str, Any]:
    return {
        "id": request["requestId"],
        "tenant": request["tenant"],
        "target": request["target"],
        "runner": record.get("runner"),
        "state": record.get("state", request["state"]),
        "seconds": max(0.0, (datetime.now(UTC) - moment_in(request["arrivedAt"])).total_seconds()),
        "tokens": record.get("outputTokens"),
        "tokensPerSecond": record.get("tokensPerSecond"),
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


KEY_SECONDS = 0.1
"""Polling interval of keys, reads and the terminal's size."""
QUIT_KEYS = ("q", "Q", "\x04")
_MOVES: Mapping[str, int] = {"\x1b[A": -1, "\x1bOA": -1, "k": -1, "\x1b[B": 1, "\x1bOB": 1, "j": 1}
_KEY = re.compile(r"\x1b[\[O].|.", re.DOTALL)
_BARS: Mapping[str, str] = {"█+": "green", "█{7,}": "yellow", "█{9,}": "red"}
"""Styles of bars by their length; later ones take precedence."""


class Reading(threading.Thread):
    """A call in the background. It delays neither keys nor the end of the program."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._result: Any = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Makes the call."""
        try:
            self._result = self._call()
        except Exception as error:  # noqa: BLE001 - raised again where the result is taken
            self._error = error

    def result(self) -> Any:
        """Returns the result of a call that has ended. Raises its error."""
        if self._error is not None:
            raise self._error
        return self._result


class TopScreen:
    """The page on a terminal, which shows its previous content again at the end."""

    def __init__(self, source: TopSource, home: Path, interval_seconds: float) -> None:
        # Not needed for pipes and `--once`.
        from rich.console import Console  # noqa: PLC0415

        self._source = source
        self._home = home
        self._interval_seconds = interval_seconds
        self._console = Console(highlight=False)
        self._sort = Sort.NAME
        self._is_paused = False
        self._selected: Target | None = None
        self._asks = ""
        """Id of the request whose cancellation is to be confirmed; empty: none."""
        self._message = ""
        self._cancelling: Reading | None = None
        self._size = (0, 0)
        """The last known size of the terminal; (0, 0): unknown."""
        self._document = source.document()

    def run(self) -> None:
        """Shows the page until q, Ctrl-C or SIGTERM."""
        signal.signal(signal.SIGTERM, _terminated)
        while (shown := self._watch()) is not None:
            self._show_logs(shown)

    def _watch(self) -> Target | None:
        """Shows the page until the user quits (None) or wants logs."""
        from rich.live import Live  # noqa: PLC0415 - as above

        self._fit()
        with _unbuffered_keys(), Live(console=self._console, screen=True, auto_refresh=False) as live:
            live.update(self._render(), refresh=True)
            reading, read_at = None, time.monotonic()
            while True:
                keys = _keys(KEY_SECONDS)
                for key in keys:
                    if not self._asks and key in QUIT_KEYS:
                        return None
                    if not self._asks and key == "l" and self._selected is not None:
                        return self._selected
                    self._press(key)
                is_due = time.monotonic() - read_at >= self._interval_seconds and not self._is_paused
                if reading is None and is_due:
                    reading, read_at = Reading(self._source.document), time.monotonic()
                is_new = self._adopt_cancellation()
                if reading is not None and not reading.is_alive():
                    self._document, reading, is_new = reading.result(), None, True
                if self._fit() or keys or is_new:
                    live.update(self._render(), refresh=True)

    def _press(self, key: str) -> None:
        """Does what a key means, other than to quit or show logs."""
        if self._asks:
            request, self._asks, self._message = self._asks, "", ""
            if key in ("y", "Y"):
                self._message = f"Cancelling {request}"
                self._cancelling = Reading(lambda: self._cancel(request))
            return
        self._message = ""
        if key == "p":
            self._is_paused = not self._is_paused
        elif key == "s":
            self._sort = list(Sort)[(list(Sort).index(self._sort) + 1) % len(Sort)]
        elif key in _MOVES:
            self._move(_MOVES[key])
        elif key in ("c", "l"):
            kind, name = self._selected or ("", "")
            if kind == "request" and key == "c":
                self._asks, self._message = name, f"Cancel {name}? y: yes, any other key: no"
            else:
                self._message = "Select a request with the arrows first" if key == "c" else "Select a row first"

    def _move(self, by: int) -> None:
        found = targets(self._document, self._sort)
        if self._selected in found:
            self._selected = found[max(0, min(len(found) - 1, found.index(self._selected) + by))]
        elif found:
            self._selected = found[0]

    def _cancel(self, request: str) -> str:
        with connect(self._home, CANCEL_TIMEOUT_SECONDS) as api:
            api.post(f"/v1/requests/{request}/cancel", allTenants=True)
        return f"Cancelled {request}"

    def _adopt_cancellation(self) -> bool:
        """Adopts the outcome of a cancellation. Returns whether there is one."""
        if self._cancelling is None or self._cancelling.is_alive():
            return False
        ended, self._cancelling = self._cancelling, None
        try:
            self._message = ended.result()
        except WeftError as error:
            self._message = error.message
        return True

    def _show_logs(self, shown: Target) -> None:
        """Follows the log of a request or of a model's engine until Ctrl-C, below the previous content."""
        from weft_app.cli.logs import logs  # noqa: PLC0415 - only for this key

        name = "/".join(shown)
        say(f"weft logs {name} -f; Ctrl-C returns to weft top\n")
        try:
            logs([name], follow_on=True, home=self._home)
        except typer.Exit as end:
            if end.exit_code == EXIT_OK:
                return
        say("Press a key to return to weft top\n")
        with _unbuffered_keys():
            while not _keys(KEY_SECONDS):
                pass

    def _fit(self) -> bool:
        """Adopts the size of the terminal. Returns whether it has changed.

        The console would always use COLUMNS and LINES if they are exported.
        """
        with suppress(OSError, ValueError):
            columns, rows = os.get_terminal_size()
            if columns and rows and (columns, rows) != self._size:
                # Until set, the console's size follows the terminal and would never differ from it.
                self._console.size = self._size = (columns, rows)
                return True
        return False

    def _render(self) -> "RenderableType":
        from rich.text import Text  # noqa: PLC0415 - as above

        view = View(
            columns=self._console.size.width,
            rows=self._console.size.height,
            sort=self._sort,
            is_paused=self._is_paused,
            is_colored=not self._console.no_color,
            selected=self._selected,
            message=self._message,
        )
        shown = []
        for line in page(self._document, view):
            text = Text.from_ansi(line.text, style=line.style, no_wrap=True, overflow="crop")
            for bar, style in _BARS.items():
                text.highlight_regex(bar, style)
            shown.append(text)
        return Text("\n").join(shown)


def _terminated(*_: object) -> NoReturn:
    """Ends the program by an exception, so that the terminal is restored."""
    raise SystemExit(128 + signal.SIGTERM)


@contextmanager
def _unbuffered_keys() -> Iterator[None]:
    """Delivers key presses without Enter or echo; Ctrl-C stays a signal. Does nothing without keys."""
    if not _has_keys():
        yield
        return
    # Missing on Windows.
    import termios  # noqa: PLC0415
    import tty  # noqa: PLC0415

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    # A stopped program would leave its page and these settings to the shell.
    stops = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        tty.setcbreak(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTSTP, stops)


def _has_keys() -> bool:
    """Whether there is a terminal whose keys can be read; on Windows the page has none."""
    return sys.stdin.isatty() and sys.platform != WINDOWS


def _keys(seconds: float) -> list[str]:
    """Returns the pressed keys; none after `seconds` without one, and a quit key once the terminal is closed."""
    if not _has_keys():
        time.sleep(seconds)
        return []
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return []
    return _KEY.findall(os.read(sys.stdin.fileno(), 256).decode("ascii", "replace")) or [QUIT_KEYS[0]]
