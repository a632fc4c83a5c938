"""`weft top`: devices, models, the queue and recent requests on one page that refreshes."""

import os
import select
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.api.registry.v1 import lease_service_pb2
from weft.api.registry.v1.runner_pb2 import Runner
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.client.requests import connect_requests
from weft.client.resources import connect_registry
from weft.documents.codec import document_of, word_of
from weft.documents.mesh_state import MeshState
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
from weft.kernel.timestamps import seconds_of
from weft_app.cli.follow import follow_resources
from weft_app.cli.lease_table import hosts_of
from weft_app.cli.options import DEFAULT_HOME, EXIT_OK, HomeOption, OutputFormat, OutputOption, reporting
from weft_app.cli.output import document_text, json_line, print_document, say
from weft_app.cli.ps import memory_bytes
from weft_app.cli.top_view import SORTS, Sort, Style, View, page

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_SHOWN = 100
"""Requests that are read."""
INTERVAL_SECONDS = 1.0
"""How often requests and memory are read, which have no watch; models are shown as the registry's watch says."""
_STYLES: Mapping[Style, str] = {
    Style.TITLE: "bold",
    Style.HEADER: "dim",
    Style.PLAIN: "",
    Style.WARNING: "yellow",
}
_WAITS = (RequestRecord.STATE_QUEUED, RequestRecord.STATE_LOADING)


def top(
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
    once: Annotated[bool, typer.Option("--once", help="Print once and leave.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.2, max=60.0, help="Seconds between two reads of requests and memory.")
    ] = INTERVAL_SECONDS,
) -> None:
    """Show devices, models, queue and last ends on one page that goes on until q or Ctrl-C.

    Keys: q quits, p pauses, n, l and m sort models by name, load or memory. With -o json, one document per line.

    Example: weft top --once -o json
    """
    with reporting(interrupted=EXIT_OK):
        source = TopSource(home)
        if once:
            source.read_models()
            document = source.document()
            if output is OutputFormat.TABLE:
                say(_text(document))
            else:
                print_document(document, output)
            return
        with source.following():
            if output is OutputFormat.TABLE and sys.stdout.isatty():
                TopScreen(source, interval).run()
                return
            while True:
                say(_piped(source.document(), output))
                time.sleep(interval)


def _text(document: Mapping[str, Any]) -> str:
    """Returns the page without its keys, uncut, for a file or a pipe."""
    return "".join(f"{line.text}\n" for line in page(document, View(columns=10_000, rows=10_000))[:-1])


def _piped(document: Mapping[str, Any], output: OutputFormat) -> str:
    """Returns one page of several for a file or a pipe."""
    match output:
        case OutputFormat.JSON:
            return json_line(document)
        case OutputFormat.YAML:
            return f"---\n{document_text(document, output)}"
        case OutputFormat.TABLE:
            return f"{_text(document)}\n"


class TopSource:
    """The state of the mesh: runners from the registry's watch, requests and memory from polling."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._runners: Mapping[str, Runner] = {}
        self._failure: WeftError | None = None
        self.changed = threading.Event()
        """Set at each change of a runner or model."""

    def read_models(self) -> None:
        """Reads the runners once. Raises SERVICE_UNAVAILABLE."""
        with connect_registry(home=self._home) as registry:
            state = MeshState()
            for response in registry.watch():
                state.fold(response)
                break
        self._runners = dict(state.runners)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follows the registry's watch in a thread while the block runs. Raises SERVICE_UNAVAILABLE."""
        self.read_models()
        threading.Thread(target=self._follow, name="top-watch", daemon=True).start()
        yield

    def _follow(self) -> None:
        try:
            for state, changed in follow_resources(self._home):
                if any(kind in (ResourceKind.RUNNER, ResourceKind.MODEL) for kind, _ in changed):
                    # Another thread reads it.
                    self._runners = dict(state.runners)
                    self.changed.set()
        except WeftError as error:
            self._failure = error
            self.changed.set()

    def document(self) -> dict[str, Any]:
        """Returns what is known now. Raises SERVICE_UNAVAILABLE once the mesh is gone."""
        if self._failure is not None:
            raise self._failure
        notice, running, total = "", 0, 0
        hosts: list[lease_service_pb2.HostMemory] = []
        waiting: list[RequestRecord] = []
        ended: list[RequestRecord] = []
        try:
            with connect_requests(home=self._home) as requests:
                listed = requests.under_way(MAX_SHOWN)
                waiting = [request for request in listed.requests if request.state in _WAITS]
                running, total = len(listed.requests) - len(waiting), listed.total_count
                ended = list(requests.ended(MAX_SHOWN).requests)
            hosts = hosts_of(self._home)
        except WeftError as error:
            notice = error.message
        return {
            "kind": "Top",
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "notice": notice,
            "tokensPerSecond": _speed(self._runners.values(), running),
            "requests": {"running": running, "waiting": len(waiting), "total": total},
            "devices": [device for host in hosts for device in _devices(host)],
            "models": [model for runner in self._runners.values() for model in _models(runner)],
            "queue": [_waiting(request) for request in waiting],
            "ended": [_end(request) for request in ended],
        }


def _speed(runners: Iterable[Runner], running: int) -> float | None:
    """Returns the tokens per second of all models now, as their runners see them; None: unknown."""
    speeds = [
        state.tokens_per_second
        for runner in runners
        if runner.status == Runner.STATUS_ACTIVE
        for state in runner.capability.instances
        if state.HasField("tokens_per_second")
    ]
    return sum(speeds) if speeds or not running else None


def _devices(host: lease_service_pb2.HostMemory) -> Iterator[dict[str, Any]]:
    for memory in host.devices:
        device = memory.device
        yield {
            "host": host.host,
            "name": device.name or device.id,
            "totalBytes": device.total_bytes,
            "freeBytes": memory.free_bytes,
            "utilization": device.utilization if device.HasField("utilization") else None,
        }


def _models(runner: Runner) -> Iterator[dict[str, Any]]:
    is_active = runner.status == Runner.STATUS_ACTIVE
    for state in runner.capability.instances:
        yield {
            "model": state.model,
            "runner": runner.name,
            "host": runner.host,
            "state": word_of(state, "phase") if is_active else "inactive",
            "slotsUsed": state.slots_used,
            "slotsTotal": state.slots_total,
            "memoryBytes": memory_bytes(document_of(state.memory)),
            "loadProgress": state.load_progress if state.HasField("load_progress") else None,
            "detail": state.detail,
        }


def _waiting(request: RequestRecord) -> dict[str, Any]:
    is_queued = request.HasField("queued")
    status = request.queued if is_queued else request.loading
    return {
        "id": request.request_id,
        "tenant": request.tenant,
        "target": request.target,
        "state": word_of(request, "state"),
        "position": request.queued.position if is_queued else None,
        "etaSeconds": seconds_of(status.eta) if status.HasField("eta") else None,
        "waitsFor": request.queued.reason if is_queued else request.loading.stage,
    }


def _end(request: RequestRecord) -> dict[str, Any]:
    receipt, usage = request.receipt, request.receipt.usage
    is_counted = receipt.HasField("usage")
    return {
        "id": request.request_id,
        "tenant": request.tenant,
        "target": request.target,
        "outcome": word_of(request, "reason") if request.reason else "completed",
        "tokens": [usage.prompt_tokens, usage.completion_tokens] if is_counted else None,
        "seconds": (request.end_time.ToNanoseconds() - request.arrive_time.ToNanoseconds()) / 1e9,
        "tokensPerSecond": receipt.tokens_per_second if receipt.HasField("tokens_per_second") else None,
    }


KEY_SECONDS = 0.1
"""How often keys, changes of the mesh and the size of the terminal are looked at."""
QUIT_KEYS = ("q", "Q", "\x04")


class TopScreen:
    """The page on a terminal, in place of what was there until it ends."""

    def __init__(self, source: TopSource, interval_seconds: float) -> None:
        # Pages for pipes and `--once` start without it.
        from rich.console import Console  # noqa: PLC0415

        self._source = source
        self._interval_seconds = interval_seconds
        self._console = Console(highlight=False)
        self._sort = Sort.NAME
        self._is_paused = False
        self._size = (0, 0)
        """The size of the terminal as last seen; (0, 0): unknown."""
        self._document = source.document()

    def run(self) -> None:
        """Shows the page until q, or Ctrl-C. Raises SERVICE_UNAVAILABLE once the mesh is gone."""
        from rich.live import Live  # noqa: PLC0415 - as above

        self._fit()
        with _keys_at_once(), Live(console=self._console, screen=True, auto_refresh=False) as live:
            live.update(self._render(), refresh=True)
            read_at = time.monotonic()
            while (key := _key(KEY_SECONDS)) not in QUIT_KEYS:
                pressed = self._press(key)
                waited = time.monotonic() - read_at
                is_due = waited >= self._interval_seconds or (self._source.changed.is_set() and waited >= KEY_SECONDS)
                if is_due and not self._is_paused:
                    self._source.changed.clear()
                    self._document, read_at = self._source.document(), time.monotonic()
                    pressed = True
                if self._fit() or pressed:
                    live.update(self._render(), refresh=True)

    def _fit(self) -> bool:
        """Takes the size of the terminal, and returns whether it has changed.

        The console alone would keep to COLUMNS and LINES, where those are exported.
        """
        with suppress(OSError, ValueError):
            columns, rows = os.get_terminal_size(sys.stdout.fileno())
            if columns and rows and (columns, rows) != self._size:
                # The console's own size follows the terminal until it is set, and would never differ from it.
                self._console.size = self._size = (columns, rows)
                return True
        return False

    def _press(self, key: str) -> bool:
        """Returns whether a key changes the page."""
        if key == "p":
            self._is_paused = not self._is_paused
            return True
        if key in SORTS:
            self._sort = SORTS[key]
            return True
        return False

    def _render(self) -> "RenderableType":
        from rich.text import Text  # noqa: PLC0415 - as above

        size = self._console.size
        view = View(columns=size.width, rows=size.height, sort=self._sort, is_paused=self._is_paused)
        lines = page(self._document, view)
        return Text("\n").join(Text(line.text, style=_STYLES[line.style], no_wrap=True) for line in lines)


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Reads keys as they are pressed, without echo; Ctrl-C stays a signal. Does nothing if stdin is not a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    # Not on every system.
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
    """Returns the next key, empty after `seconds` without one."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") or "q" if ready else ""
