"""Labels prompts `difficulty=hard` or `difficulty=easy` by their words and length.

This is a guess, not a measurement: it does not understand the prompt, and a short question can be hard. A better
labeler would be trained on answers that were judged.
"""

import re

LONG_CHARS = 6_000
"""A longer prompt counts as hard."""
_HARD = re.compile(
    r"\b(prove|proof|derive|debug|refactor|optimi[sz]e|architecture|design|trade-?offs?|step by step|race condition|"
    r"deadlock|algorithm|complexity|stack trace|traceback)\b|```",
    re.IGNORECASE,
)


def labels_of(prompt: str) -> dict[str, str]:
    """Returns the label of a prompt: its messages, each after its role, separated by blank lines."""
    question = prompt.rpartition("\n\nuser: ")[2]
    is_hard = len(prompt) > LONG_CHARS or _HARD.search(question) is not None
    return {"difficulty": "hard" if is_hard else "easy"}
