"""What `weft describe` prints, from the facts it found."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from google.protobuf.json_format import MessageToDict

from weft.api.runner.v1 import runner_service_pb2
from weft.documents.documents import (
    AgentDocument,
    Document,
    EventDocument,
    ModelDocument,
    PoolDocument,
    RouteDocument,
    RunnerDocument,
)
from weft.documents.statuses import Condition, InstanceStatus
from weft.documents.yaml_nodes import plain
from weft_app.cli.columns import ago, context_tokens, keep_alive_words, who_wakes
from weft_app.cli.instance_description import instance_lines
from weft_app.cli.output import Column, TextTable, safe_text

KEY_CHARS = 13
INDENT = "  "

_CONDITION_COLUMNS = (
    Column("TYPE", lambda condition: condition.type),
    Column("STATUS", lambda condition: condition.status),
    Column("REASON", lambda condition: condition.reason),
    Column("MESSAGE", lambda condition: condition.message),
)
_EVENT_COLUMNS = (
    Column("AGE", lambda event: ago(event.time)),
    Column("REASON", lambda event: event.reason),
    Column("MESSAGE", lambda event: event.message),
)


@dataclass(frozen=True, slots=True)
class Rung:
    """A candidate of a route."""

    name: str
    state: str
    """How it is, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A resource and what belongs to it."""

    document: Document
    pool: PoolDocument | None
    """The pool it is, is in, or points to."""
    agents: Sequence[AgentDocument]
    """The agents that point to it."""
    routes: Sequence[RouteDocument] = ()
    """The routes that name it, or the pool that it is in."""
    rungs: Sequence[Rung] = ()
    """Of a route: its candidates, best first."""
    runner: runner_service_pb2.DescribeResponse | None
    """Its runner as it describes itself; None when it cannot be asked."""
    events: Sequence[EventDocument]
    """What happened to it lately, oldest first."""


def description(facts: Facts) -> str:
    """All of it as text."""
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
    """All of it as JSON types: the resource, its events, and its runner as that describes itself."""
    described = None if facts.runner is None else MessageToDict(facts.runner)
    return {
        "resource": plain(facts.document),
        "events": [plain(event) for event in facts.events],
        "runner": described,
    }


def _header(document: Document) -> Iterator[str]:
    yield _fact("Name", document.name)
    match document:
        case ModelDocument():
            yield from _model(document)
        case AgentDocument():
            yield from _agent(document)
        case RunnerDocument():
            yield from _runner(document)
        case PoolDocument():
            yield _fact("Kind", "pool, named by its members" if _explicit(document) else "pool of one model")
        case RouteDocument():
            yield from _route(document)


def _model(model: ModelDocument) -> Iterator[str]:
    status = model.status
    if status is None:
        return
    yield _fact("Kind", f"{status.kind} model")
    yield _fact("Status", status.state)
    yield _fact("Runner", status.runner or "none")
    if model.runner:
        yield _fact("Pinned to", model.runner)
    yield _fact("Operations", ", ".join(model.operations) or "none")
    yield _fact("Context", str(context_tokens(model) or "unknown until loaded"))
    yield _fact("Digest", model.digest or "-")
    yield _fact("Remote", "yes, it leaves the premises" if model.remote else "no")
    yield _fact("Skills", ", ".join(model.skills) or "unknown")
    wakers = who_wakes(model)
    longest = f", at most {model.wake.max_wait_seconds:g} s" if model.wake else ""
    yield _fact("Woken by", f"{', '.join(wakers)}{longest}" if wakers else "it never sleeps")
    yield from _times(status.created_at, status.last_heartbeat_at, status.inactive_since)


def _agent(agent: AgentDocument) -> Iterator[str]:
    status = agent.status
    if status is None:
        return
    yield _fact("Kind", f"{status.kind} agent")
    yield _fact("Status", status.state)
    yield _fact("Answers", f"pool/{agent.pool}" if agent.pool else f"model/{agent.model}")
    yield _fact("Ask for", f"agent/{agent.name}")
    yield _fact("Description", agent.description or "-")
    params = agent.default_params.model_dump(mode="json", exclude_defaults=True)
    yield _fact(
        "Parameters",
        ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in params.items()) or "-",
    )
    yield from _behaviour(agent)
    if status.runner:
        yield _fact("Runner", status.runner)
    yield from _times(status.created_at, status.last_heartbeat_at, status.inactive_since)


def _behaviour(agent: AgentDocument) -> Iterator[str]:
    """What the mesh does around its chats; nothing for what it does around all of them."""
    if agent.platform_prompt:
        yield _fact("Platform", "the platform's own prompt stands first")
    if agent.tools or agent.max_tool_iterations is not None:
        rounds = agent.max_tool_iterations
        limit = "" if rounds is None else f" (asked again at most {rounds} times)"
        yield _fact("Tools", (", ".join(agent.tools) or "those of the model") + limit)
    if not agent.parse_text_tool_calls:
        yield _fact("Text calls", "not taken for calls")
    if agent.signals:
        going_on = "" if agent.stop_on_decision_request else " (a question for a decision does not end the answer)"
        yield _fact("Signals", ", ".join(agent.signals) + going_on)
    if agent.repetition is not None:
        yield _fact("Repetition", agent.repetition)


def _route(route: RouteDocument) -> Iterator[str]:
    status = route.status
    if status is None:
        return
    yield _fact("Kind", "route")
    yield _fact("Status", status.state)
    yield _fact("Ask for", f"route/{route.name}")
    yield _fact("Description", route.description or "-")
    if route.pin_primary:
        yield _fact("Pinned", "the primary is waited for while it is there")
    yield _fact("Budget", "none of its own" if route.budget_seconds is None else f"{route.budget_seconds:g} s")
    kept = "as the model is configured" if route.keep_alive is None else keep_alive_words(route.keep_alive)
    yield _fact("Kept loaded", kept)
    yield from _times(status.created_at, None, None)


def _runner(runner: RunnerDocument) -> Iterator[str]:
    status = runner.status
    if status is None:
        return
    yield _fact("Kind", f"{status.link} runner")
    yield _fact("Status", status.state)
    yield _fact("Host", status.host or "-")
    yield _fact("Runtime", status.runtime or "-")
    yield _fact("Version", status.version or "-")
    yield _fact("Address", status.address or "-")
    yield _fact("Incarnation", status.incarnation)
    yield _fact("At once", f"{status.max_requests} requests" if status.max_requests else "as many as it has slots")
    yield from _times(None, status.last_heartbeat_at, status.inactive_since)


def _times(created: datetime | None, heartbeat: datetime | None, inactive: datetime | None) -> Iterator[str]:
    for key, moment in (("Created", created), ("Heartbeat", heartbeat), ("Gone since", inactive)):
        if moment is not None:
            yield _fact(key, f"{moment:%Y-%m-%d %H:%M:%S} UTC ({ago(moment)})")


def _pool(facts: Facts) -> Iterator[str]:
    """The pool block, where it says more than the resource itself."""
    pool = facts.pool
    if pool is None or pool.status is None:
        return
    alone = not pool.status.explicit and pool.status.size <= 1
    if alone and not isinstance(facts.document, PoolDocument):
        return
    yield "Pool:"
    yield f"{INDENT}Pool name: {pool.name}"
    yield f"{INDENT}Members:   {pool.status.size} ({pool.status.active_count} active)"
    for member in pool.status.members:
        this = isinstance(facts.document, ModelDocument) and member.name == facts.document.name
        mark = " ← this row" if this else ""
        yield f"{INDENT * 2}- {member.name} [{member.kind}/{member.state}]{mark}"


def _conditions(document: Document) -> Iterator[str]:
    conditions: tuple[Condition, ...] = document.status.conditions if document.status is not None else ()
    if conditions:
        yield "Conditions:"
        yield from _indented(TextTable(_CONDITION_COLUMNS).plain_text(conditions))


def _instances(facts: Facts) -> Iterator[str]:
    match facts.document:
        case ModelDocument(status=status) if status is not None and status.instance is not None:
            yield "Instance:"
            yield from _instance(status.instance, facts.runner)
        case RunnerDocument(status=status) if status is not None and status.instances:
            yield "Instances:"
            for instance in status.instances:
                yield f"{INDENT}{instance.model}:"
                yield from (f"{INDENT}{line}" for line in _instance(instance, facts.runner))


def _instance(state: InstanceStatus, runner: runner_service_pb2.DescribeResponse | None) -> Iterator[str]:
    described = next((one for one in runner.instances if one.model == state.model), None) if runner else None
    return (f"{INDENT}{line}" for line in instance_lines(state, described))


def _prompt(document: Document) -> Iterator[str]:
    if isinstance(document, AgentDocument) and document.system_prompt:
        yield "System prompt:"
        yield from (f"{INDENT}{safe_text(line)}" for line in document.system_prompt.split("\n"))


def _ladder(rungs: Sequence[Rung]) -> Iterator[str]:
    if rungs:
        yield "Candidates:"
    for place, rung in enumerate(rungs, 1):
        yield f"{INDENT}{place}. {safe_text(rung.name)} [{rung.state}]"


def _users(facts: Facts) -> Iterator[str]:
    """Who asks for it by its name: agents and routes."""
    if facts.agents:
        yield "Agents:"
    for agent in facts.agents:
        if agent.status is not None:
            yield f"{INDENT}- {agent.name} [{agent.status.kind}/{agent.status.state}]"
    if facts.routes:
        yield "Routes:"
    for route in facts.routes:
        if route.status is not None:
            yield f"{INDENT}- {route.name} [{route.status.state}]"


def _events(events: Sequence[EventDocument]) -> Iterator[str]:
    if not events:
        yield "Events:       none since the registry started"
        return
    yield "Events:"
    yield from _indented(TextTable(_EVENT_COLUMNS).plain_text(events))


def _explicit(pool: PoolDocument) -> bool:
    return pool.status is not None and pool.status.explicit


def _indented(text: str) -> Iterator[str]:
    return (f"{INDENT}{line}" for line in text.splitlines())


def _fact(key: str, value: str) -> str:
    return f"{key}:".ljust(KEY_CHARS) + f" {safe_text(value)}"
