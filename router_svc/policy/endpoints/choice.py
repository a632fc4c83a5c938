"""The requirements and the result of an endpoint selection."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Needs
from router_svc.policy.endpoints.first_token import FirstToken
from weft.kernel.requests.placement_request import PrefixHolder
from weft.kernel.values.fast_dataclass import fast_dataclass

MAX_CONSIDERED = 16
"""Maximum candidates that a choice lists; the rest are only counted."""
SHOWN_OF_MANY = 4
"""Candidates listed for a choice among more than MAX_CONSIDERED: choices are too frequent to describe all."""

FREE = 5
"""Base score of a free candidate; its rank among the free ones adds at most 1."""


class PickRequest(NamedTuple):
    """Requirements of a request for its endpoint. A tuple, as one is created for every attempt."""

    needs: Needs
    excluded: frozenset[CandidateKey] = frozenset()
    """Candidates on which an attempt of the request failed."""
    affinity_key: bytes = b""
    prefix_digests: tuple[int, ...] = ()
    prefix_holder: PrefixHolder | None = None
    prompt_tokens: int = 0
    """Estimated; 0: unknown, or no prompt."""
    seed: int = 0
    """Seed of random selections; equal seeds select the same endpoint."""


@fast_dataclass(kw_only=True)
class Considered:
    """A candidate as seen by a decision."""

    model: str
    runner: str
    score: float
    """Candidates with higher scores are preferred."""
    gate: str = ""
    """Why it was not chosen, as text; empty: it could have been chosen."""
    chosen: bool = False
    engine_load: str = ""
    """Why it counts as busier than its slots show, and its expected time to the first token, as text; each part is
    omitted if it does not apply."""


@fast_dataclass(kw_only=True)
class Choice:
    """A selected candidate, the policy that selected it, and the alternatives."""

    candidate: Candidate
    policy: str
    score: float
    """Comparable with the scores of the others."""
    others: tuple[Considered, ...] = ()
    """In order of preference. If there are many, a recent sample, which may contain the selected one."""
    count: int = 1
    engine_load: str = ""
    """See `Considered.engine_load`."""
    expected: FirstToken | None = None
    """Its expected time to the first token; None: the policy does not use it."""
    times: Mapping[CandidateKey, FirstToken] = field(default_factory=dict, hash=False)
    """Expected times of all compared candidates."""

    @property
    def considered(self) -> tuple[Considered, ...]:
        """Return the selected candidate and the others in order of preference, at most MAX_CONSIDERED."""
        where = self.candidate
        chosen = Considered(
            model=where.model,
            runner=where.runner,
            score=self.score,
            chosen=True,
            engine_load=_with_time(self.engine_load, self.expected),
        )
        if not self.others:
            return (chosen,)
        others = [each for each in self.others if each.model != where.model]
        shown = SHOWN_OF_MANY if self.count > MAX_CONSIDERED else MAX_CONSIDERED
        return (chosen, *self._timed(others[: shown - 1]))

    def _timed(self, others: Sequence[Considered]) -> list[Considered]:
        """Add expected times to the first token, by which free candidates are ordered."""
        times = {(model, runner): time for (model, runner, _), time in self.times.items()}

        def timed(each: Considered) -> Considered:
            time = times.get((each.model, each.runner))
            if time is None:
                return each
            text = _with_time(each.engine_load, time)
            score = each.score if each.gate else FREE + 1 / (1 + time.seconds)
            return Considered(model=each.model, runner=each.runner, score=score, gate=each.gate, engine_load=text)

        return sorted(map(timed, others), key=lambda each: (-each.score, each.model))


def _with_time(engine_load: str, time: FirstToken | None) -> str:
    if time is None:
        return engine_load
    return f"{engine_load}; {time.explanation()}" if engine_load else time.explanation()
