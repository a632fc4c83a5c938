"""`weft ps`: the loaded models of every runner."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weft.api.registry.v1.runner_pb2 import InstanceState, Runner
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.client.resources import connect_registry, describe_runner
from weft.documents.codec import moment_of, word_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import RunnerDocument
from weft.kernel.abilities import abilities_of, mode_words, skill_words
from weft.kernel.units import size_words
from weft_app.cli.description import until_text
from weft_app.cli.options import DEFAULT_HOME, HomeOption, WideFormat, WideOutputOption
from weft_app.cli.output import Column, Listing

MAX_ASKED_AT_ONCE = 16
"""Runners queried at once; one that does not answer must not delay the others."""

_COLUMNS = (
    Column("MODEL", lambda row: row["model"]),
    Column("RUNNER", lambda row: row["runner"]),
    Column("HOST", lambda row: row["host"]),
    Column("RUNTIME", lambda row: row["runtime"]),
    Column("STATE", lambda row: row["state"]),
    Column("SLOTS", lambda row: f"{row['slotsUsed']}/{row['slotsTotal']}"),
    Column("VRAM", lambda row: size_words(row["memoryBytes"]) if row["memoryBytes"] else "-"),
    Column("UNTIL", lambda row: row["until"], ticks=True),
    Column("CONTEXT", lambda row: str(row["contextTokens"] or "-")),
    Column("PID", lambda row: str(row["pid"] or "-")),
    Column("RESTARTS", lambda row: str(row["restarts"])),
)
_WIDE = (
    *_COLUMNS,
    Column("SKILLS", lambda row: ",".join(row["skills"]) or "-"),
    Column("THINKING", lambda row: ",".join(row["thinkingModes"]) or "-"),
)
_PROCESSES = Listing(columns=_COLUMNS, wide=_WIDE, kind="ProcessList")


def ps(home: HomeOption = DEFAULT_HOME, output: WideOutputOption = WideFormat.TABLE) -> None:
    """Show each model on each runner: memory, how long it stays loaded, process, slots.

    Example: weft ps
    """
    with connect_registry(home=home) as registry:
        runners = [one for one in registry.documents(ResourceKind.RUNNER) if isinstance(one, RunnerDocument)]
    with ThreadPoolExecutor(MAX_ASKED_AT_ONCE) as pool:
        rows = [row for processes in pool.map(lambda runner: list(_rows(runner)), runners) for row in processes]
    _PROCESSES.print(rows, output)


def _rows(runner: RunnerDocument) -> Iterator[dict[str, Any]]:
    """Yields one row per instance; process ids come from the runner itself, which may be unreachable."""
    status = runner.observed
    if status is None:
        return
    active = status.status == Runner.STATUS_ACTIVE
    description = describe_runner(status.address) if active else None
    described = {instance.model: instance for instance in description.instances} if description else {}
    for state in status.capability.instances:
        yield _row(status, state, described.pop(state.model, None), word_of(state, "phase") if active else "gone")
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
        "runtime": runner.runtime,
        "state": word,
        "detail": state.detail,
        "slotsUsed": len(instance.active_request_ids) if instance is not None else state.slots_used,
        "slotsTotal": state.slots_total,
        "memoryBytes": _memory_bytes(state),
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


def _memory_bytes(state: InstanceState) -> int:
    """Returns memory that it holds: as observed, else as leased."""
    memory = state.memory
    if not memory.leased_bytes:
        return 0
    return memory.measured_bytes if memory.HasField("measured_bytes") else memory.leased_bytes
