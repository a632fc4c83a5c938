"""What runners said themselves where the registry's last word is another.

The registry may be away: then its view stands still while models go on falling asleep and waking.
"""

from dataclasses import replace

from router_svc.policy.candidates import Candidate, Fleet, Readiness


class FirstHand:
    """Remembers, per model of the fleet at most, what its runner said and against which word of the registry."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[Candidate, Readiness]] = {}

    def note(self, told: Fleet, model: str, readiness: Readiness) -> None:
        """Its runner said this. What is told to be down, or is not in the fleet, has no say."""
        candidate = next((candidate for candidate in told if candidate.model == model), None)
        if candidate is not None and candidate.readiness is not Readiness.DOWN:
            self._said[model] = (candidate, readiness)

    def corrected(self, told: Fleet) -> Fleet:
        """The fleet with what runners said; whatever the registry has told anew since then counts again."""
        if not self._said:
            return told
        known = {candidate.model: candidate for candidate in told}
        self._said = {model: said for model, said in self._said.items() if known.get(model) == said[0]}
        return Fleet.of(self._as_said(candidate) for candidate in told)

    def _as_said(self, candidate: Candidate) -> Candidate:
        said = self._said.get(candidate.model)
        return candidate if said is None else replace(candidate, readiness=said[1])
