"""The tool budget of a chat, and the next step after a turn. Pure."""

from dataclasses import dataclass, replace
from enum import Enum


@dataclass(frozen=True, slots=True)
class ToolBudget:
    """The number of remaining tool rounds."""

    left: int

    @property
    def exhausted(self) -> bool:
        """Whether no tools are offered any more."""
        return self.left <= 0

    def spend(self) -> "ToolBudget":
        """Returns the budget after another round."""
        return replace(self, left=self.left - 1)


class NextStep(Enum):
    """The step after a turn."""

    END = "end"
    """The answer has ended, as the engine reported."""
    END_CUT = "end_cut"
    """The token limit or a filter ended the turn: its calls are not run, because the last one may be incomplete."""
    END_WITH_CALLS = "end_with_calls"
    """The caller runs its tools; the mesh runs none."""
    END_WITH_SIGNALS = "end_with_signals"
    RUN_TOOLS = "run_tools"
    GO_ON = "go_on"
    """The model only raised signals: they are acknowledged, and another turn follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """A finished turn."""

    cut: bool
    """Whether the engine ended it for length or content."""
    mesh_calls: int
    """Calls of tools that the mesh runs."""
    caller_calls: int
    """Calls that were sent to the caller."""
    signals: int
    has_answer: bool
    """Whether the caller has received text, in this turn or before."""
    has_gone_on: bool
    """Whether another turn has already followed a turn with only signals."""


def next_step(turn: TurnFacts) -> NextStep:
    """Returns the next step. A cut turn runs no tools; the caller's tools take precedence over the mesh's."""
    if turn.cut:
        return NextStep.END_CUT
    if turn.caller_calls:
        return NextStep.END_WITH_CALLS
    if turn.mesh_calls:
        return NextStep.RUN_TOOLS
    if not turn.signals:
        return NextStep.END
    # One more turn is enough: a model that raises only signals twice has no answer.
    return NextStep.END_WITH_SIGNALS if turn.has_answer or turn.has_gone_on else NextStep.GO_ON
