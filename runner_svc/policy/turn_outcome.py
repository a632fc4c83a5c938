"""The next step of a chat after a turn. Pure."""

from enum import Enum


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


def next_step(
    *, cut: bool, mesh_calls: int, caller_calls: int, signals: int, has_answer: bool, has_gone_on: bool
) -> NextStep:
    """Returns the next step. A cut turn runs no tools; the caller's tools take precedence over the mesh's.

    `cut`: whether the engine ended the turn for length or content. `mesh_calls`: of tools that the mesh runs.
    `has_answer`: whether the caller has received text, in this turn or before. `has_gone_on`: whether another turn has
    already followed a turn with only signals.
    """
    if cut:
        return NextStep.END_CUT
    if caller_calls:
        return NextStep.END_WITH_CALLS
    if mesh_calls:
        return NextStep.RUN_TOOLS
    if not signals:
        return NextStep.END
    # One more turn is enough: a model that raises only signals twice has no answer.
    return NextStep.END_WITH_SIGNALS if has_answer or has_gone_on else NextStep.GO_ON
