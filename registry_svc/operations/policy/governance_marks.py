"""Which tokens are too old to be believed, whatever they say: the high-water mark of issue times.

A nonce that was used is remembered in the database. Two things make a database forget: it is put back to an earlier
copy, or its memory of a nonce has run out and then a clock is set back. Against the first there is a witness outside of
the database that knows the newest issue time too: a witness that knows of later tokens than the database is proof of an
earlier copy, and every token as old as those is refused from then on. Against the second, nothing is admitted that was
issued longer before the newest token than any token lives. Tokens that arrive out of order within that time pass.
"""

import math
from dataclasses import dataclass

MICROSECONDS = 1_000_000
CLOCK_SET_BACK_SECONDS = 86_400.0
"""A clock that is set back by at most this much brings no used nonce back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What is known of issue times."""

    newest_microseconds: int = 0
    """The newest issue time that was ever admitted, since the epoch; 0: none was. Each token raises it by one at least,
    an older one too: so it tells how many there were, and a copy of a database that lacks any is seen to be one."""
    floor: float = 0.0
    """Tokens that were issued before this, in seconds since the epoch, are refused for good."""

    def raised_to(self, issued_at: float) -> "Marks":
        """With one more admitted token, issued at that many seconds since the epoch."""
        newest = max(self.newest_microseconds + 1, round(issued_at * MICROSECONDS))
        return Marks(newest_microseconds=newest, floor=self.floor)


def marks_at_start(stored: int | None, witnessed: Marks | None, *, started_at: float, skew: float) -> Marks:
    """Where to begin: `stored` is the newest mark of the database, `witnessed` what was known outside of it.

    Without a witness nobody knows what was admitted before. A database without a mark is then most likely new, and
    tokens from before the start are refused; one with a mark has lost its witness, and signers' clocks may have been
    ahead, so those are refused as well that a clock ahead by the skew made before the start.
    """
    known = stored or 0
    if witnessed is None:
        floor = math.floor(started_at) if stored is None else started_at + skew
        return Marks(newest_microseconds=known, floor=float(floor))
    newest = witnessed.newest_microseconds
    floor = witnessed.floor
    if newest > known:
        # The database was put back. Issue times are whole seconds: the first one after the newest.
        floor = max(floor, newest // MICROSECONDS + 1.0)
    return Marks(newest_microseconds=max(known, newest), floor=floor)


def fault_in_age(issued_at: float, marks: Marks, *, lifetime: float, skew: float) -> str | None:
    """Why a token is too old for the marks; None: it is not."""
    if issued_at < marks.floor:
        return "it was issued before the time from which on used tokens are known"
    if issued_at < marks.newest_microseconds / MICROSECONDS - lifetime - 2 * skew:
        return "it was issued long before the newest token"
    return None


def nonce_kept_until(expires_at: float, skew: float) -> float:
    """Until when the nonce of a token has to be remembered, in seconds since the epoch."""
    return expires_at + 2 * skew + CLOCK_SET_BACK_SECONDS
