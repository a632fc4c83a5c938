"""`weft ps`: the loaded models of every runner."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.units import size_words
from weft_app.cli.formats import moment_in, seconds_ago
from weft_app.cli.mesh_documents import Document, Processes, connect_documents, processes_of
from weft_app.cli.options import (
    DEFAULT_HOME,
    EXIT_INTERRUPTED,
    EXIT_OK,
    HomeOption,
    WatchOption,
    WideFormat,
    WideOutputOption,
    reporting,
)
from weft_app.cli.output import TEXTS, Column, Feed, Listing, document_text, say

if TYPE_CHECKING:
    from weft.documents.mesh_state import MeshState

_COLUMNS = (
    Column("MODEL", "model"),
    Column("RUNNER", "runner"),
    Column("HOST", "host"),
    Column("RUNTIME", "runtime"),
    Column("STATE", "state"),
    Column("SLOTS", lambda row: f"{row['slotsUsed']}/{row['slotsTotal']}"),
    Column("MEMORY", lambda row: size_words(row["memoryBytes"]) if row["memoryBytes"] else None),
    Column("EXPIRES", "until", ticks=True),
    Column("CONTEXT", lambda row: str(row["contextTokens"] or "-")),
    Column("PID", lambda row: str(row["pid"] or "-")),
    Column("RESTARTS", "restarts"),
)
_WIDE = (*_COLUMNS, Column("SKILLS", "skills", "commas"), Column("THINKING", "thinkingModes", "commas"))
_GONE: Mapping[str, Any] = {"state": "gone", "slotsUsed": 0, "memoryBytes": 0, "until": "-", "pid": 0}
"""What is printed of a model that is no longer on its runner."""
_UNOWNED: Document = {
    "phase": "unowned",
    "detail": "the runner no longer publishes it",
    "slotsUsed": 0,
    "slotsTotal": 0,
    "pinned": False,
}
_PROCESSES = Listing(
    columns=_COLUMNS,
    wide=_WIDE,
    kind="ProcessList",
    plural="models on runners",
    empty="no runner has a model yet; weft load hf:OWNER/REPO loads one, weft get runners lists the runners",
)


def ps(
    home: HomeOption = DEFAULT_HOME, output: WideOutputOption = WideFormat.TABLE, *, watch: WatchOption = False
) -> None:
    """Show each model on each runner: memory, how long it stays loaded, process, slots.

    With --watch, each that changes is shown again until Ctrl-C; with -o json, as one document per line.

    Example: weft ps -w
    """
    with reporting(interrupted=EXIT_OK if watch else EXIT_INTERRUPTED):
        if watch:
            ProcessWatch(output).run(home)
            return
        with connect_documents(home) as mesh:
            runners = mesh.documents(ResourceKind.RUNNER)
            processes = mesh.processes()
        _PROCESSES.print(_rows_of(runners, processes), output)


class ProcessWatch:
    """Prints each model on each runner, then each one that changes, as the registry's watch says.

    A runner is asked for its processes when what the registry knows of it has changed.
    """

    def __init__(self, output: WideFormat) -> None:
        self._output = output
        stream = replace(_PROCESSES, yaml=lambda row: document_text(row, WideFormat.YAML))
        self._feed = Feed(stream, output)
        self._known: dict[str, Any] = {}
        """What the registry knows of each runner, without its heartbeats."""
        self._shown: dict[tuple[str, str], Any] = {}
        """What was last printed, by runner and model."""

    def run(self, home: Path) -> None:
        """Prints until Ctrl-C."""
        from weft_app.cli.follow import follow_resources  # noqa: PLC0415 - as in `_news`

        following = follow_resources(home)
        state, _ = next(following)
        say(self._feed.first(self._news(state, state.runners)))
        for state, changed in following:
            for row in self._news(state, [name for kind, name in changed if kind is ResourceKind.RUNNER]):
                say(self._feed.row(row))

    def _news(self, state: "MeshState", names: Iterable[str]) -> list[dict[str, Any]]:
        """Returns the rows of runners that have changed, and those of models that are gone."""
        from weft.documents.resources import plain  # noqa: PLC0415 - only a watch is over gRPC
        from weft_app.cli.mesh_grpc import described_processes  # noqa: PLC0415 - as above

        found = {name: state.document((ResourceKind.RUNNER, name)) for name in sorted(names)}
        documents = {name: None if document is None else plain(document) for name, document in found.items()}
        asked = [document for name, document in documents.items() if document and self._is_new(name, document)]
        gone = [name for name, document in documents.items() if document is None]
        rows = _rows_of(asked, processes_of(list(described_processes(asked))))
        news = [row for row in rows if self._is_news(row)]
        left = {(row["runner"], row["model"]) for row in rows}
        looked_at = {*gone, *(document["name"] for document in asked)}
        for runner, model in sorted(self._shown):
            if runner in looked_at and (runner, model) not in left:
                news.append(self._shown.pop((runner, model))[0] | _GONE)
        for name in gone:
            self._known.pop(name, None)
        return news

    def _is_new(self, name: str, document: Document) -> bool:
        known = {key: value for key, value in document["status"].items() if key != "lastHeartbeatAt"}
        is_new = self._known.get(name) != known
        self._known[name] = known
        return is_new

    def _is_news(self, row: dict[str, Any]) -> bool:
        key, fingerprint = (row["runner"], row["model"]), self._fingerprint(row)
        is_news = key not in self._shown or self._shown[key][1] != fingerprint
        self._shown[key] = (row, fingerprint)
        return is_news

    def _fingerprint(self, row: dict[str, Any]) -> Any:
        if self._output in TEXTS:
            return self._feed.table.fingerprint(row)
        return {name: value for name, value in row.items() if name != "until"}


def _rows_of(runners: Sequence[Document], processes: Processes) -> list[dict[str, Any]]:
    """Returns one row per engine; process ids come from the runners themselves, which may be unreachable."""
    return [
        _row(runner, state, processes.get((runner["name"], state["model"]), {}))
        for runner in runners
        for state in (*runner["status"]["instances"], *_unowned(runner, processes))
    ]


def _unowned(runner: Document, processes: Processes) -> Iterator[Document]:
    """Yields what is known of the engines that a runner has started and does not publish any more."""
    published = {state["model"] for state in runner["status"]["instances"]}
    for (name, model), process in processes.items():
        if name == runner["name"] and model not in published and process.get("processId"):
            yield _UNOWNED | {"model": model}


def _row(runner: Document, state: Document, process: Document) -> dict[str, Any]:
    status, abilities = runner["status"], state.get("abilities", {})
    return {
        "model": state["model"],
        "runner": runner["name"],
        "host": status["host"],
        "runtime": state.get("runtime") or status["runtime"],
        "state": state["phase"] if status["state"] == "active" else "inactive",
        "detail": state.get("detail", ""),
        "slotsUsed": len(process["activeRequestIds"]) if "activeRequestIds" in process else state["slotsUsed"],
        "slotsTotal": state["slotsTotal"],
        "memoryBytes": memory_bytes(state.get("memory", {})),
        "deviceIndexes": state.get("memory", {}).get("deviceIndexes", []),
        "pinned": state["pinned"],
        "unloadAt": moment_in(state["unloadAt"]).isoformat() if "unloadAt" in state else None,
        "until": until_text(state) or "-",
        "contextTokens": state.get("contextTokens", 0),
        "skills": abilities.get("skills", []),
        "thinkingModes": abilities.get("thinkingModes", []),
        "pid": process.get("processId", 0),
        "restarts": process.get("restartCount", 0),
    }


def until_text(state: Document) -> str | None:
    """Returns how long a model stays loaded, as text such as "4m"; None: it is not ready."""
    if state["phase"] != "ready":
        return None
    if state["pinned"]:
        return "pinned"
    if "unloadAt" not in state:
        # It is not counted down while it works on a request.
        kept = state.get("keepAliveSeconds")
        return "never" if kept is None else f"{_short(kept)} when idle"
    return seconds_ago(max(0.0, (moment_in(state["unloadAt"]) - datetime.now(UTC)).total_seconds()))


def _short(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 60 else seconds_ago(seconds)


def memory_bytes(memory: Document) -> int:
    """Returns memory that a model holds: of accelerators as observed, else as leased; without them, main memory."""
    leased = memory.get("leasedBytes", 0)
    return int((memory.get("measuredBytes", leased) if leased else memory.get("residentBytes")) or 0)
