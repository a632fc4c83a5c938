"""The pages that `weft describe` prints, a table of titles and texts for each part of one, and their JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from google.protobuf import duration_pb2
from google.protobuf.json_format import MessageToDict

from weft.api.common.v1 import error_reason_pb2
from weft.api.common.v1.workflow_pb2 import WorkflowInput
from weft.api.registry.v1.event_pb2 import Event
from weft.api.registry.v1.runner_pb2 import InstanceState, Runner
from weft.api.router.v1.request_service_pb2 import LimitUse
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1.load_pb2 import LoadParameter
from weft.documents.codec import document_of, moment_of, without_defaults, word_of
from weft.documents.profiles import declarations_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import (
    AgentDocument,
    AliasDocument,
    AnyDocument,
    ModelDocument,
    PoolDocument,
    ProfileDocument,
    RouteDocument,
    RunnerDocument,
    WorkflowDocument,
    declared_document,
    plain,
)
from weft.kernel.abilities import mode_words, skill_words
from weft_app.cli.columns import (
    labels_text,
    limits_text,
    remote_text,
    source_of,
    unloads_text,
    upstream_of,
    weight_of,
    who_wakes,
)
from weft_app.cli.limit_uses import USES
from weft_app.cli.output import INDENT, Column, block, page, safe_text, table_block
from weft_app.cli.templates import filled, seconds_ago

SHOWN_REQUESTS = 10


def reason_name(reason: int) -> str:
    """Returns a reason's published name in lower case; its number when this release does not know it."""
    names: dict[int, str] = {number: name for name, number in error_reason_pb2.ErrorReason.items()}
    return names.get(reason, f"reason {reason}").removeprefix("ERROR_REASON_").lower()


def _seconds(duration: duration_pb2.Duration) -> str:
    seconds = duration.ToNanoseconds() / 1e9
    return f"{seconds:.1f}s" if seconds < 60 else seconds_ago(seconds)


def _state(record: pb.RequestRecord) -> str:
    names: dict[int, str] = {number: name for name, number in pb.RequestRecord.State.items()}
    name = names.get(record.state, f"state {record.state}").removeprefix("STATE_").lower().replace("_", " ")
    return f"{name}: {reason_name(record.reason)}" if record.reason else name


def _phase(state: InstanceState) -> str:
    progress = "[ ({load_progress:.0%})]" if state.phase == InstanceState.PHASE_LOADING else ""
    return filled("{phase}" + progress, state)


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


_MEMORY = (
    "[{leased_bytes:size} leased on device {device_indexes}, {measured_bytes:size} seen"
    "|{leased_bytes:size} leased on device {device_indexes}"
    "|{resident_bytes:size} of main memory"
    "|none held; would take {estimated_bytes:size} (from: {estimate_source})|none held]"
)
_INSTANCE = (
    Column("Phase", _phase),
    Column("Detail", "{detail}"),
    Column("Slots", "{slots_used} of {slots_total} in use"),
    Column("Memory", lambda state: filled(_MEMORY, state.memory) if state.HasField("memory") else None),
    Column("Expires", until_text),
)
"""What heartbeats report of an instance."""


def _faults(state: InstanceState) -> str | None:
    return filled("{fault_count}; last reason: [{last_fault.detail}|unknown]", state) if state.fault_count else None


_UNREACHABLE = (
    Column("Restarts", _faults),
    Column("Process", lambda _: "its runner is unreachable"),
)
"""What is shown of an instance whose runner does not describe it."""

_TIMEOUTS = ("connect", "headers", "first_token", "prefill_liveness", "idle_stream", "absolute", "probe_interval")


def _timeouts(described: pb.InstanceDescription) -> str | None:
    profile: Any = described.timeouts
    limits = ((name, _seconds(getattr(profile, name)) if profile.HasField(name) else "off") for name in _TIMEOUTS)
    shown = ", ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits)
    return shown if described.HasField("timeouts") else None


def _prefix_cache(described: pb.InstanceDescription) -> str | None:
    cache = described.cache
    requests = cache.hit_count + cache.miss_count
    share = cache.cached_token_count / max(1, cache.prompt_token_count)
    return f"{cache.hit_count} of {requests} requests hit, {share:.0%} of prompt tokens cached" if requests else None


_ISOLATION_WORDS = {
    pb.CACHE_ISOLATION_SLOTS: "each slot is one tenant's at a time",
    pb.CACHE_ISOLATION_WHOLE: "the whole cache is one tenant's at a time",
    pb.CACHE_ISOLATION_SALT: "the server is given a salt per tenant",
    pb.CACHE_ISOLATION_NONE: "none: the server shares its cache among tenants",
}
_DESCRIBED = (
    Column("Process", "[{process_id}, contained by {containment}|{process_id}|none]"),
    Column("Last ready", "[{last_ready_time:ago}]"),
    Column("Restarts", "{restart_count}[; last reason: {last_restart_reason}]"),
    Column("Timeouts", _timeouts),
    Column("Prefix cache", _prefix_cache),
    Column("Tenant isolation", lambda described: _ISOLATION_WORDS.get(described.cache_isolation)),
    Column("Quantizations", "{quantizations}"),
)
"""What a runner says of an instance on request."""


def _range(parameter: LoadParameter) -> str:
    document = document_of(parameter)
    if parameter.words:
        return ", ".join(parameter.words)
    low, high = document.get("minimum"), document.get("maximum")
    if parameter.flag or (low is None and high is None):
        return "true, false" if parameter.flag else str(document["type"])
    return f"{'' if low is None else f'{low:.15g}'} to {'' if high is None else f'{high:.15g}'}".strip()


_PARAMETERS = (
    Column("NAME", "{name}"),
    Column("ALLOWED", _range),
    Column("NOW", lambda parameter: str(document_of(parameter).get("default", "engine's own"))),
    Column("MEANING", "{description}"),
)
_RESTARTS = (
    Column("AGE", "[{time:ago}]"),
    Column("REASON", lambda restart: reason_name(restart.reason)),
    Column("RECOVERED", lambda restart: _seconds(restart.recovery) if restart.HasField("recovery") else "not yet"),
    Column("DETAIL", "{detail}"),
)
_REQUESTS = (
    Column("REQUEST", "{request_id}"),
    Column("STATE", _state),
    Column("AGE", "[{start_time:ago}]"),
    Column("LAST PROGRESS", "[{last_progress_time:ago}]"),
    Column("CHARACTERS", "{output_chars}"),
    Column(
        "TOOL TURNS LEFT", lambda one: str(one.tool_iterations_left) if one.HasField("tool_iterations_left") else "-"
    ),
    Column("SIGNALS", lambda record: ",".join(signal.name for signal in record.signals)),
)


def instance_lines(state: InstanceState, described: pb.InstanceDescription | None) -> Iterator[str]:
    """Yields an instance as reported in heartbeats, and as its runner describes it on request (None: unreachable)."""
    yield from page(_INSTANCE, state)
    if described is None:
        yield from page(_UNREACHABLE, state)
        return
    yield from page(_DESCRIBED, described)
    yield from block("Chosen", map(safe_text, described.added.reasons))
    yield from table_block("Load parameters", _PARAMETERS, described.load_parameters)
    yield from table_block("Restarts", _RESTARTS, described.restarts)
    yield from table_block("Requests", _REQUESTS, described.requests[-SHOWN_REQUESTS:])
    yield from block("Before the last crash", map(safe_text, described.last_crash_lines))
    yield from block("Log", map(safe_text, described.log_lines))


def _woken_by(model: ModelDocument) -> str:
    wakers = who_wakes(model)
    if not wakers:
        return "it never hibernates"
    return f"{', '.join(wakers)}, at most {document_of(model.declared)['wake']['maxWaitSeconds']:g} s"


_CREATED, _HEARTBEAT, _GONE = (
    Column(title, f"[{{observed.{field}:%Y-%m-%d %H:%M:%S}} UTC ({{observed.{field}:ago}})]")
    for title, field in (
        ("Created", "create_time"),
        ("Heartbeat", "last_heartbeat_time"),
        ("Gone since", "inactive_time"),
    )
)


MAX_SHOWN_VOICES = 10


def _voices(voices: Sequence[str]) -> str:
    more = f" and {len(voices) - MAX_SHOWN_VOICES} more" if len(voices) > MAX_SHOWN_VOICES else ""
    return f"{', '.join(voices[:MAX_SHOWN_VOICES])}{more}"


def _skills(model: ModelDocument) -> str:
    abilities = model.abilities
    lacking = f" (not {', '.join(skill_words(abilities.lacking))})" if abilities.lacking else ""
    return (", ".join(skill_words(abilities.skills)) or "unknown") + lacking


_MODEL = (
    Column("Source", lambda model: source_of(model.observed)),
    Column("Status", "{shown_state}"),
    Column("Runner", "[{observed.runner}|none]"),
    Column("Id", "{observed.id}"),
    Column("Type", "{observed.type}"),
    Column("Model", upstream_of),
    Column("Tier", "{manifest.tags.tier}"),
    Column("Labels", lambda model: labels_text(model.manifest.tags) or None),
    Column("Owner", "{manifest.tags.owner}"),
    Column("Key", "{manifest.provider.api_key_ref}"),
    Column("Adapter of", lambda model: (model.instance.base_model if model.instance else "") or None),
    Column("Pinned to", "{declared.runner}"),
    Column("Operations", "[{manifest.operations}|none]"),
    Column("Context", "[{manifest.context_tokens}|{instance.context_tokens}|unknown until loaded]"),
    Column("Digest", "[{manifest.digest}|-]"),
    Column("Remote", lambda model: "yes" if model.manifest.remote else "no"),
    Column("Skills", _skills),
    Column("Thinking", lambda model: ", ".join(mode_words(model.abilities.thinking_modes)) or None),
    Column("Translates from", lambda model: ", ".join(model.abilities.source_languages) or None),
    Column("Translates into", lambda model: ", ".join(model.abilities.target_languages) or None),
    Column("Voices", lambda model: _voices(model.abilities.voices) or None),
    Column("Journal", lambda model: word_of(model.manifest, "journal") if model.manifest.journal else None),
    Column("Woken by", _woken_by),
    _CREATED,
    _HEARTBEAT,
    _GONE,
)


def _parameters(agent: AgentDocument) -> str:
    given = without_defaults(agent.declared.default_params)
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items()) or "-"


def _text_calls(agent: AgentDocument) -> str | None:
    behaviour = agent.declared.behaviour
    is_off = behaviour.HasField("parse_text_tool_calls") and not behaviour.parse_text_tool_calls
    return "not parsed as calls" if is_off else None


def _signals(agent: AgentDocument) -> str | None:
    behaviour = agent.declared.behaviour
    stops = behaviour.stop_on_decision_request or not behaviour.HasField("stop_on_decision_request")
    continuing = "" if stops else " (a question for a decision does not end the answer)"
    return ", ".join(behaviour.signals) + continuing if behaviour.signals else None


_AGENT = (
    Column("Source", lambda agent: source_of(agent.observed)),
    Column("Status", "{state}"),
    Column(
        "Answers",
        lambda agent: f"pool/{agent.declared.pool}" if agent.declared.pool else f"model/{agent.declared.model}",
    ),
    Column("Ask for", "{label}"),
    Column("Description", "[{declared.description}|-]"),
    Column("Parameters", _parameters),
    # What the mesh does around its chats; nothing for the default.
    Column(
        "Platform",
        lambda agent: "the platform prompt comes first" if agent.declared.behaviour.platform_prompt else None,
    ),
    Column(
        "Tools",
        "[{declared.behaviour.tools} (at most {declared.behaviour.max_tool_iterations} further turns)"
        "|{declared.behaviour.tools}"
        "|those of the model (at most {declared.behaviour.max_tool_iterations} further turns)]",
    ),
    Column("Text calls", _text_calls),
    Column("Signals", _signals),
    Column("Repetition", "[{declared.behaviour.repetition_policy}]"),
    Column("Runner", "{observed.runner}"),
    _CREATED,
    _HEARTBEAT,
    _GONE,
)


_ROUTE = (
    Column("Kind", lambda _: "route"),
    Column("Status", "{state}"),
    Column("Ask for", "{label}"),
    Column("Description", "[{declared.description}|-]"),
    Column(
        "Pinned", lambda route: "the primary is waited for while it is there" if route.declared.pin_primary else None
    ),
    Column("Budget", "[{declared.budget:g} s|none]"),
    Column("Kept loaded", "[{declared.keep_alive:keep}|as the model is configured]"),
    _CREATED,
)


_ALIAS = (
    Column("Kind", lambda _: "alias"),
    Column("Stands for", lambda alias: f"{alias.declared.pattern}, unless the mesh has something of the name"),
    Column("Means", "{declared.target}"),
    Column("Tenant", "[{declared.tenant}|every tenant]"),
    Column("Description", "[{declared.description}|-]"),
    Column("Source", "{observed.source}"),
    _CREATED,
)


_PROFILE = (
    Column("Kind", lambda _: "profile"),
    Column("Status", lambda profile: "active, changed since" if profile.is_changed else profile.state),
    Column("Active since", "[{observed.active_time:ago}|-]"),
    Column("Description", "[{declared.description}|-]"),
    Column("Loads", lambda profile: ", ".join(each.model for each in profile.declared.load) or "-"),
    Column("Unloads", lambda profile: unloads_text(profile) or "-"),
    Column("Declares", lambda profile: ", ".join(_labels_of(profile)) or "-"),
    _CREATED,
)


_WORKFLOW = (
    Column("Kind", lambda _: "workflow"),
    Column("Status", "{state}"),
    Column("Asked for as", lambda workflow: f"workflow/{workflow.name}"),
    Column("Model", "{declared.model}"),
    Column("Description", "[{declared.description}|-]"),
    Column("Outputs", lambda workflow: ", ".join(workflow.declared.workflow.outputs)),
    Column("Graph", lambda workflow: f"{len(workflow.declared.workflow.graph.encode())} bytes"),
    _CREATED,
)


_TENANT = (
    Column("Kind", lambda _: "tenant"),
    Column("Source", "{observed.source}"),
    Column("Weight", lambda tenant: f"{weight_of(tenant.declared):g}"),
    Column("Max running", "[{declared.max_in_flight}|any number]"),
    Column("Remote", lambda tenant: remote_text(tenant.declared)),
    Column("Journal", lambda tenant: word_of(tenant.declared, "journal") if tenant.declared.journal else "as the mesh"),
    Column("Limits", lambda tenant: limits_text(tenant.declared)),
    Column("Description", "[{declared.description}|-]"),
    _CREATED,
)


def _input(each: WorkflowInput) -> str:
    """Returns the line of an input of a workflow."""
    parts = [each.name, word_of(each, "type"), f"from {word_of(each, 'source')}", f"node {each.node}.{each.input}"]
    if each.required:
        parts.append("required")
    if each.default:
        parts.append(f"default {each.default}")
    if each.choices:
        parts.append(f"one of {', '.join(each.choices)}")
    return ", ".join(parts)


def _labels_of(profile: ProfileDocument) -> list[str]:
    """Returns what a profile declares, as KIND/NAME."""
    documents = (declared_document(each) for each in declarations_of(profile.declared))
    return [document.label for document in documents if document is not None]


_RUNNER = (
    Column("Kind", lambda runner: f"{'dial-out' if runner.observed.dial_out else 'direct'} runner"),
    Column("Status", "{state}"),
    Column("Host", "[{observed.host}|-]"),
    Column("Runtime", "[{observed.runtime}|-]"),
    Column("Version", "[{observed.version}|-]"),
    Column("Address", "[{observed.address}|-]"),
    Column("Incarnation", "{observed.incarnation}"),
    Column("At once", "[{observed.capability.max_requests} requests|by the slots of its models]"),
    _HEARTBEAT,
    _GONE,
)
_POOL = (Column("Kind", lambda pool: "pool, named by its members" if pool.observed.explicit else "pool of one model"),)
_PAGES: Mapping[ResourceKind, Sequence[Column]] = {
    ResourceKind.MODEL: _MODEL,
    ResourceKind.AGENT: _AGENT,
    ResourceKind.ROUTE: _ROUTE,
    ResourceKind.ALIAS: _ALIAS,
    ResourceKind.PROFILE: _PROFILE,
    ResourceKind.WORKFLOW: _WORKFLOW,
    ResourceKind.TENANT: _TENANT,
    ResourceKind.RUNNER: _RUNNER,
    ResourceKind.POOL: _POOL,
}
"""The first lines of a page, by kind."""
_POOL_SIZE = (
    Column("Pool name", "{name}"),
    Column("Members", "{size} ({active_count} active)"),
)
_POOL_TITLE_CHARS = 10
_NAME = (Column("Name", "{name}"),)
_CONDITIONS = (
    Column("TYPE", "{type}"),
    Column("STATUS", "{status}"),
    Column("REASON", "{reason}"),
    Column("MESSAGE", "{message}"),
)
_EVENTS = (
    Column("AGE", "[{time:ago}]"),
    Column("REASON", "{reason}"),
    Column("MESSAGE", "{message}"),
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
    aliases: Sequence[AliasDocument] = ()
    """Aliases that lead to it."""
    uses: Sequence[LimitUse] = ()
    """What is used of the limits of a tenant."""
    rungs: Sequence[Rung] = ()
    """Candidates of a route, best first."""
    runner: pb.DescribeResponse | None
    """Its runner's own description; None: unreachable."""
    events: Sequence[Event]
    """Its recent events, oldest first."""


def description(facts: Facts) -> str:
    """Returns all facts as text."""
    return "\n".join(_lines(facts)) + "\n"


def _lines(facts: Facts) -> Iterator[str]:
    document = facts.document
    yield from page(_NAME, document)
    if document.observed is not None:
        yield from page(_PAGES[document.kind], document)
    yield from block("Candidates", map(_candidate, range(1, len(facts.rungs) + 1), facts.rungs))
    yield from block("Pool", _pool(facts))
    yield from table_block("Conditions", _CONDITIONS, document.conditions)
    match document:
        case ModelDocument(instance=InstanceState() as instance):
            yield from block("Instance", _instance(instance, facts.runner))
        case RunnerDocument(observed=Runner() as runner):
            yield from block("Instances", _instances(runner, facts.runner))
        case AgentDocument() if document.declared.system_prompt:
            yield from block("System prompt", map(safe_text, document.declared.system_prompt.split("\n")))
    if isinstance(document, WorkflowDocument):
        yield from block("Inputs", map(safe_text, map(_input, document.declared.workflow.inputs)))
    if isinstance(document, ProfileDocument) and document.observed is not None:
        yield from block("Not as it says", map(safe_text, document.observed.changes))
    yield from table_block("Used", USES, facts.uses)
    yield from block("Agents", map(_user, facts.agents))
    yield from block("Routes", map(_user, facts.routes))
    yield from block("Aliases", map(_alias, facts.aliases))
    events = [*table_block("Events", _EVENTS, facts.events)]
    yield from events or ["Events:       none"]


def facts_document(facts: Facts) -> dict[str, Any]:
    """Returns all facts as JSON types: the resource, its events, and its runner's own description."""
    described = None if facts.runner is None else MessageToDict(facts.runner)
    return {
        "resource": plain(facts.document),
        "events": [document_of(event) for event in facts.events],
        "runner": described,
        **({"uses": [document_of(use) for use in facts.uses]} if facts.document.kind is ResourceKind.TENANT else {}),
    }


def _candidate(place: int, rung: Rung) -> str:
    return f"{place}. {safe_text(rung.name)} [{rung.state}]"


def _pool(facts: Facts) -> Iterator[str]:
    """Yields the lines of the pool, where it adds to the resource itself."""
    pool = None if facts.pool is None else facts.pool.observed
    is_document = isinstance(facts.document, PoolDocument)
    if pool is None or not (pool.explicit or pool.size > 1 or is_document):
        return
    yield from page(_POOL_SIZE, pool, _POOL_TITLE_CHARS)
    for member in pool.members:
        name = member.manifest.name
        this = isinstance(facts.document, ModelDocument) and name == facts.document.name
        mark = " ← this row" if this else ""
        yield f"{INDENT}- {name} [{source_of(member)}/{word_of(member, 'status')}]{mark}"


def _instances(runner: Runner, described: pb.DescribeResponse | None) -> Iterator[str]:
    for instance in runner.capability.instances:
        yield from block(instance.model, _instance(instance, described))


def _instance(state: InstanceState, runner: pb.DescribeResponse | None) -> Iterator[str]:
    described = next((one for one in runner.instances if one.model == state.model), None) if runner else None
    return instance_lines(state, described)


def _alias(document: AliasDocument) -> str:
    """Returns the line of an alias that leads to the resource."""
    tenant = f" of tenant {document.declared.tenant}" if document.declared.tenant else ""
    return f"- {document.name} [{document.declared.pattern}{tenant}]"


def _user(document: AgentDocument | RouteDocument) -> str:
    """Returns the line of an agent or a route that refers to the resource."""
    kind = f"{source_of(document.observed)}/" if isinstance(document, AgentDocument) and document.observed else ""
    return f"- {document.name} [{kind}{document.state}]"
