"""The placement request that a dispatcher sends to a scheduler, and the load of a scheduler's queues."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weft.kernel.requests.capabilities import ThinkingMode
from weft.kernel.requests.request_values import Operation, Priority, Skill
from weft.kernel.values.fast_dataclass import fast_dataclass


class PrefixHolder(NamedTuple):
    """The endpoint that last served a prompt with the same beginning, as known to the dispatcher."""

    model: str
    runner: str
    incarnation: str
    digest_count: int
    """Number of equal digests."""


AGENT_VALUES: Mapping[str, frozenset[str]] = {
    "program": frozenset({"claude-code", "cline", "codex", "copilot", "opencode", "qwen-code"}),
    "agent": frozenset({"main", "sub"}),
    "purpose": frozenset({"turn", "title", "search", "compaction"}),
}
"""The values of labels of requests from coding agents that usage is divided by; callers can send others."""
AGENT_LABELS = frozenset(AGENT_VALUES)
"""Names of the labels of a request from a coding agent, which records show."""


def label_set(labels: Mapping[str, str]) -> frozenset[str]:
    """Returns labels as KEY=VALUE."""
    return frozenset(f"{key}={value}" for key, value in labels.items())


@fast_dataclass(kw_only=True)
class PlacementRequest:
    """A request as the scheduler sees it, without the prompt."""

    request_id: str
    tenant: str
    model: str
    """Name of a model or pool, or `route/` and a route's name."""
    operation: Operation
    priority: Priority = Priority.NORMAL
    names_priority: bool = True
    """Whether the caller specified `priority`; otherwise the client's profile may set another."""
    max_priority: Priority = Priority.HIGH
    """Highest class that the caller's key allows."""
    allow_remote: bool = False
    age_seconds: float = 0.0
    """Time since its first arrival: a request that is placed again after a lost router keeps its age."""
    seconds_left: float | None = None
    """Time to the deadline; None: no deadline."""
    max_wait_seconds: float | None = None
    """Time in which its first token must be expected, else it is refused when it arrives; None: any."""
    is_counted: bool = False
    """Whether an earlier placement already counts against the limits of its tenant and client."""
    attempts_used: int = 0
    """Attempts granted by earlier placements; attempt numbers continue from there."""
    traceparent: str = ""
    """W3C trace context; empty: none."""
    prompt_tokens: int = 0
    """An estimate; 0: unknown."""
    max_output_tokens: int | None = None
    work: float = 0.0
    """Work of an image, transcription or speech request (see `media_work`); 0: another request, or unknown."""
    skills: frozenset[Skill] = frozenset()
    """Required skills of the model."""
    thinking: ThinkingMode = ThinkingMode.DEFAULT
    tools: frozenset[str] = frozenset()
    """Required tools of the runner."""
    affinity_key: bytes = b""
    """Requests with the same key should go to the same runner; empty: none."""
    prefix_digests: tuple[int, ...] = ()
    """Digests of increasingly long prefixes of the prompt, salted with the tenant."""
    prefix_holder: PrefixHolder | None = None
    """Where the beginning of the prompt is cached, for a router that has just become leader; None: unknown."""
    prompt_digest: int = 0
    """Digest of the payload, salted with the tenant, which identifies prompts that fail repeatedly; 0: unknown."""
    client_id: str = ""
    """Client id sent by the caller; empty: none."""
    asked_model: str = ""
    """The alias that the caller requested; empty: it requested `model` directly."""
    caller: str = ""
    """The sender: `key:<id>`, `service:<name>` or `local`; empty: unknown."""
    labels: frozenset[str] = frozenset()
    """Labels for conditions of routes, as KEY=VALUE."""
    task_id: str = ""
    """The task of this attempt; empty: none. Only set inside the router, never sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolQueue:
    """The load of a pool or a route."""

    pool: str
    """The pool's name, or `route/` and the route's name."""
    waiting: int
    max_waiting: int
    """Maximum number of waiting requests."""
    running: int
    """Requests running on its models under any name."""
    average_wait_seconds: float | None = None
    """Average over recently placed requests; None: there were none."""
