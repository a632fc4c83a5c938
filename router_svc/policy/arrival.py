"""A request as the scheduler sees it: what it asks for, who asks, and until when."""

from dataclasses import field

from weft.kernel.abilities import ThinkingMode
from weft.kernel.names import DEFAULT_TENANT
from weft.kernel.request import Operation, Priority, Skill
from weft.kernel.value import value_class

ROUTE_PREFIX = "route/"
"""Prefix of a target that names a route."""
SURE_SHARE_OF_PROMPT = 0.5
"""Prompts are measured in characters, not tokens: only half of the estimate counts, so that no request is refused for a
context that it would have fitted into."""


@value_class()
class Needs:
    """What a candidate must have to serve a request. Requests with equal needs can stand in for each other."""

    operation: Operation
    allow_remote: bool = False
    skills: frozenset[Skill] = frozenset()
    thinking: ThinkingMode = ThinkingMode.DEFAULT
    tools: frozenset[str] = frozenset()
    context_tokens: int = 0
    """Rounded down to a power of two, so that there are few different needs; 0: unknown."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Needs are looked up several times per request, and all fields would be hashed each time.
        parts = (self.operation, self.allow_remote, self.skills, self.thinking, self.tools, self.context_tokens)
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash


@value_class(kw_only=True)
class Arrival:
    """A request as the scheduler sees it. Times are seconds on the router's monotonic clock."""

    key: int
    """The scheduler's own number for the request; callers may reuse their request ids."""
    target: str
    """A model or a pool, by name; or ROUTE_PREFIX and a route's name."""
    needs: Needs
    tenant: str = DEFAULT_TENANT
    priority: Priority = Priority.NORMAL
    arrived_at: float
    """When it first arrived at any router, so that a repeated placement keeps its place in the queue."""
    deadline_at: float | None = None
    attempts_used: int = 0
    """Attempts granted before it was placed here; attempt numbers continue from there."""
    prompt_tokens: int = 0
    """An estimate; 0: unknown."""
    max_output_tokens: int | None = None
    """None: not specified."""
    work: float = 0.0
    """Work of a request for an image, a transcription or speech, in the unit of its operation; see `WorkUnit`. 0: it is
    none, or unknown."""
    affinity_key: bytes = b""
    """Requests with the same key should go to the same runner; empty: none."""
    prefix_digests: tuple[int, ...] = ()
    """Digests of ever longer prefixes of its prompt, salted with its tenant."""
    prompt_digest: int = 0
    """Digest of its payload, salted with its tenant; 0: unknown."""


def context_class(prompt_tokens: int) -> int:
    """Return `Needs.context_tokens` for a prompt of about this many tokens."""
    sure = int(prompt_tokens * SURE_SHARE_OF_PROMPT)
    return 1 << (sure.bit_length() - 1) if sure else 0
