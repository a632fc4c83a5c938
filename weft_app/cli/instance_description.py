"""What `weft describe` prints about a model's instance: its process, its restarts, its requests, its log."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from google.protobuf import duration_pb2, timestamp_pb2

from weft.api.common.v1 import error_reason_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.documents.statuses import InstanceStatus
from weft_app.cli.columns import ago
from weft_app.cli.memory_description import PARAMETER_COLUMNS, cache_facts, memory_words, until_words
from weft_app.cli.output import Column, TextTable, safe_text, seconds_ago

KEY_CHARS = 13
INDENT = "  "
SHOWN_REQUESTS = 10


def reason_name(reason: int) -> str:
    """A reason as it is written everywhere: lower case, without its prefix; its number when this weft is older."""
    names: dict[int, str] = {number: name for name, number in error_reason_pb2.ErrorReason.items()}
    return names.get(reason, f"reason {reason}").removeprefix("ERROR_REASON_").lower()


def moment(time: timestamp_pb2.Timestamp) -> datetime:
    """A time of a message, UTC."""
    return time.ToDatetime(tzinfo=UTC)


def _seconds(duration: duration_pb2.Duration) -> str:
    seconds = duration.ToNanoseconds() / 1e9
    return f"{seconds:.1f}s" if seconds < 60 else seconds_ago(seconds)


def _state(record: pb.RequestRecord) -> str:
    names: dict[int, str] = {number: name for name, number in pb.RequestRecord.State.items()}
    name = names.get(record.state, f"state {record.state}").removeprefix("STATE_").lower().replace("_", " ")
    return f"{name}: {reason_name(record.reason)}" if record.reason else name


def _tool_turns(record: pb.RequestRecord) -> str:
    return str(record.tool_iterations_left) if record.HasField("tool_iterations_left") else "-"


_RESTART_COLUMNS = (
    Column("AGE", lambda restart: ago(moment(restart.time))),
    Column("REASON", lambda restart: reason_name(restart.reason)),
    Column("RECOVERED", lambda restart: _seconds(restart.recovery) if restart.HasField("recovery") else "not yet"),
    Column("DETAIL", lambda restart: restart.detail),
)
_REQUEST_COLUMNS = (
    Column("REQUEST", lambda record: record.request_id),
    Column("STATE", _state),
    Column("AGE", lambda record: ago(moment(record.start_time))),
    Column("LAST PROGRESS", lambda record: ago(moment(record.last_progress_time))),
    Column("CHARACTERS", lambda record: str(record.output_chars)),
    Column("TOOL TURNS LEFT", _tool_turns),
    Column("SIGNALS", lambda record: ",".join(signal.name for signal in record.signals)),
)
_TIMEOUTS = (
    "connect",
    "headers",
    "first_token",
    "prefill_liveness",
    "idle_stream",
    "absolute",
    "probe_interval",
)


def instance_lines(state: InstanceStatus, described: pb.InstanceDescription | None) -> Iterator[str]:
    """An instance as its runner reports it to the mesh, and as it describes it when asked (None: it cannot be)."""
    loaded = f" ({state.load_progress:.0%})" if state.load_progress is not None and state.phase == "loading" else ""
    yield _fact("Phase", f"{state.phase}{loaded}")
    if state.detail:
        yield _fact("Detail", state.detail)
    yield _fact("Slots", f"{state.slots_used} of {state.slots_total} in use")
    if state.memory is not None:
        yield _fact("Memory", memory_words(state.memory))
    if state.phase == "ready":
        yield _fact("Stays loaded", until_words(state.unload_at, pinned=state.pinned))
    if described is None:
        if state.fault_count:
            yield _fact("Restarts", f"{state.fault_count}, the last time because: {state.last_fault or 'unknown'}")
        yield _fact("Process", "its runner cannot be asked")
        return
    yield from _process(described)
    yield from (_fact(title, text) for title, text in cache_facts(described))
    yield from _table("May be set for a load", PARAMETER_COLUMNS, described.load_parameters)
    yield from _table("Restarts", _RESTART_COLUMNS, described.restarts)
    yield from _table("Requests", _REQUEST_COLUMNS, described.requests[-SHOWN_REQUESTS:])
    yield from _lines("Before the last crash", described.last_crash_lines)
    yield from _lines("Log", described.log_lines)


def _process(described: pb.InstanceDescription) -> Iterator[str]:
    process = str(described.process_id) if described.process_id else "none"
    held = f", held together by {described.containment}" if described.process_id and described.containment else ""
    yield _fact("Process", process + held)
    if described.HasField("last_ready_time"):
        yield _fact("Last ready", ago(moment(described.last_ready_time)))
    why = f", the last time because: {described.last_restart_reason}" if described.last_restart_reason else ""
    yield _fact("Restarts", f"{described.restart_count}{why}")
    if described.HasField("timeouts"):
        yield _fact("Timeouts", ", ".join(_timeouts(described.timeouts)))


def _timeouts(profile: pb.TimeoutProfile) -> Iterator[str]:
    for name in _TIMEOUTS:
        limit = _seconds(getattr(profile, name)) if profile.HasField(name) else "off"  # type: ignore[arg-type]  # fields
        yield f"{name.replace('_', ' ')} {limit}"


def _table(title: str, columns: Sequence[Column], rows: Sequence[object]) -> Iterator[str]:
    if rows:
        yield f"{title}:"
        yield from (f"{INDENT}{line}" for line in TextTable(columns).plain_text(rows).splitlines())


def _lines(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"{title}:"
        yield from (f"{INDENT}{safe_text(line)}" for line in lines)


def _fact(key: str, value: str) -> str:
    return f"{key}:".ljust(KEY_CHARS) + f" {safe_text(value)}"
