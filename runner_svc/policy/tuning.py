"""The search for a model's best load parameters: which are varied, how trials are judged, and when a search yields.

Pure: values in, decisions out. `weft models tune` measures the trials.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from weft.kernel.errors.error_tree import invalid_field

if TYPE_CHECKING:
    from weft.kernel.models.load_parameters import LoadValue

TYPICAL_PROMPT_TOKENS = 1000
TYPICAL_ANSWER_TOKENS = 200
"""The request whose duration is minimized."""
MIN_GAIN = 0.05
"""Share by which a trial must be faster than the present settings: smaller differences are noise."""
Settings: TypeAlias = "Mapping[str, LoadValue]"
Space: TypeAlias = "Mapping[str, Sequence[LoadValue]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedParameter:
    """A load parameter that a search varies, with the values it tries. Its runtime declares it."""

    name: str
    values: "Sequence[LoadValue]" = ()
    """Empty: numbers of processors of the machine."""
    needs_accelerator: bool = False
    needs: str = ""
    """Load parameter that must be configured for this one to have an effect; empty: none."""
    unless_embeds: bool = False
    """Whether it has no effect on a model that also serves embeddings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningFacts:
    """What decides which parameters of a model are varied."""

    cpu_count: int
    has_accelerator: bool = False
    embeds: bool = False
    known: Collection[str] = ()
    """The model's load parameters."""
    configured: Settings = field(default_factory=dict)
    """Values in the model's settings; varied only if asked for."""


def space_of(declared: Iterable[TunedParameter], facts: TuningFacts, asked: Collection[str] = ()) -> Space:
    """Returns the values to try by parameter.

    `asked` restricts the search to these parameters and includes configured ones. Raises INVALID_ARGUMENT naming
    `vary` if one of them cannot be varied, or nothing is left.
    """
    possible = {
        each.name: each.values or _processor_counts(facts.cpu_count)
        for each in declared
        if each.name in facts.known
        and (facts.has_accelerator or not each.needs_accelerator)
        and (not each.needs or facts.configured.get(each.needs, "none") != "none")
        and not (facts.embeds and each.unless_embeds)
    }
    for name in asked:
        if name not in possible:
            names = ", ".join(possible) or "none"
            raise invalid_field("vary", f"{name[:64]} cannot be varied for this model; these can: {names}")
    chosen = asked or [name for name in possible if name not in facts.configured]
    space = {name: values for name, values in possible.items() if name in chosen and len(values) > 1}
    if not space:
        raise invalid_field("vary", "the model's settings fix every parameter that can be varied; name some")
    return space


def _processor_counts(cpu_count: int) -> "Sequence[LoadValue]":
    return sorted({count for count in (1, cpu_count // 4, cpu_count // 2, cpu_count - 1, cpu_count) if count > 0})


class TrialEnd(StrEnum):
    """How a trial ended."""

    MEASURED = "measured"
    WORSE = "worse"
    """Measured, but its answers differ too much."""
    REFUSED = "refused"
    """The engine does not take the settings."""
    FAILED = "failed"
    """The engine did not start, or a request failed."""
    INTERRUPTED = "interrupted"
    """A caller came; it is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measurements of a trial."""

    prompt_tokens_per_second: float
    output_tokens_per_second: float
    memory_bytes: int = 0
    load_seconds: float = 0.0
    agreement: float = 1.0
    """Share of tokens that equal those of the present settings, see `agreement`."""

    @property
    def request_seconds(self) -> float:
        """Duration of a typical request, which the search minimizes."""
        return (
            TYPICAL_PROMPT_TOKENS / self.prompt_tokens_per_second
            + TYPICAL_ANSWER_TOKENS / self.output_tokens_per_second
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attempt to measure settings. The first one has the present settings, which have no parameters here."""

    number: int
    settings: Settings = field(default_factory=dict)
    end: TrialEnd
    detail: str = ""
    figures: Figures | None = None


def end_of(figures: Figures, min_agreement: float) -> TrialEnd:
    """Returns how a measured trial ended."""
    return TrialEnd.MEASURED if figures.agreement >= min_agreement else TrialEnd.WORSE


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Returns the fastest trial; None: none is clearly faster than the first one, the present settings."""
    measured = [each for each in trials if each.end is TrialEnd.MEASURED and each.figures is not None]
    if len(measured) < 2 or measured[0] is not trials[0]:
        return None
    winner = min(measured[1:], key=_seconds)
    return winner if is_faster(winner, trials[0]) else None


def is_faster(trial: Trial, present: Trial) -> bool:
    """Whether a measured trial is faster than the present settings by more than noise."""
    return _seconds(trial) <= (1 - MIN_GAIN) * _seconds(present)


def _seconds(trial: Trial) -> float:
    return float("inf") if trial.figures is None else trial.figures.request_seconds


def agreement(present: Sequence[str], found: Sequence[str]) -> float:
    """Returns the share of greedy continuations that are equal.

    The prompts are pieces of one fixed text, so a difference does not spread to later continuations.
    """
    equal = sum(one == other for one, other in zip(present, found, strict=True))
    return equal / len(present) if present else 0.0


def foreign_requests(
    requests: Iterable[Mapping[str, str]], client_id: str, elsewhere: Collection[str]
) -> Sequence[Mapping[str, str]]:
    """Returns the unfinished requests to which a search yields.

    All but its own ones, and those for models of other machines (`elsewhere`). A request for a pool, route or agent may
    come to this machine.
    """
    return [
        each
        for each in requests
        if each.get("state") != "ended" and each.get("clientId") != client_id and each.get("target") not in elsewhere
    ]
