"""What happened to single requests, in words."""

from collections.abc import Collection

from router_svc.policy.decisions import Loads, Placed, Rejects, RequestDecision, Waits
from router_svc.policy.endpoints.choice import Considered
from router_svc.simulation.serving import Attempt
from router_svc.simulation.traffic import SimulatedRequest
from weft.kernel.reasons import Reason

MAX_LINES = 1_000
"""Of one request; what comes after is not kept."""


class Story:
    """Keeps the words about the requests that it was asked to keep them of."""

    def __init__(self, keys: Collection[int]) -> None:
        self.lines: dict[int, list[tuple[float, str]]] = {key: [] for key in keys}
        """By request: when, and what."""

    def arrived(self, request: SimulatedRequest) -> None:
        """It arrives."""
        arrival = request.arrival
        if arrival.key in self.lines:
            until = "" if arrival.deadline_at is None else f", to be over by {arrival.deadline_at:.2f}"
            words = (
                f"arrives: {arrival.tenant} asks for {arrival.target}, priority {arrival.priority.name.lower()}, "
                f"{arrival.prompt_tokens} prompt tokens, {request.output_tokens} to come{until}"
            )
            self._add(arrival.key, arrival.arrived_at, words)

    def decided(self, key: int, now: float, decision: RequestDecision) -> None:
        """A decision about it."""
        if key not in self.lines:
            return
        match decision:
            case Placed():
                choice = decision.choice
                how = f" by {choice.policy}, one of {choice.count}" if choice is not None else ""
                self._add(key, now, f"attempt {decision.attempt} on {decision.candidate.model}{how}")
                self._consider(key, now, choice.considered if choice is not None else ())
            case Waits():
                eta = "" if decision.eta_seconds is None else f", about {decision.eta_seconds:.1f} s"
                self._add(key, now, f"waits at place {decision.position}: {decision.reason}{eta}")
                self._consider(key, now, decision.considered)
            case Loads():
                eta = "" if decision.eta_seconds is None else f", about {decision.eta_seconds:.1f} s"
                self._add(key, now, f"waits for a load: {decision.stage}{eta}")
            case Rejects():
                self._add(key, now, f"refused: {decision.message}")

    def failed(self, key: int, now: float, attempt: Attempt, reason: Reason) -> None:
        """An attempt failed before any content."""
        if key in self.lines:
            self._add(key, now, f"attempt {attempt.number} failed: {reason.name.lower()}")

    def over(self, key: int, now: float, reason: Reason | None) -> None:
        """It is over."""
        if key in self.lines:
            self._add(key, now, "served" if reason is None else f"over: {reason.name.lower()}")

    def _consider(self, key: int, now: float, considered: tuple[Considered, ...]) -> None:
        for one in considered:
            words = "chosen" if one.chosen else one.gate or "free"
            self._add(key, now, f"  {one.model} on {one.runner}, score {one.score:.2f}: {words}")

    def _add(self, key: int, now: float, words: str) -> None:
        lines = self.lines[key]
        if len(lines) < MAX_LINES:
            lines.append((now, words))
