"""What a dispatcher asks of a scheduler for one request."""

from typing import NamedTuple

from weft.kernel.abilities import ThinkingMode
from weft.kernel.request import Operation, Priority, Skill
from weft.kernel.value import value_class


class PrefixHolder(NamedTuple):
    """The endpoint that last served a prompt with the same beginning, as the dispatcher remembers it."""

    model: str
    runner: str
    incarnation: str
    digest_count: int
    """Number of equal digests."""


@value_class(kw_only=True)
class PlacementRequest:
    """A request as the scheduler sees it. The prompt stays with the dispatcher."""

    request_id: str
    tenant: str
    model: str
    """A model or a pool, by name; or `route/` and a route's name."""
    operation: Operation
    priority: Priority = Priority.NORMAL
    names_priority: bool = True
    """Whether the caller named that class; else its client's profile may set another."""
    allow_remote: bool = False
    age_seconds: float = 0.0
    """How long ago it first arrived: a request placed again after a lost router keeps its age."""
    seconds_left: float | None = None
    """Time to its deadline; None: no deadline."""
    is_counted: bool = False
    """Whether an earlier placement of it was counted by the limits of its tenant and client."""
    attempts_used: int = 0
    """Attempts granted by an earlier placement of it; attempt numbers go on from there."""
    traceparent: str = ""
    """W3C trace context; empty: none. Passed on unread."""
    prompt_tokens: int = 0
    """An estimate; 0: unknown."""
    max_output_tokens: int | None = None
    """None: unset."""
    work: float = 0.0
    """Work of a request for an image, a transcription or speech; see `media_work`. 0: it is none, or unknown."""
    skills: frozenset[Skill] = frozenset()
    """Required abilities of its model."""
    thinking: ThinkingMode = ThinkingMode.DEFAULT
    """How it sets the model's thinking."""
    tools: frozenset[str] = frozenset()
    """Required tools of its runner."""
    affinity_key: bytes = b""
    """Requests with the same key should go to the same runner; empty: none."""
    prefix_digests: tuple[int, ...] = ()
    """Digests of ever longer beginnings of its prompt, salted with its tenant."""
    prefix_holder: PrefixHolder | None = None
    """Tells a router that leads since a moment ago where the beginning of the prompt is cached; None: unknown."""
    prompt_digest: int = 0
    """Digest of its payload, salted with its tenant: a prompt that fails again is known by it; 0: unknown."""
    client_id: str = ""
    """The client id that the caller states; empty: none."""
    asked_model: str = ""
    """The name that the caller asked for, where an alias stood for `model`; empty: it asked for no alias."""
    caller: str = ""
    """Who sent it: `key:<id>`, `service:<name>` or `local`; empty: not known."""
    task_id: str = ""
    """The task that it is an attempt of; empty: none. Tasks are placed inside the router: it does not travel."""
