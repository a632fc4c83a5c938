"""`weft ps`: the loaded models of every runner."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration

from weft.api.registry.v1.runner_pb2 import InstanceState, Runner
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.client.resources import connect_registry, describe_runner
from weft.documents.codec import moment_of, word_of
from weft.documents.mesh_state import MeshState
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import RunnerDocument
from weft.kernel.abilities import abilities_of, mode_words, skill_words
from weft.kernel.units import size_words
from weft_app.cli.follow import follow_resources
from weft_app.cli.formats import seconds_ago
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

MAX_ASKED_AT_ONCE = 16
"""Runners queried at once; one that does not answer must not delay the others."""

_COLUMNS = (
    Column("MODEL", lambda row: row["model"]),
    Column("RUNNER", lambda row: row["runner"]),
    Column("HOST", lambda row: row["host"]),
    Column("RUNTIME", lambda row: row["runtime"]),
    Column("STATE", lambda row: row["state"]),
    Column("SLOTS", lambda row: f"{row['slotsUsed']}/{row['slotsTotal']}"),
    Column("MEMORY", lambda row: size_words(row["memoryBytes"]) if row["memoryBytes"] else "-"),
    Column("EXPIRES", lambda row: row["until"], ticks=True),
    Column("CONTEXT", lambda row: str(row["contextTokens"] or "-")),
    Column("PID", lambda row: str(row["pid"] or "-")),
    Column("RESTARTS", lambda row: str(row["restarts"])),
)
_WIDE = (
    *_COLUMNS,
    Column("SKILLS", lambda row: ",".join(row["skills"]) or "-"),
    Column("THINKING", lambda row: ",".join(row["thinkingModes"]) or "-"),
)
_GONE: Mapping[str, Any] = {"state": "gone", "slotsUsed": 0, "memoryBytes": 0, "until": "-", "pid": 0}
"""What is printed of a model that is no longer on its runner."""
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
        with connect_registry(home=home) as registry:
            runners = [one for one in registry.documents(ResourceKind.RUNNER) if isinstance(one, RunnerDocument)]
        _PROCESSES.print(_rows_of(runners), output)


def _rows_of(runners: Sequence[RunnerDocument]) -> list[dict[str, Any]]:
    if len(runners) <= 1:
        return [row for runner in runners for row in _rows(runner)]
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - a mesh of one runner starts without it

    with ThreadPoolExecutor(MAX_ASKED_AT_ONCE) as pool:
        return [row for rows in pool.map(lambda runner: list(_rows(runner)), runners) for row in rows]


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
        following = follow_resources(home)
        state, _ = next(following)
        say(self._feed.first(self._news(state, state.runners)))
        for state, changed in following:
            for row in self._news(state, [name for kind, name in changed if kind is ResourceKind.RUNNER]):
                say(self._feed.row(row))

    def _news(self, state: MeshState, names: Iterable[str]) -> list[dict[str, Any]]:
        """Returns the rows of runners that have changed, and those of models that are gone."""
        documents = {name: state.document((ResourceKind.RUNNER, name)) for name in sorted(names)}
        asked = [
            document
            for name, document in documents.items()
            if isinstance(document, RunnerDocument) and self._is_new(name, document)
        ]
        gone = [name for name, document in documents.items() if document is None]
        rows = _rows_of(asked)
        news = [row for row in rows if self._is_news(row)]
        left = {(row["runner"], row["model"]) for row in rows}
        looked_at = {*gone, *(document.name for document in asked)}
        for runner, model in sorted(self._shown):
            if runner in looked_at and (runner, model) not in left:
                news.append(self._shown.pop((runner, model))[0] | _GONE)
        for name in gone:
            self._known.pop(name, None)
        return news

    def _is_new(self, name: str, document: RunnerDocument) -> bool:
        known = Runner()
        known.CopyFrom(document.observed or known)
        known.ClearField("last_heartbeat_time")
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


def _rows(runner: RunnerDocument) -> Iterator[dict[str, Any]]:
    """Yields one row per instance; process ids come from the runner itself, which may be unreachable."""
    status = runner.observed
    if status is None:
        return
    active = status.status == Runner.STATUS_ACTIVE
    description = describe_runner(status.address) if active else None
    described = {instance.model: instance for instance in description.instances} if description else {}
    for state in status.capability.instances:
        yield _row(status, state, described.pop(state.model, None), word_of(state, "phase") if active else "inactive")
    for instance in described.values():
        if instance.process_id:
            unknown = InstanceState(model=instance.model, detail="the runner no longer publishes it")
            yield _row(status, unknown, instance, "unowned")


def _row(runner: Runner, state: InstanceState, instance: pb.InstanceDescription | None, word: str) -> dict[str, Any]:
    """Returns the row of an instance; `word`: its state."""
    unload_at, abilities = moment_of(state, "unload_time"), abilities_of(state.abilities)
    return {
        "model": state.model,
        "runner": runner.name,
        "host": runner.host,
        "runtime": state.runtime or runner.runtime,
        "state": word,
        "detail": state.detail,
        "slotsUsed": len(instance.active_request_ids) if instance is not None else state.slots_used,
        "slotsTotal": state.slots_total,
        "memoryBytes": memory_bytes(state),
        "deviceIndexes": list(state.memory.device_indexes),
        "pinned": state.pinned,
        "unloadAt": None if unload_at is None else unload_at.isoformat(),
        "until": until_text(state) or "-",
        "contextTokens": state.context_tokens,
        "skills": skill_words(abilities.skills),
        "thinkingModes": mode_words(abilities.thinking_modes),
        "pid": instance.process_id if instance is not None else 0,
        "restarts": instance.restart_count if instance is not None else 0,
    }


def until_text(state: InstanceState) -> str | None:
    """Returns how long a model stays loaded, as text such as "4m"; None: it is not ready."""
    unload_at = moment_of(state, "unload_time")
    if state.phase != InstanceState.PHASE_READY:
        return None
    if state.pinned:
        return "pinned"
    if unload_at is None:
        # It is not counted down while it works on a request.
        return f"{_seconds(state.keep_alive)} when idle" if state.HasField("keep_alive") else "never"
    return seconds_ago(max(0.0, (unload_at - datetime.now(UTC)).total_seconds()))


def _seconds(duration: Duration) -> str:
    seconds = duration.ToNanoseconds() / 1e9
    return f"{seconds:.1f}s" if seconds < 60 else seconds_ago(seconds)


def memory_bytes(state: InstanceState) -> int:
    """Returns memory that it holds: of accelerators as observed, else as leased; without them, main memory."""
    memory = state.memory
    if not memory.leased_bytes:
        return memory.resident_bytes
    return memory.measured_bytes if memory.HasField("measured_bytes") else memory.leased_bytes
