"""What the selection of an endpoint starts from, and what it results in."""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import NamedTuple

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Needs
from router_svc.policy.endpoints.first_token import FirstToken
from weft.kernel.placement_request import PrefixHolder
from weft.kernel.value import value_class

MAX_CONSIDERED = 16
"""Candidates that a choice names; it counts the rest."""
SHOWN_OF_MANY = 4
"""Candidates that a choice among more than MAX_CONSIDERED names: choices are too frequent to describe them all."""

FREE = 5
"""Score of a free candidate, to which its worth among the free ones adds at most 1."""


class PickRequest(NamedTuple):
    """Requirements of a request for the endpoint that it is placed on. A tuple, since one is made for every attempt."""

    needs: Needs
    excluded: frozenset[CandidateKey] = frozenset()
    """Candidates on which an attempt of the request failed."""
    affinity_key: bytes = b""
    prefix_digests: tuple[int, ...] = ()
    prefix_holder: PrefixHolder | None = None
    prompt_tokens: int = 0
    """An estimate; 0: unknown, or no prompt."""
    seed: int = 0
    """Seed of random selections: the same seed selects the same endpoint."""


@value_class(kw_only=True)
class Considered:
    """One candidate as a decision saw it."""

    model: str
    runner: str
    score: float
    """The candidate with the higher score is preferred."""
    gate: str = ""
    """Why it was not chosen, as text; empty: nothing kept it from being chosen."""
    chosen: bool = False
    engine_load: str = ""
    """Why it counts as busier than its slots say, and the expected time to the first token there, as text; empty: the
    one does not hold, and the policy does not compare the other."""


@value_class(kw_only=True)
class Choice:
    """A selected candidate, the policy that selected it, and the alternatives."""

    candidate: Candidate
    policy: str
    score: float
    """Score of the selected candidate, comparable with those of the others."""
    others: tuple[Considered, ...] = ()
    """In order of preference. Of many, a recent sample, which may contain the selected one."""
    count: int = 1
    """Number of candidates that were considered."""
    engine_load: str = ""
    """As that of a considered candidate."""
    expected: FirstToken | None = None
    """The expected time to its first token; None: the policy does not compare it."""
    times: Mapping[CandidateKey, FirstToken] = field(default_factory=dict, hash=False)
    """The same of all candidates that were compared."""

    @property
    def considered(self) -> tuple[Considered, ...]:
        """Return the selected candidate and the others in order of preference, at most MAX_CONSIDERED.

        Computed on demand.
        """
        where = self.candidate
        chosen = Considered(
            model=where.model, runner=where.runner, score=self.score, chosen=True, engine_load=self.engine_load
        )
        others = [each for each in self.others if each.model != where.model]
        shown = SHOWN_OF_MANY if self.count > MAX_CONSIDERED else MAX_CONSIDERED
        return self._timed((chosen, *others[: shown - 1]))

    def _timed(self, considered: tuple[Considered, ...]) -> tuple[Considered, ...]:
        """Add the expected times to the first token; free candidates are ordered by them."""
        times = {(model, runner): time for (model, runner, _), time in self.times.items()}

        def timed(each: Considered) -> Considered:
            time = times.get((each.model, each.runner))
            if time is None:
                return each
            text = "; ".join(filter(None, (each.engine_load, time.explanation())))
            score = each.score if each.chosen or each.gate else FREE + 1 / (1 + time.seconds)
            return replace(each, engine_load=text, score=score)

        return tuple(sorted(map(timed, considered), key=lambda each: (-each.score, each.model)))
