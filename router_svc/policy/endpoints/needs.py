"""What a request needs of the candidates that can serve it."""

from dataclasses import field

from weft.kernel.abilities import ThinkingMode
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.request import Operation, Skill
from weft.kernel.value import value_class

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


def needs_of(spec: PlacementRequest, *, allow_remote: bool) -> Needs:
    """Return the needs of a request; `allow_remote`: the permit of both the request and its tenant."""
    return Needs(
        operation=spec.operation,
        allow_remote=allow_remote,
        skills=spec.skills,
        thinking=spec.thinking,
        tools=spec.tools,
        context_tokens=context_class(spec.prompt_tokens),
    )


def context_class(prompt_tokens: int) -> int:
    """Return `Needs.context_tokens` for a prompt of about this many tokens."""
    sure = int(prompt_tokens * SURE_SHARE_OF_PROMPT)
    return 1 << (sure.bit_length() - 1) if sure else 0
