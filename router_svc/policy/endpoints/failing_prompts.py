"""Prompts that engines recently answered with errors, and the endpoints that did.

If a prompt fails on several endpoints, its failures do not count against them.
"""

from dataclasses import dataclass
from enum import Enum

from router_svc.policy.endpoints.candidates import Candidate

MEMORY_SECONDS = 60.0
"""How long a prompt is known to fail. Its next failure then counts until another endpoint shares it again."""
MAX_PROMPTS = 1_024
"""Maximum remembered prompts; the oldest is dropped first."""


class FailureCause(Enum):
    """What a prompt's failures imply about the endpoint of the latest one."""

    UNKNOWN = "unknown"
    """Only this endpoint failed, so the failure counts against it."""
    SHARED = "shared"
    """Another endpoint failed with the same request."""
    PROMPT = "prompt"
    """Several endpoints failed with the prompt in more than one request."""


@dataclass(slots=True)
class FailingPrompt:
    """A prompt and the endpoints it failed on."""

    since: float
    request: int
    """The scheduler's key of the first request that failed."""
    failed_on: list[Candidate]
    counted_on: Candidate | None = None
    """The endpoint that its latest failure counts against."""
    is_refused: bool = False
    """Whether engines reported busy for all of its attempts while they answered other requests."""
    is_answered: bool = False
    """Whether an endpoint answered it, so that other requests with it do not show the cause."""

    def note(self, candidate: Candidate, request: int) -> FailureCause:
        """Record a failure and return its presumed cause."""
        if self.is_answered and request != self.request:
            self.request, self.failed_on, self.counted_on = request, [], None
        if all(each.key != candidate.key for each in self.failed_on):
            self.failed_on.append(candidate)
        if len(self.failed_on) == 1:
            return FailureCause.UNKNOWN
        return FailureCause.SHARED if request == self.request else FailureCause.PROMPT


class FailingPrompts:
    """The recently failed prompts of all queues."""

    def __init__(self) -> None:
        self._prompts: dict[tuple[str, int], FailingPrompt] = {}

    def of(self, queue: str, digest: int, request: int, now: float) -> FailingPrompt:
        """Return the record of a prompt that just failed. Without a digest, a request shares its prompt with none."""
        key = (queue, digest or -request)
        prompt = self._prompts.pop(key, None)
        if prompt is None or now - prompt.since >= MEMORY_SECONDS:
            prompt = FailingPrompt(now, request, [])
            if len(self._prompts) >= MAX_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
        self._prompts[key] = prompt
        return prompt

    def is_refused(self, queue: str, digest: int, now: float) -> bool:
        """Whether engines refuse a prompt while they answer others."""
        prompt = self._prompts.get((queue, digest))
        return prompt is not None and prompt.is_refused and now - prompt.since < MEMORY_SECONDS

    def note_answer(self, queue: str, digest: int) -> None:
        """Record that an endpoint answered a prompt."""
        prompt = self._prompts.get((queue, digest))
        if prompt is not None:
            prompt.is_answered, prompt.is_refused = True, False
