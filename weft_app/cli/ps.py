"""`weft ps`: the loaded models of every runner."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.values.units import size_words
from weft_app.cli.columns import without_heartbeat
from weft_app.cli.follow import RecordChanges, follow
from weft_app.cli.mesh_api import Document, MeshApi, connect
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
from weft_app.cli.output import Listing, custom_columns, document_text, moment_in, seconds_ago

Processes = Mapping[tuple[str, str], Document]
"""Processes of engines (`processId`, `restartCount`) by runner and model."""
_COLUMNS = custom_columns(
    "MODEL:model RUNNER:runner HOST:host? RUNTIME:runtime? STATE:state SLOTS MEMORY EXPIRES:until~ CONTEXT PID? "
    "RESTARTS:restarts?",
    SLOTS=lambda row: f"{row['slotsUsed']}/{row['slotsTotal']}",
    MEMORY=lambda row: size_words(row["memoryBytes"]) if row["memoryBytes"] else None,
    CONTEXT=lambda row: str(row["contextTokens"] or "-"),
    PID=lambda row: str(row["pid"] or "-"),
)
_WIDE = _COLUMNS + custom_columns(
    "SKILLS:skills:commas THINKING:thinkingModes:commas KEPT_PROMPTS STORED_PROMPTS",
    KEPT_PROMPTS=lambda row: _saved(row, "kept"),
    STORED_PROMPTS=lambda row: _saved(row, "stored"),
)
_GONE: Mapping[str, Any] = {"state": "gone", "slotsUsed": 0, "memoryBytes": 0, "until": "-", "pid": 0}
"""Fields of a model that is no longer on its runner."""
_PASSING = frozenset({"until", "cache"})
"""Fields whose change alone is not shown by a watch: they change with every request."""
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
    name=lambda row: f"{row['runner']}/{row['model']}",
    lasting=lambda row: {name: value for name, value in row.items() if name not in _PASSING},
    plural="models on runners",
    empty="no runner has a model yet; weft load hf:OWNER/REPO loads one, weft get runners lists the runners",
)


def ps(
    home: HomeOption = DEFAULT_HOME, output: WideOutputOption = WideFormat.TABLE, *, watch: WatchOption = False
) -> None:
    """Show each model on each runner: memory, how long it stays loaded, process, slots.

    With --watch, each model that changes is printed again until Ctrl-C; with -o json, as one document per line.

    Example: weft ps -w
    """
    with reporting(interrupted=EXIT_OK if watch else EXIT_INTERRUPTED):
        if watch:
            _watch(home, output)
            return
        with connect(home) as mesh:
            runners = mesh.documents(ResourceKind.RUNNER)
            models = _models(mesh)
        _PROCESSES.print(rows_of(runners, models), output)


def _watch(home: Path, output: WideFormat) -> None:
    """Prints each model on each runner, then each change, until Ctrl-C.

    Asks runners for processes when the registry reports a change.
    """
    stream = replace(_PROCESSES, yaml=lambda row: document_text(row, WideFormat.YAML))
    changes = RecordChanges(stream, output, last_row=lambda row: row | _GONE)
    known = None
    for state, _ in follow(home, (ResourceKind.RUNNER.value,)):
        runners = sorted(state[ResourceKind.RUNNER.value].values(), key=lambda runner: str(runner["name"]))
        now = [without_heartbeat(runner) for runner in runners]
        if now != known:
            known = now
            with connect(home) as mesh:
                changes.all(rows_of(runners, _models(mesh)))


def _models(mesh: MeshApi) -> Document:
    """Returns the models with the processes of engines that runners report; without any if they are not known."""
    with suppress(WeftError):
        return dict(mesh.get("/v1/admin/models"))
    return {"items": []}


def rows_of(runners: Sequence[Document], models: Document) -> list[dict[str, Any]]:
    """Returns one row per engine; process ids come from the runners, which may be unreachable: `/v1/admin/models`."""
    replicas = [each for model in models["items"] for each in model["replicas"]["members"]]
    reported = (*replicas, *models.get("unowned", ()))
    processes: Processes = {(each.get("runner", ""), each["model"]): each for each in reported}
    return [
        _row(runner, state, processes.get((runner["name"], state["model"]), {}))
        for runner in runners
        for state in (*runner["status"]["instances"], *_unowned(runner, processes))
    ]


def _unowned(runner: Document, processes: Processes) -> Iterator[Document]:
    """Yields the engines that a runner has started but no longer publishes."""
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
        "cache": process.get("cache"),
    }


def _saved(row: Mapping[str, Any], where: str) -> str | None:
    """Returns number, size and limit of a model's saved prompts, such as "3: 57 MiB of 1 GiB"; None: none are saved."""
    cache = row["cache"] or {}
    is_able = cache.get("keptLimitBytes") or cache.get("storedPromptCount")
    if not is_able or not cache[f"{where}LimitBytes"]:
        return None
    size, limit = (size_words(cache[f"{where}{end}"]) for end in ("Bytes", "LimitBytes"))
    return f"{cache[f'{where}PromptCount']}: {size} of {limit}"


def until_text(state: Document) -> str | None:
    """Returns how long a model stays loaded, such as "4m"; None: it is not ready."""
    if state["phase"] != "ready":
        return None
    if state["pinned"]:
        return "pinned"
    if "unloadAt" not in state:
        # The countdown is paused during a request.
        kept = state.get("keepAliveSeconds")
        return "never" if kept is None else f"{(f'{kept:.1f}s' if kept < 60 else seconds_ago(kept))} when idle"
    return seconds_ago(max(0.0, (moment_in(state["unloadAt"]) - datetime.now(UTC)).total_seconds()))


def memory_bytes(memory: Document) -> int:
    """Returns a model's memory: of accelerators as observed, else as leased; without them, main memory."""
    leased = memory.get("leasedBytes", 0)
    return int((memory.get("measuredBytes", leased) if leased else memory.get("residentBytes")) or 0)
