"""The text and JSON that `weft describe` prints, from collected facts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.json_format import MessageToDict

from weft.api.common.v1 import error_reason_pb2
from weft.api.common.v1.agent_behaviour_pb2 import AgentBehaviour
from weft.api.registry.v1.agent_pb2 import Agent
from weft.api.registry.v1.event_pb2 import Event
from weft.api.registry.v1.model_pb2 import Model
from weft.api.registry.v1.route_pb2 import Route
from weft.api.registry.v1.runner_pb2 import InstanceMemory, InstanceState, Runner
from weft.api.runner.v1 import runner_service_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1.load_pb2 import LoadParameter
from weft.documents.codec import document_of, moment_of, seconds_of, without_defaults, word_of
from weft.documents.resources import (
    AgentDocument,
    AnyDocument,
    ModelDocument,
    PoolDocument,
    RouteDocument,
    RunnerDocument,
    plain,
)
from weft.kernel.units import size_words
from weft_app.cli.columns import ago, context_tokens, keep_alive_text, who_wakes
from weft_app.cli.output import INDENT, Column, TextTable, fact, safe_text, seconds_ago

SHOWN_REQUESTS = 10


def reason_name(reason: int) -> str:
    """Returns a reason's published name in lower case; its number when this release does not know it."""
    names: dict[int, str] = {number: name for name, number in error_reason_pb2.ErrorReason.items()}
    return names.get(reason, f"reason {reason}").removeprefix("ERROR_REASON_").lower()


def moment(time: timestamp_pb2.Timestamp) -> datetime:
    """Returns a timestamp as text, UTC."""
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


def instance_lines(state: InstanceState, described: pb.InstanceDescription | None) -> Iterator[str]:
    """Yields an instance as reported in heartbeats, and as its runner describes it on request (None: unreachable)."""
    is_loading = state.phase == InstanceState.PHASE_LOADING and state.HasField("load_progress")
    loaded = f" ({state.load_progress:.0%})" if is_loading else ""
    yield fact("Phase", f"{word_of(state, 'phase')}{loaded}")
    if state.detail:
        yield fact("Detail", state.detail)
    yield fact("Slots", f"{state.slots_used} of {state.slots_total} in use")
    if state.HasField("memory"):
        yield fact("Memory", memory_text(state.memory))
    if state.phase == InstanceState.PHASE_READY:
        yield fact("Stays loaded", until_text(moment_of(state, "unload_time"), pinned=state.pinned))
    if described is None:
        if state.fault_count:
            yield fact("Restarts", f"{state.fault_count}; last reason: {state.last_fault.detail or 'unknown'}")
        yield fact("Process", "its runner is unreachable")
        return
    yield from _process(described)
    yield from (fact(title, text) for title, text in cache_facts(described))
    yield from _table("May be set for a load", PARAMETER_COLUMNS, described.load_parameters)
    yield from _table("Restarts", _RESTART_COLUMNS, described.restarts)
    yield from _table("Requests", _REQUEST_COLUMNS, described.requests[-SHOWN_REQUESTS:])
    yield from _lines("Before the last crash", described.last_crash_lines)
    yield from _lines("Log", described.log_lines)


def _process(described: pb.InstanceDescription) -> Iterator[str]:
    process = str(described.process_id) if described.process_id else "none"
    held = f", contained by {described.containment}" if described.process_id and described.containment else ""
    yield fact("Process", process + held)
    if described.HasField("last_ready_time"):
        yield fact("Last ready", ago(moment(described.last_ready_time)))
    why = f"; last reason: {described.last_restart_reason}" if described.last_restart_reason else ""
    yield fact("Restarts", f"{described.restart_count}{why}")
    if described.HasField("timeouts"):
        yield fact("Timeouts", ", ".join(_timeouts(described.timeouts)))


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


_ISOLATION_WORDS = {
    "slots": "each slot is one tenant's at a time",
    "whole": "the whole cache is one tenant's at a time",
    "salt": "the server is given a salt per tenant",
    "none": "none: the server shares its cache among tenants",
}


def _range(parameter: LoadParameter) -> str:
    document = document_of(parameter)
    if parameter.words:
        return ", ".join(parameter.words)
    low, high = document.get("minimum"), document.get("maximum")
    if parameter.flag or (low is None and high is None):
        return "true, false" if parameter.flag else str(document["type"])
    return f"{'' if low is None else f'{low:.15g}'} to {'' if high is None else f'{high:.15g}'}".strip()


PARAMETER_COLUMNS = (
    Column("NAME", lambda parameter: parameter.name),
    Column("MAY BE", _range),
    Column("NOW", lambda parameter: str(document_of(parameter).get("default", "engine's own"))),
    Column("MEANING", lambda parameter: parameter.description),
)


def cache_facts(described: pb.InstanceDescription) -> Iterator[tuple[str, str]]:
    """Yields facts about a model's prefix cache, as titles and texts."""
    isolation = pb.CacheIsolation.Name(described.cache_isolation).removeprefix("CACHE_ISOLATION_").lower()
    cache = described.cache
    asked = cache.hit_count + cache.miss_count
    if asked:
        share = cache.cached_token_count / max(1, cache.prompt_token_count)
        yield ("Prefix cache", f"{cache.hit_count} of {asked} requests hit, {share:.0%} of prompt tokens cached")
    if described.cache_isolation:
        yield ("Tenants apart", _ISOLATION_WORDS.get(isolation, isolation))
    if described.quantizations:
        yield ("Quantizations", ", ".join(described.quantizations))


def memory_text(memory: InstanceMemory) -> str:
    """Returns the accelerator memory that a model holds and would take."""
    if memory.leased_bytes:
        devices = ", ".join(map(str, memory.device_indexes))
        measured = f", {size_words(memory.measured_bytes)} seen" if memory.HasField("measured_bytes") else ""
        return f"{size_words(memory.leased_bytes)} leased on device {devices}{measured}"
    if memory.estimated_bytes:
        return f"none held; would take {size_words(memory.estimated_bytes)} (from: {memory.estimate_source})"
    return "none held"


def until_text(unload_at: datetime | None, *, pinned: bool) -> str:
    """Returns how long a model stays loaded, as text."""
    if pinned:
        return "pinned"
    if unload_at is None:
        return "never"
    left = max(0.0, (unload_at - datetime.now(UTC)).total_seconds())
    return f"for {seconds_ago(left)}"


_CONDITION_COLUMNS = (
    Column("TYPE", lambda condition: condition.type),
    Column("STATUS", lambda condition: condition.status),
    Column("REASON", lambda condition: condition.reason),
    Column("MESSAGE", lambda condition: condition.message),
)
_EVENT_COLUMNS = (
    Column("AGE", lambda event: ago(moment(event.time))),
    Column("REASON", lambda event: word_of(event, "reason")),
    Column("MESSAGE", lambda event: event.message),
)


@dataclass(frozen=True, slots=True)
class Rung:
    """One candidate of a route."""

    name: str
    state: str
    """Its state as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A resource and everything related to it."""

    document: AnyDocument
    pool: PoolDocument | None
    """The pool that the resource is, belongs to, or points to."""
    agents: Sequence[AgentDocument]
    """The agents that point to it."""
    routes: Sequence[RouteDocument] = ()
    """Routes that name it or its pool."""
    rungs: Sequence[Rung] = ()
    """Candidates of a route, best first."""
    runner: runner_service_pb2.DescribeResponse | None
    """Its runner's own description; None: unreachable."""
    events: Sequence[Event]
    """Its recent events, oldest first."""


def description(facts: Facts) -> str:
    """Returns all facts as text."""
    lines = [
        *_header(facts.document),
        *_ladder(facts.rungs),
        *_pool(facts),
        *_conditions(facts.document),
        *_instances(facts),
    ]
    lines += [*_prompt(facts.document), *_users(facts), *_events(facts.events)]
    return "\n".join(lines) + "\n"


def facts_document(facts: Facts) -> dict[str, Any]:
    """Returns all facts as JSON types: the resource, its events, and its runner's own description."""
    described = None if facts.runner is None else MessageToDict(facts.runner)
    return {
        "resource": plain(facts.document),
        "events": [document_of(event) for event in facts.events],
        "runner": described,
    }


def _header(document: AnyDocument) -> Iterator[str]:
    yield fact("Name", document.name)
    match document:
        case ModelDocument():
            yield from _model(document)
        case AgentDocument():
            yield from _agent(document)
        case RunnerDocument():
            yield from _runner(document)
        case PoolDocument():
            yield fact("Kind", "pool, named by its members" if _explicit(document) else "pool of one model")
        case RouteDocument():
            yield from _route(document)


def _model(model: ModelDocument) -> Iterator[str]:
    observed = model.observed
    if observed is None:
        return
    declared = document_of(model.declared)
    yield fact("Kind", f"{word_of(observed, 'kind')} model")
    yield fact("Status", model.state)
    yield fact("Runner", observed.runner or "none")
    if model.declared.runner:
        yield fact("Pinned to", model.declared.runner)
    yield fact("Operations", ", ".join(declared["operations"]) or "none")
    yield fact("Context", str(context_tokens(model) or "unknown until loaded"))
    yield fact("Digest", model.manifest.digest or "-")
    yield fact("Remote", "yes, it leaves the premises" if model.manifest.remote else "no")
    yield fact("Skills", ", ".join(declared["skills"]) or "unknown")
    wakers = who_wakes(model)
    longest = f", at most {declared['wake']['maxWaitSeconds']:g} s" if wakers else ""
    yield fact("Woken by", f"{', '.join(wakers)}{longest}" if wakers else "it never sleeps")
    yield from _times(observed)


def _agent(agent: AgentDocument) -> Iterator[str]:
    observed, manifest = agent.observed, agent.declared
    if observed is None:
        return
    yield fact("Kind", f"{word_of(observed, 'kind')} agent")
    yield fact("Status", agent.state)
    yield fact("Answers", f"pool/{manifest.pool}" if manifest.pool else f"model/{manifest.model}")
    yield fact("Ask for", f"agent/{agent.name}")
    yield fact("Description", manifest.description or "-")
    params = without_defaults(manifest.default_params)
    yield fact(
        "Parameters",
        ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in params.items()) or "-",
    )
    yield from _behaviour(manifest.behaviour)
    if observed.runner:
        yield fact("Runner", observed.runner)
    yield from _times(observed)


def _behaviour(agent: AgentBehaviour) -> Iterator[str]:
    """What the mesh does around the chats of an agent; empty for the default."""
    if agent.platform_prompt:
        yield fact("Platform", "the platform prompt comes first")
    is_limited = agent.HasField("max_tool_iterations")
    if agent.tools or is_limited:
        limit = f" (at most {agent.max_tool_iterations} further turns)" if is_limited else ""
        yield fact("Tools", (", ".join(agent.tools) or "those of the model") + limit)
    if agent.HasField("parse_text_tool_calls") and not agent.parse_text_tool_calls:
        yield fact("Text calls", "not parsed as calls")
    if agent.signals:
        stops = agent.stop_on_decision_request or not agent.HasField("stop_on_decision_request")
        going_on = "" if stops else " (a question for a decision does not end the answer)"
        yield fact("Signals", ", ".join(agent.signals) + going_on)
    if agent.repetition_policy:
        yield fact("Repetition", word_of(agent, "repetition_policy"))


def _route(route: RouteDocument) -> Iterator[str]:
    if route.observed is None:
        return
    manifest = route.declared
    yield fact("Kind", "route")
    yield fact("Status", route.state)
    yield fact("Ask for", f"route/{route.name}")
    yield fact("Description", manifest.description or "-")
    if manifest.pin_primary:
        yield fact("Pinned", "the primary is waited for while it is there")
    budget, keep_alive = seconds_of(manifest, "budget"), seconds_of(manifest, "keep_alive")
    yield fact("Budget", "none" if budget is None else f"{budget:g} s")
    yield fact("Kept loaded", "as the model is configured" if keep_alive is None else keep_alive_text(keep_alive))
    yield from _times(route.observed)


def _runner(runner: RunnerDocument) -> Iterator[str]:
    status = runner.observed
    if status is None:
        return
    yield fact("Kind", f"{'dial-out' if status.dial_out else 'direct'} runner")
    yield fact("Status", runner.state)
    yield fact("Host", status.host or "-")
    yield fact("Runtime", status.runtime or "-")
    yield fact("Version", status.version or "-")
    yield fact("Address", status.address or "-")
    yield fact("Incarnation", status.incarnation)
    most = status.capability.max_requests
    yield fact("At once", f"{most} requests" if most else "as many as it has slots")
    yield from _times(status)


_TIMES = (("Created", "create_time"), ("Heartbeat", "last_heartbeat_time"), ("Gone since", "inactive_time"))


def _times(observed: Model | Agent | Runner | Route) -> Iterator[str]:
    for key, field in _TIMES:
        time = moment_of(observed, field) if field in observed.DESCRIPTOR.fields_by_name else None
        if time is not None:
            yield fact(key, f"{time:%Y-%m-%d %H:%M:%S} UTC ({ago(time)})")


def _pool(facts: Facts) -> Iterator[str]:
    """Yields the pool block, where it adds to the resource itself."""
    pool = None if facts.pool is None else facts.pool.observed
    if pool is None:
        return
    alone = not pool.explicit and pool.size <= 1
    if alone and not isinstance(facts.document, PoolDocument):
        return
    yield "Pool:"
    yield f"{INDENT}Pool name: {pool.name}"
    yield f"{INDENT}Members:   {pool.size} ({pool.active_count} active)"
    for member in pool.members:
        name = member.manifest.name
        this = isinstance(facts.document, ModelDocument) and name == facts.document.name
        mark = " ← this row" if this else ""
        yield f"{INDENT * 2}- {name} [{word_of(member, 'kind')}/{word_of(member, 'status')}]{mark}"


def _conditions(document: AnyDocument) -> Iterator[str]:
    if document.conditions:
        yield "Conditions:"
        yield from _indented(TextTable(_CONDITION_COLUMNS).plain_text(document.conditions))


def _instances(facts: Facts) -> Iterator[str]:
    match facts.document:
        case ModelDocument(instance=InstanceState() as instance):
            yield "Instance:"
            yield from _instance(instance, facts.runner)
        case RunnerDocument(observed=Runner() as runner) if runner.capability.instances:
            yield "Instances:"
            for instance in runner.capability.instances:
                yield f"{INDENT}{instance.model}:"
                yield from (f"{INDENT}{line}" for line in _instance(instance, facts.runner))


def _instance(state: InstanceState, runner: runner_service_pb2.DescribeResponse | None) -> Iterator[str]:
    described = next((one for one in runner.instances if one.model == state.model), None) if runner else None
    return (f"{INDENT}{line}" for line in instance_lines(state, described))


def _prompt(document: AnyDocument) -> Iterator[str]:
    if isinstance(document, AgentDocument) and document.declared.system_prompt:
        yield "System prompt:"
        yield from (f"{INDENT}{safe_text(line)}" for line in document.declared.system_prompt.split("\n"))


def _ladder(rungs: Sequence[Rung]) -> Iterator[str]:
    if rungs:
        yield "Candidates:"
    for place, rung in enumerate(rungs, 1):
        yield f"{INDENT}{place}. {safe_text(rung.name)} [{rung.state}]"


def _users(facts: Facts) -> Iterator[str]:
    """Yields the agents and routes that refer to it."""
    if facts.agents:
        yield "Agents:"
    for agent in facts.agents:
        if agent.observed is not None:
            yield f"{INDENT}- {agent.name} [{word_of(agent.observed, 'kind')}/{agent.state}]"
    if facts.routes:
        yield "Routes:"
    for route in facts.routes:
        if route.observed is not None:
            yield f"{INDENT}- {route.name} [{route.state}]"


def _events(events: Sequence[Event]) -> Iterator[str]:
    if not events:
        yield "Events:       none since the registry started"
        return
    yield "Events:"
    yield from _indented(TextTable(_EVENT_COLUMNS).plain_text(events))


def _explicit(pool: PoolDocument) -> bool:
    return pool.observed is not None and pool.observed.explicit


def _indented(text: str) -> Iterator[str]:
    return (f"{INDENT}{line}" for line in text.splitlines())
