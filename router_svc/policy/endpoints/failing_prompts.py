"""Prompts that engines lately answered with errors, and the endpoints that did.

A prompt that fails on several endpoints is what their failures have in common: they say nothing about the endpoints.
"""

from dataclasses import dataclass
from enum import Enum

from router_svc.policy.endpoints.candidates import Candidate

MEMORY_SECONDS = 60.0
"""How long a prompt is known to fail; after that its next failure counts, until another endpoint shares it again."""
MAX_PROMPTS = 1_024
"""Prompts that are remembered; the oldest is dropped first."""


class FailureCause(Enum):
    """What the failures of a prompt so far say about the endpoint of the latest one."""

    UNKNOWN = "unknown"
    """Only this endpoint failed: the failure counts against it."""
    SHARED = "shared"
    """Another endpoint failed with the same request."""
    PROMPT = "prompt"
    """Several endpoints failed with the prompt in more than one request."""


@dataclass(slots=True)
class FailingPrompt:
    """One prompt and where it failed."""

    since: float
    request: int
    """The scheduler's number for the first request that failed."""
    failed_on: list[Candidate]
    counted_on: Candidate | None = None
    """The endpoint against which its latest failure counts."""
    is_refused: bool = False
    """Whether an engine called itself busy for as long as it was tried, and answered other requests meanwhile."""
    is_answered: bool = False
    """Whether an endpoint answered it: other requests with it say nothing about the cause."""

    def note(self, candidate: Candidate, request: int) -> FailureCause:
        """Record a failure and return what is known of its cause."""
        if self.is_answered and request != self.request:
            self.request, self.failed_on, self.counted_on = request, [], None
        if all(each.key != candidate.key for each in self.failed_on):
            self.failed_on.append(candidate)
        if len(self.failed_on) == 1:
            return FailureCause.UNKNOWN
        return FailureCause.SHARED if request == self.request else FailureCause.PROMPT


class FailingPrompts:
    """The prompts of all queues that failed lately."""

    def __init__(self) -> None:
        self._prompts: dict[tuple[str, int], FailingPrompt] = {}

    def of(self, queue: str, digest: int, request: int, now: float) -> FailingPrompt:
        """Return what is known of a prompt of a queue that just failed.

        A request without a digest has a prompt that no other request has.
        """
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
