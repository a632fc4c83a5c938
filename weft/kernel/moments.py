"""Moments that were written down and are compared with a clock later, perhaps after that clock was set back."""

from datetime import datetime, timedelta

CLOCK_MARGIN_SECONDS = 5.0
"""A written moment may lie further off than it can by this much: clocks of two machines differ, and are corrected."""


def seconds_ahead(made_at: datetime, now: datetime) -> timedelta:
    """How far in the future something was made that is there already; zero within the margin.

    Its maker's clock was ahead: every moment that was counted from then lies too far off by as much.
    """
    ahead = made_at - now
    return ahead if ahead > timedelta(seconds=CLOCK_MARGIN_SECONDS) else timedelta()
