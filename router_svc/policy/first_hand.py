"""What runners said themselves where the registry's last word is another.

The registry may be away: then its view stands still while models go on falling asleep and waking.
"""

from dataclasses import replace

from router_svc.policy.candidates import Candidate, Readiness


class FirstHand:
    """Remembers, per model of the fleet at most, what its runner said and against which word of the registry."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[Candidate, Readiness]] = {}

    def note(self, told: Candidate | None, readiness: Readiness) -> None:
        """Its runner said this. What is told to be down, or is not in the fleet (None), has no say."""
        if told is not None and told.readiness is not Readiness.DOWN:
            self._said[told.model] = (told, readiness)

    def corrected(self, told: Candidate) -> Candidate:
        """The model with what its runner said; whatever the registry has told anew since then counts again."""
        said = self._said.get(told.model)
        if said is None:
            return told
        if said[0] != told:
            del self._said[told.model]
            return told
        return replace(told, readiness=said[1])

    def forget(self, model: str) -> None:
        """It is not in the mesh any more."""
        self._said.pop(model, None)
