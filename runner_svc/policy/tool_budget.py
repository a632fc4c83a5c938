"""What follows a turn in which a model called functions. Pure."""

from dataclasses import dataclass, replace
from enum import Enum


@dataclass(frozen=True, slots=True)
class ToolBudget:
    """How often a model may still be asked again with results of tools."""

    left: int

    @property
    def exhausted(self) -> bool:
        """Whether no more tools are offered."""
        return self.left <= 0

    def spend(self) -> "ToolBudget":
        """One round of tools is over."""
        return replace(self, left=self.left - 1)


class NextStep(Enum):
    """What follows a turn."""

    END = "end"
    """The answer is over, as the engine said."""
    END_CUT = "end_cut"
    """The token limit or a filter ended the turn: calls in it are not run, the last of them may be half a call."""
    END_WITH_CALLS = "end_with_calls"
    """The caller runs its tools; the mesh runs none."""
    END_WITH_SIGNALS = "end_with_signals"
    """The model said what it had to say and raised signals."""
    RUN_TOOLS = "run_tools"
    """Tools are run and the model is asked again."""
    GO_ON = "go_on"
    """The model only raised signals: it is told that they were noted, and asked for its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """What a turn came to."""

    cut: bool
    """Whether the engine ended it for length or content."""
    mesh_calls: int
    """Calls of tools that the mesh runs."""
    caller_calls: int
    """Calls that went to the caller."""
    signals: int
    has_answer: bool
    """Whether there was any text for the caller, in this turn or before."""
    has_gone_on: bool
    """Whether the model has already been asked again after signals alone."""


def next_step(turn: TurnFacts) -> NextStep:
    """What follows. A turn that was cut runs nothing; the caller's tools go before the mesh's."""
    if turn.cut:
        return NextStep.END_CUT
    if turn.caller_calls:
        return NextStep.END_WITH_CALLS
    if turn.mesh_calls:
        return NextStep.RUN_TOOLS
    if not turn.signals:
        return NextStep.END
    # One more try is enough: a model that answers a second time with nothing but signals has no more to say.
    return NextStep.END_WITH_SIGNALS if turn.has_answer or turn.has_gone_on else NextStep.GO_ON
