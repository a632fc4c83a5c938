"""Request headers: caller, tenant, priority, session, deadline and cache options; Host and Origin checks."""

import math
import re
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import chain
from typing import TypeVar

from starlette.types import Scope

from gateway.auth.authentication import require_once
from gateway.errors import EdgeError
from gateway.gateway_config import MAX_HEADER_COUNT, GatewayConfig
from gateway.http.cors import (
    LOOPBACK_NAMES,
    host_name,
    is_allowed_origin,
    is_embedded_elsewhere,
    is_page_file,
    may_be_called,
)
from gateway.intake.agent_labels import HEADERS as AGENT_HEADERS
from gateway.intake.agent_labels import PREFIXES as AGENT_PREFIXES
from gateway.intake.agent_labels import agent_labels
from gateway.intake.request_model import HandledRequest
from gateway.request_facts import Headers, RequestFacts, facts_of, headers_of
from weft.dispatch.agents import name_asked_for, require_model_name
from weft.dispatch.aliases import AskedName
from weft.dispatch.parameter_checks import allowed_handling, cache_tag, prefix_seconds, require_session
from weft.dispatch.request_receipt import Journal, RequestContext, WhenLeft
from weft.durable.batches import MAX_METADATA, MAX_METADATA_VALUE_CHARS
from weft.durable.tasks import MAX_IDEMPOTENCY_KEY_CHARS
from weft.kernel.access.principal import LOCAL, MAY_LEAVE, OTHER_USER, USE_MODELS
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import TASK_OPERATIONS, CacheMode, Handling, Operation, Priority
from weft.kernel.telemetry.structured_logs import TRACEPARENT, new_traceparent, valid_traceparent
from weft.kernel.values.names import (
    MAX_CLIENT_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_TENANT_CHARS,
    is_name,
    is_token,
    new_id,
    require_token,
)
from weft.kernel.values.units import keep_alive_seconds

_PRIORITIES = {b"high": Priority.HIGH, b"normal": Priority.NORMAL, b"low": Priority.LOW}
_CACHE_MODES = {b"auto": CacheMode.AUTO, b"prefix": CacheMode.PREFIX, b"none": CacheMode.NONE}
_SESSION_HEADERS = {
    b"x-session-id": "X-Session-Id",
    b"x-session-affinity": "X-Session-Affinity",
    b"x-claude-code-session-id": "X-Claude-Code-Session-Id",
    b"session-id": "Session-Id",
    b"session_id": "session_id",
}
"""In order of precedence. Codex sends the last two, depending on its version."""
_AGENT_HEADERS = {b"x-claude-code-agent-id": "X-Claude-Code-Agent-Id", b"thread-id": "Thread-Id"}
"""Sub-agents of Claude Code and Codex share their parent's session, but their prompts differ from the first character
on. Those of OpenCode have their own session."""
_AS_CONFIGURED = Handling()
LABELS_HEADER = "X-Labels"
MAX_WAIT_HEADER = "X-Max-Wait-Seconds"
_RECEIPT_COMMENT = "X-Receipt-Comment"
_SWITCHES = {b"true": True, b"false": False}
_MAX_TIMEOUT_CHARS = 16
_TRACEPARENT = TRACEPARENT.encode()
_ONCE = frozenset({b"x-tenant-id", b"origin"})
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s/?#@\\:\[\]]+)(?::[0-9]{0,5})?")
"""A name or an address, and a port; no user information or path."""

Choice = TypeVar("Choice")


def request_id_of(headers: Headers) -> str:
    """Returns the caller's request id if it is a valid token, otherwise a new one."""
    given = headers[b"x-request-id"].decode("latin-1") if b"x-request-id" in headers else ""
    return given if given and is_token(given, MAX_REQUEST_ID_CHARS) else new_id("req")


def validate_head(scope: Scope, config: GatewayConfig) -> None:
    """Rejects heads that the HTTP parser accepts: too many, large or repeated headers, a foreign Host or Origin."""
    headers = headers_of(scope)
    _require_bounded_head(scope, headers, config)
    host = headers.get(b"host")
    if host is not None:
        _require_own_host(host, config)
    origin = headers.get(b"origin")
    if origin is None:
        is_foreign = is_embedded_elsewhere(scope, headers)
    else:
        # A sandboxed frame of the page has no origin.
        is_frame_script = origin == b"null" and is_page_file(scope)
        is_foreign = not (is_frame_script or is_allowed_origin(origin, host or b"", config))
    if is_foreign:
        raise WeftError(
            Reason.PERMISSION_DENIED,
            "pages of this origin may not call this gateway; allow it with `gateway.cors.allowed_origins`",
        )


def _require_bounded_head(scope: Scope, headers: Headers, config: GatewayConfig) -> None:
    raw = scope["headers"]
    limits = config.connections
    if len(raw) > MAX_HEADER_COUNT:
        raise EdgeError(431, Reason.REQUEST_TOO_LARGE, f"more than {MAX_HEADER_COUNT} headers")
    if sum(map(len, chain.from_iterable(raw))) > limits.max_header_bytes:
        raise EdgeError(431, Reason.REQUEST_TOO_LARGE, f"more than {limits.max_header_bytes} bytes of headers")
    hosts = 1 if b"host" in headers else 0
    if len(headers) < len(raw):
        require_once(scope, _ONCE)
        hosts = sum(name == b"host" for name, _ in raw)
    if hosts > 1 or (not hosts and scope["http_version"] != "1.0"):
        raise WeftError(Reason.MALFORMED_REQUEST, "the request must have exactly one Host header")


def shows_receipt(scope: Scope, config: GatewayConfig) -> bool:
    """Whether a stream ends with its receipt as a comment. Raises INVALID_ARGUMENT."""
    given = headers_of(scope).get(b"x-receipt-comment")
    if given is None:
        return config.receipt_comments
    return bool(_choice(given.lower(), _RECEIPT_COMMENT, _SWITCHES, "must be 'true' or 'false'"))


def require_local_caller(scope: Scope) -> None:
    """Rejects a change that a page of another origin could have sent, if callers need no key (a page has none).

    Beyond `validate_head`, the Host must be a loopback name even if `allowed_hosts` has others, and an Origin must be
    this gateway, including the port. Raises PERMISSION_DENIED.
    """
    if facts_of(scope).principal not in (LOCAL, OTHER_USER):
        return
    require_own_machine(
        scope, "resources can be changed only from this machine: the Host header must be a loopback name"
    )
    raw = scope["headers"]
    host = _host_of(scope)
    own = {f"http://{host}", f"https://{host}"}
    if any(value.decode("latin-1").lower() not in own for name, value in raw if name == b"origin"):
        raise WeftError(Reason.PERMISSION_DENIED, "pages of another origin may not change resources")


def require_own_machine(scope: Scope, message: str) -> None:
    """Raises PERMISSION_DENIED with the message unless the Host is a loopback name."""
    if host_name(f"//{_host_of(scope)}") not in LOOPBACK_NAMES:
        raise WeftError(Reason.PERMISSION_DENIED, message)


def _host_of(scope: Scope) -> str:
    return next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1").lower()


def _require_own_host(host: bytes, config: GatewayConfig) -> None:
    if not may_be_called(_name_in(host), config):
        raise WeftError(
            Reason.PERMISSION_DENIED, "the Host header is not a name of this gateway; allow it with `allowed_hosts`"
        )


@lru_cache(maxsize=256)
def _name_in(host: bytes) -> str | None:
    """Returns the name in a Host header; None: invalid. Cached: parsing takes 10 us, and callers send few names."""
    text = host.decode("latin-1")
    return None if _HOST.fullmatch(text) is None else host_name(f"//{text}")


def request_context(
    scope: Scope, config: GatewayConfig, params: HandledRequest, *, tenant: str, asked: AskedName, operation: Operation
) -> RequestContext:
    """Returns the request's context for the dispatcher. Raises INVALID_ARGUMENT naming the wrong header or field."""
    headers, facts = headers_of(scope), facts_of(scope)
    principal = facts.principal
    priority = _priority(headers, params)
    if params.allow_remote and not principal.may(MAY_LEAVE):
        raise FieldError("allow_remote", f"the key lacks the scope {MAY_LEAVE}", Reason.PERMISSION_DENIED)
    model = require_model_name(asked.model, "model")
    principal.require_name(USE_MODELS, name_asked_for(model))
    agent = headers.get(b"user-agent", b"")
    may_be_agent = agent.startswith(AGENT_PREFIXES) or not AGENT_HEADERS.isdisjoint(headers)
    return RequestContext(
        request_id=facts.request_id,
        tenant=tenant,
        caller=principal.name,
        model=model,
        asked_model=asked.alias,
        preset=asked.preset,
        operation=operation,
        traceparent=stated_traceparent(scope) or new_traceparent(),
        priority=Priority.NORMAL if priority is None else priority,
        names_priority=priority is not None,
        max_priority=principal.max_priority,
        allow_remote=bool(params.allow_remote),
        timeout_seconds=timeout_seconds(headers, config),
        max_wait_seconds=_max_wait_seconds(headers, config, operation),
        handling=allowed_handling(_handling(headers, params), principal, model),
        client_id=_client_id(headers, params),
        session=_session(headers, params),
        user=params.end_user,
        metadata=_labels(headers, params),
        labels=agent_labels(headers, params.turns) if may_be_agent else {},
    )


def tenant_of(scope: Scope) -> str:
    """Returns the request's tenant: that of the key, or the reported one if callers need no key.

    Raises INVALID_ARGUMENT naming the header, PERMISSION_DENIED if the key belongs to another tenant.
    """
    headers, claimed = headers_of(scope), ""
    if b"x-tenant-id" in headers:
        claimed = require_token(headers[b"x-tenant-id"].decode("latin-1"), "X-Tenant-ID", MAX_TENANT_CHARS)
    return facts_of(scope).principal.tenant_for(claimed, "X-Tenant-ID")


def _priority(headers: Headers, params: HandledRequest) -> Priority | None:
    """Returns the priority class in the header or field; None: not given."""
    if b"x-priority" not in headers:
        return None if params.x_priority is None else _PRIORITIES[params.x_priority.encode()]
    return _choice(headers[b"x-priority"], "X-Priority", _PRIORITIES, "must be 'high', 'normal' or 'low'")


def _choice(given: bytes | None, name: str, choices: Mapping[bytes, Choice], message: str) -> Choice | None:
    """Returns the choice that a header names; None: not given. Raises INVALID_ARGUMENT naming the header."""
    if given is not None and given not in choices:
        raise invalid_field(name, message)
    return None if given is None else choices[given]


def idempotency_key_of(headers: Headers) -> str:
    """Returns the Idempotency-Key; empty: none. Raises INVALID_ARGUMENT naming the header."""
    given = headers.get(b"idempotency-key")
    if given is None:
        return ""
    key = given.decode("latin-1")
    if not (0 < len(key) <= MAX_IDEMPOTENCY_KEY_CHARS and key.isascii() and key.isprintable()):
        raise invalid_field("Idempotency-Key", f"must have 1 to {MAX_IDEMPOTENCY_KEY_CHARS} printable characters")
    return key


def _client_id(headers: Headers, params: HandledRequest) -> str:
    if b"x-client-id" in headers:
        return require_token(headers[b"x-client-id"].decode("latin-1"), "X-Client-Id", MAX_CLIENT_CHARS)
    if not params.x_client_id:
        return ""
    return require_token(params.x_client_id, "x_client_id", MAX_CLIENT_CHARS)


def _labels(headers: Headers, params: HandledRequest) -> Mapping[str, str]:
    """Returns the caller's metadata with the labels of the header. Raises INVALID_ARGUMENT naming the header."""
    labels = params.own_metadata
    if b"x-labels" not in headers:
        return labels
    parts = (part.strip().partition("=") for part in headers[b"x-labels"].decode("latin-1").split(","))
    found = {key: value for key, _, value in parts if key or value}
    if not all(is_name(key) and is_token(found[key], MAX_METADATA_VALUE_CHARS) for key in found):
        raise invalid_field(LABELS_HEADER, "must be KEY=VALUE pairs joined by commas, such as team=a,kind=review")
    labels = {**labels, **found}
    if len(labels) > MAX_METADATA:
        raise invalid_field(LABELS_HEADER, f"must be at most {MAX_METADATA} labels with the request's metadata")
    return labels


def _session(headers: Headers, params: HandledRequest) -> str:
    for header, name in _SESSION_HEADERS.items():
        if header in headers and (given := headers[header]):
            session = require_session(given.decode("latin-1"), name)
            for agent_header, agent_name in _AGENT_HEADERS.items():
                agent = headers.get(agent_header, b"").decode("latin-1").strip()
                # Codex gives its main thread the name of the session.
                if agent and agent != session:
                    return require_session(f"{session}/{agent}", agent_name)
            return session
    key = params.prompt_cache_key
    return require_session(key, "prompt_cache_key") if isinstance(key, str) else ""


def _prefix_seconds(headers: Headers, params: HandledRequest) -> float:
    if b"x-prefix-keep-alive" in headers:
        return prefix_seconds(headers[b"x-prefix-keep-alive"].decode("latin-1"), "X-Prefix-Keep-Alive")
    if params.prefix_keep_alive is not None:
        return prefix_seconds(params.prefix_keep_alive, "prefix_keep_alive")
    return params.cache_seconds or 0.0


def _handling(headers: Headers, params: HandledRequest) -> Handling:
    tag, stated, keep_alive = headers.get(b"x-cache-tag"), headers.get(b"x-cache-mode"), params.keep_alive
    prefix = _prefix_seconds(headers, params)
    if tag is None and stated is None and keep_alive is None and not prefix:
        return _AS_CONFIGURED
    mode = _choice(stated, "X-Cache-Mode", _CACHE_MODES, "must be 'prefix', 'none' or 'auto'")
    return Handling(
        cache_mode=CacheMode.AUTO if mode is None else mode,
        cache_tag="" if tag is None else cache_tag(tag.decode("latin-1"), "X-Cache-Tag"),
        keep_alive_seconds=None if keep_alive is None else keep_alive_seconds(keep_alive, "keep_alive"),
        prefix_seconds=prefix,
    )


def timeout_seconds(headers: Headers, config: GatewayConfig) -> float:
    """Returns the caller's deadline in seconds. Raises INVALID_ARGUMENT naming the header."""
    stated = _seconds(
        headers, b"x-request-timeout-seconds", "X-Request-Timeout-Seconds", config.request_timeout_seconds
    )
    return config.request_timeout_seconds if stated is None else stated


def _max_wait_seconds(headers: Headers, config: GatewayConfig, operation: Operation) -> float | None:
    seconds = _seconds(headers, b"x-max-wait-seconds", MAX_WAIT_HEADER, config.request_timeout_seconds)
    if seconds is not None and operation not in (Operation.CHAT, Operation.COMPLETION):
        raise invalid_field(MAX_WAIT_HEADER, "is only for chats and completions")
    return seconds


def _seconds(headers: Headers, key: bytes, name: str, most: float) -> float | None:
    """Returns the seconds in a header; None: not given. Raises INVALID_ARGUMENT naming the header."""
    if key not in headers:
        return None
    given = headers[key]
    try:
        seconds = float(given) if len(given) <= _MAX_TIMEOUT_CHARS else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= most:
        raise invalid_field(name, f"must be a number above 0 and at most {most:g}")
    return seconds


def stated_traceparent(scope: Scope) -> str:
    """Returns the traceparent for work that a request causes: its own span or its caller's; empty: none."""
    trace = facts_of(scope).trace
    if trace is not None:
        return trace.traceparent
    given = headers_of(scope).get(_TRACEPARENT)
    return "" if given is None else valid_traceparent(given.decode("latin-1")) or ""


def journal_of(
    scope: Scope, params: HandledRequest, operation: Operation, *, is_possible: bool, required: WhenLeft | None
) -> Journal | None:
    """Returns the options of a journaled request; None: it is not journaled.

    A request is journaled by `durable: "wait"` or by a setting. `required`: what happens by setting when the caller
    leaves, unless the request says otherwise; None: no setting requires a journal.

    Raises INVALID_ARGUMENT naming the field if `durable` is not available on this gateway (`is_possible`) or for this
    operation.
    """
    if params.durable is None and required is None:
        if params.on_disconnect is not None:
            raise invalid_field("on_disconnect", "is only for 'durable': 'wait'")
        return None
    if params.durable is not None and not is_possible:
        raise invalid_field("durable", "durable tasks are not available; omit it")
    if params.durable is not None and operation not in TASK_OPERATIONS:
        raise invalid_field("durable", "is not available for this operation: leave it out")
    by_setting = required or WhenLeft.CANCEL
    return Journal(
        when_left=by_setting if params.on_disconnect is None else WhenLeft(params.on_disconnect),
        idempotency_key=idempotency_key_of(headers_of(scope)),
        on_task=partial(_note_task, facts_of(scope)),
    )


def _note_task(facts: RequestFacts, task_id: str) -> None:
    facts.task_id = task_id
