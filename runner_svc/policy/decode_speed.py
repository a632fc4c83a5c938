"""How fast an engine generated, from when its tokens arrived."""

MIN_MEASURED_SECONDS = 0.05
"""From the first to the last token. In less time they arrived together, and say nothing of how they were made."""


def tokens_per_second(tokens: int, first_at: float | None, last_at: float | None) -> float | None:
    """The speed of so many tokens of which the first and the last arrived then; None: it cannot be told."""
    if tokens < 2 or first_at is None or last_at is None or last_at - first_at < MIN_MEASURED_SECONDS:
        return None
    return (tokens - 1) / (last_at - first_at)
